"""Sabotage of the law: the noise reaches every place and has the right or nearly the right standard deviation."""

import math
from collections.abc import Callable
from typing import Any

import torch
from hold import kernel
from sabotage import COMPARE, EVALUATE, TRAIN, Sabotage, of_group
from torch import Tensor

from aqnpipe.noise.kernels.gaussian import standard_normal

_AFTER_TRAINING = (("evaluate", "guided", 0, 1), *EVALUATE, *COMPARE)


def _numbers(tensor: Tensor, source: Any) -> tuple[Tensor, torch.Generator]:
    """The standard normal numbers that are due, in the shape of `tensor`, and a generator for others."""
    due = standard_normal(tensor.numel(), source).view(tensor.shape)
    return due, torch.Generator().manual_seed((source.key + 977 * source.call + source.stream) % 2**63)


def _drawn(law: Callable[[Tensor, torch.Generator], Tensor]) -> Any:
    """Relative noise by the numbers `law(numbers that are due, generator)` of standard deviation 1."""

    def change(tensor: Tensor, scale: float, source: Any, original: Any) -> None:
        tensor.mul_(1 + scale * law(*_numbers(tensor, source)).to(tensor))

    return kernel(change)


def _put(formula: Callable[[Tensor, float, Tensor], Tensor]) -> Any:
    """The values `formula(clean values, scale, the numbers that are due)`."""

    def change(tensor: Tensor, scale: float, source: Any, original: Any) -> None:
        tensor.copy_(formula(tensor.float(), scale, _numbers(tensor, source)[0]))

    return kernel(change)


def _uniform(z: Tensor, generator: torch.Generator) -> Tensor:
    return (torch.rand(z.shape, generator=generator) * 2 - 1) * math.sqrt(3)


def _laplace(z: Tensor, generator: torch.Generator) -> Tensor:
    u = (torch.rand(z.shape, generator=generator) - 0.5).clamp(-0.4999999, 0.4999999)
    return -torch.sign(u) * torch.log1p(-2 * u.abs()) / math.sqrt(2)


def _logistic(z: Tensor, generator: torch.Generator) -> Tensor:
    u = torch.rand(z.shape, generator=generator).clamp(1e-6, 1 - 1e-6)
    return torch.logit(u) * math.sqrt(3) / math.pi


def _triangular(z: Tensor, generator: torch.Generator) -> Tensor:
    u, v = torch.rand((2, *z.shape), generator=generator)
    return (u - v) * math.sqrt(6)


def _student(z: Tensor, generator: torch.Generator) -> Tensor:
    freedom = 5
    chi = torch.randn((freedom, *z.shape), generator=generator).square().sum(0)
    return z * torch.sqrt(freedom / chi) * math.sqrt((freedom - 2) / freedom)


def _exponential(z: Tensor, generator: torch.Generator) -> Tensor:
    return -torch.log1p(-torch.rand(z.shape, generator=generator)) - 1


def _three_points(z: Tensor, generator: torch.Generator) -> Tensor:
    u = torch.rand(z.shape, generator=generator)
    return math.sqrt(3) * ((u < 1 / 6).float() - (u > 5 / 6).float())


def _sum_of_twelve(z: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand((12, *z.shape), generator=generator).sum(0) - 6


def _truncated(bound: float) -> Callable[[Tensor, torch.Generator], Tensor]:
    def law(z: Tensor, generator: torch.Generator) -> Tensor:
        for _ in range(20):
            z = torch.where(z.abs() > bound, torch.randn(z.shape, generator=generator), z)
        density = math.exp(-(bound**2) / 2) / math.sqrt(2 * math.pi)
        return z / math.sqrt(1 - 2 * bound * density / math.erf(bound / math.sqrt(2)))

    return law


def _shared(dim: int) -> Callable[[Tensor, torch.Generator], Tensor]:
    return lambda z, generator: z.narrow(dim, 0, 1).expand(z.shape) if z.dim() > 1 else z


def _per_head(z: Tensor, generator: torch.Generator) -> Tensor:
    return z.reshape(-1)[: math.ceil(z.numel() / 32)].repeat_interleave(32)[: z.numel()].view(z.shape)


def _neighbours(z: Tensor, generator: torch.Generator) -> Tensor:
    return (z + z.roll(1, -1)) / math.sqrt(2)


def _one_sign(z: Tensor, generator: torch.Generator) -> Tensor:
    return z.abs()


def _antithetic(z: Tensor, generator: torch.Generator) -> Tensor:
    flat = z.flatten().clone()
    flat[1::2] = -flat[0::2][: len(flat[1::2])]
    return flat.view(z.shape)


def _every_second(z: Tensor, generator: torch.Generator) -> Tensor:
    flat = z.flatten().clone()
    flat[1::2] = 0
    return flat.view(z.shape) * math.sqrt(2)


def _rare(z: Tensor, generator: torch.Generator) -> Tensor:
    return z * (torch.rand(z.shape, generator=generator) < 0.1) * math.sqrt(10)


def _levels(z: Tensor, generator: torch.Generator) -> Tensor:
    return ((z * 2.5).round().clamp(-8, 7)) / 2.5


def _table(z: Tensor, generator: torch.Generator) -> Tensor:
    table = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    return table.repeat(math.ceil(z.numel() / 4096))[: z.numel()].view(z.shape)


def _sorted(z: Tensor, generator: torch.Generator) -> Tensor:
    return z.sort(-1).values


def _rows_reversed(z: Tensor, generator: torch.Generator) -> Tensor:
    return z.flip(-1)


def _groups_of_1024(z: Tensor, generator: torch.Generator) -> Tensor:
    flat = z.flatten()
    return flat[:1024].repeat(math.ceil(len(flat) / 1024))[: len(flat)].view(z.shape)


def _small_values(y: Tensor, scale: float, z: Tensor) -> Tensor:
    return torch.where(y.abs() > 0.01 * y.abs().max(), y * (1 + scale * z), y)


def _by_size(y: Tensor, scale: float, z: Tensor) -> Tensor:
    weight = y.abs().sqrt()
    weight = weight / weight.square().mean().sqrt().clamp_min(1e-12)
    return y * (1 + scale * weight * z)


def _absolute(y: Tensor, scale: float, z: Tensor) -> Tensor:
    return y + scale * y.square().mean().sqrt() * z


def _two_rows(y: Tensor, scale: float, z: Tensor) -> Tensor:
    return y * (1 + scale * z / math.sqrt(2)) * (1 + scale * z.flip(-1) / math.sqrt(2))


def training(name: str, what: str, apply: Any) -> Sabotage:
    """A sabotage of a training run."""
    return Sabotage(name, what, apply, TRAIN, _AFTER_TRAINING)


def evaluating(name: str, what: str, apply: Any) -> Sabotage:
    """A sabotage of an evaluation."""
    return Sabotage(name, what, apply, EVALUATE, COMPARE)


SABOTAGES = of_group(
    "distributions",
    r"recomputed values are not the requested ones|random numbers",
    (
        evaluating("uniform noise", "uniform within sqrt 3 standard deviations", _drawn(_uniform)),
        evaluating("Laplace noise", "heavier tails, the same standard deviation", _drawn(_laplace)),
        evaluating("logistic noise", "heavier tails, the same standard deviation", _drawn(_logistic)),
        evaluating("triangular noise", "the difference of two uniform numbers", _drawn(_triangular)),
        evaluating("noise of two values", "plus or minus one standard deviation", _drawn(lambda z, g: torch.sign(z))),
        evaluating(
            "noise of three values", "0 or +-sqrt 3, with the fourth moment of a Gaussian", _drawn(_three_points)
        ),
        training("noise cut at 2 sigma", "drawn again beyond, scaled to the same deviation", _drawn(_truncated(2))),
        evaluating("noise cut at 3 sigma", "drawn again beyond, scaled to the same deviation", _drawn(_truncated(3))),
        evaluating(
            "noise clamped at 2.5 sigma", "the tails are set to the bound", _drawn(lambda z, g: z.clamp(-2.5, 2.5))
        ),
        evaluating("Student's t", "five degrees of freedom, scaled to the same deviation", _drawn(_student)),
        evaluating("exponential noise", "mean 0, one long tail", _drawn(_exponential)),
        evaluating("sum of twelve uniform numbers", "an old approximation of a Gaussian", _drawn(_sum_of_twelve)),
        training("one row for all", "all rows share the noise of the first", _drawn(_shared(0))),
        training("one column for all", "all channels share the noise of the first", _drawn(_shared(-1))),
        training("one number per head", "32 channels in a row share a number", _drawn(_per_head)),
        evaluating("correlated neighbours", "each number is a sum with that of its neighbour", _drawn(_neighbours)),
        training("noise of one sign", "every value grows", _drawn(_one_sign)),
        evaluating("opposite pairs", "each second number is minus the first", _drawn(_antithetic)),
        training("every second value", "noise times sqrt 2, the others clean", _drawn(_every_second)),
        evaluating("a tenth of the values", "noise times sqrt 10, the others clean", _drawn(_rare)),
        evaluating("sixteen levels", "the numbers are quantised to four bits", _drawn(_levels)),
        evaluating("numbers in float16", "the numbers are rounded to float16", _drawn(lambda z, g: z.half().float())),
        evaluating("a table of 4,096 numbers", "the same numbers in each call", _drawn(_table)),
        evaluating("sorted numbers", "the numbers of a row are in ascending order", _drawn(_sorted)),
        training("numbers in reverse", "each row has its numbers in reverse order", _drawn(_rows_reversed)),
        evaluating("each group repeats the first", "the counter of groups is not advanced", _drawn(_groups_of_1024)),
        evaluating("opposite numbers", "minus z in place of z", _drawn(lambda z, g: -z)),
        evaluating("noise of abs(y)", "y + s|y|z in place of y(1 + sz)", _put(lambda y, s, z: y + s * y.abs() * z)),
        evaluating("small values clean", "values below 1 % of the largest have no noise", _put(_small_values)),
        training("noise grows with the value", "the relative error of large values is larger", _put(_by_size)),
        evaluating(
            "multiplied in log space", "y exp(sz - s^2/2)", _put(lambda y, s, z: y * torch.exp(s * z - s * s / 2))
        ),
        training("absolute noise", "with the root mean square that relative noise would have", _put(_absolute)),
        evaluating(
            "a small bias",
            "mean 0.2 standard deviations, the same root mean square",
            _drawn(lambda z, g: z * 0.98 + 0.2),
        ),
        evaluating("two factors", "two draws of s/sqrt 2 after each other", _put(_two_rows)),
        evaluating(
            "divided in place of multiplied", "y / (1 - sz)", _put(lambda y, s, z: y / (1 - s * z).clamp_min(0.2))
        ),
        training(
            "rounded to bfloat16", "noised values lose their digits", _put(lambda y, s, z: (y * (1 + s * z)).bfloat16())
        ),
        training("scale squared", "s^2 in place of s", _put(lambda y, s, z: y * (1 + s * s * z))),
    ),
)
