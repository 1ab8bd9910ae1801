"""The router of a mixture of experts with known answers: its logits, the experts that it chooses, and their shares.

A router scores experts by the softmax of its logits, or by their sigmoid if it has a bias that corrects the choice. It
may choose groups of experts first. The host makes the same choice in float64. Tokens whose choice a rounding could
change are left out of that comparison, by the margin on the host, so a device never decides what is compared.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aqnpipe.diagnosis.checks import Check, compare
from aqnpipe.diagnosis.patterns import cancelling_operands, mantissas, running_operands, selection_weight
from aqnpipe.diagnosis.reference import FEW_ROWS, FLOAT32_EPS, LEAST_ROWS, PRODUCT_BITS, mantissa_bits, substituted
from aqnpipe.error_bounds import TWO_ROUNDINGS, sum_bound

ROUTER_SITE = "router"
ROUTER_ROWS = (LEAST_ROWS, 96, *FEW_ROWS)
"""Numbers of tokens of a call; kernels are chosen by it."""

_SPANS_OF_LOGITS = (16.0, 4.0, 1.0)
"""Differences of the largest and the smallest logit of a token."""
_CLEAR = 2.0**-18
"""Relative difference of two scores that no rounding in float32 bridges: a sigmoid, the bias, and a sum of two."""
_NUM_SUMMED = 32
_LEAST_INPUTS = 8
_BIAS_BITS = 8


def router_of(layer: nn.Module) -> nn.Module | None:
    """Return the router of a layer: a module named gate or router whose weight has a row per expert."""
    for path, module in layer.named_modules():
        weight = getattr(module, "weight", None)
        if path.rsplit(".", 1)[-1] in ("gate", "router") and isinstance(weight, nn.Parameter) and weight.ndim == 2:
            return module
    return None


@dataclass(frozen=True)
class _Settings:
    """Treatment of a router's logits. `bias` corrects the scores of the choice but not the shares."""

    bias: Tensor | None
    num_groups: int
    kept_groups: int
    is_normalised: bool
    factor: float


def probe_router(module: nn.Module, layer: int, generator: torch.Generator) -> list[Check]:
    """Return the checks of a router: its logits, the experts that it chooses for them, their shares, and its sums.

    Row e of the weight copies channel e, so a token has the logits that it carries, distinct and with full mantissas.
    No check where it returns anything but logits, shares and experts of every token, or has more experts than inputs.
    """
    weight = module.get_parameter("weight")
    count, hidden = weight.shape
    if count > hidden:
        return []
    logits = _drawn_logits(count, min(mantissa_bits(weight.dtype), PRODUCT_BITS), generator)
    settings = _settings(module, count, generator)
    identity = selection_weight(torch.arange(count), torch.ones(count, dtype=torch.float64), weight)
    checks: list[Check] = []
    for rows in ROUTER_ROWS:
        x = torch.zeros(rows, hidden, dtype=torch.float64)
        x[:, :count] = logits[:rows]
        output = _run(module, identity, settings.bias, x)
        if output is None:
            return []
        seen, shares, chosen = output
        checks += [
            compare("router", layer, ROUTER_SITE, logits[:rows], seen),
            _choice_check(layer, logits[:rows], chosen, settings),
            _shares_check(layer, logits[:rows], chosen, shares, settings),
        ]
    return checks + _sum_checks(module, layer, settings, generator)


def _settings(module: nn.Module, count: int, generator: torch.Generator) -> _Settings:
    """Return the settings of a router, with a test bias: positive, for masked groups may have a score of 0."""
    bias = getattr(module, "e_score_correction_bias", None)
    if isinstance(bias, Tensor):
        drawn = mantissas((count,), _BIAS_BITS, generator) * 2.0 ** -torch.randint(2, 5, (count,), generator=generator)
        bias = drawn.to(bias.dtype)
    return _Settings(
        bias=bias,
        num_groups=int(getattr(module, "num_group", 1) or 1),
        kept_groups=int(getattr(module, "topk_group", 1) or 1),
        is_normalised=bool(getattr(module, "norm_topk_prob", True)),  # Mixtral has no such setting and normalises
        factor=float(getattr(module, "routed_scaling_factor", 1.0) or 1.0),
    )


def _run(module: nn.Module, weight: Tensor, bias: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return on the host the logits, shares and experts of tokens `x`; None if the output is of another form."""
    own: Tensor = module.get_parameter("weight")
    replaced = [(own, weight)]
    for name, shown in (("bias", None), ("e_score_correction_bias", bias)):
        extra = getattr(module, name, None)
        if isinstance(extra, Tensor):
            replaced.append((extra, torch.zeros_like(extra) if shown is None else shown.to(extra)))
    with substituted(replaced):
        output = module(x.to(own.device, own.dtype))
    if not isinstance(output, tuple) or len(output) != 3 or not all(isinstance(part, Tensor) for part in output):
        return None
    logits, shares, chosen = (part.detach().cpu() for part in output)
    if logits.shape != (len(x), len(own)) or shares.shape != chosen.shape or chosen.is_floating_point():
        return None
    return logits, shares, chosen.long()


def _drawn_logits(count: int, bits: int, generator: torch.Generator) -> Tensor:
    """Return logits [tokens, experts]: distinct numbers of `bits` bits, close together or far apart."""
    ranks = torch.rand(max(ROUTER_ROWS), count, generator=generator).argsort(-1)
    moved = torch.rand(ranks.shape, generator=generator, dtype=torch.float64) - 0.5
    moved *= 0.5 if count <= 2 ** (bits - 4) else 0.0  # with more experts, rounding would make two of them equal
    spans = torch.tensor(_SPANS_OF_LOGITS, dtype=torch.float64)[torch.arange(len(ranks)) % len(_SPANS_OF_LOGITS)]
    logits = (ranks - count / 2 + 0.5 + moved) * (spans / count).unsqueeze(1)
    unit = torch.ldexp(torch.ones_like(logits), torch.frexp(logits).exponent - bits)
    return (logits / unit).round() * unit


def _choice_check(layer: int, logits: Tensor, chosen: Tensor, settings: _Settings) -> Check:
    """Compare the chosen experts of every token with those of the host, in any order, where the choice is clear."""
    count = logits.shape[-1]
    scores = _scores(logits, settings)
    is_clear = torch.ones(len(logits), dtype=torch.bool)
    if settings.bias is not None:
        scores = scores + settings.bias.double()
    if settings.num_groups > 1:
        grouped = scores.unflatten(-1, (settings.num_groups, -1))
        kept, is_clear = _largest(grouped.topk(2, -1).values.sum(-1), settings.kept_groups)
        scores = torch.where(kept.unsqueeze(-1), grouped, -torch.inf).flatten(1)
    wanted, is_clear_too = _largest(scores, chosen.shape[-1])
    is_clear = is_clear & is_clear_too
    # An expert that does not exist equals none, and one chosen twice counts once.
    found = (chosen.unsqueeze(-1) == torch.arange(count)).any(1)
    return compare("router", layer, ROUTER_SITE, wanted[is_clear].double(), found[is_clear].double())


def _scores(logits: Tensor, settings: _Settings) -> Tensor:
    return logits.softmax(-1) if settings.bias is None else logits.sigmoid()


def _largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return which `count` scores of each row are the largest, and for which rows this is clear."""
    ordered, order = scores.sort(-1, descending=True)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order[:, :count], True)
    if count >= scores.shape[-1]:
        return chosen, torch.ones(len(scores), dtype=torch.bool)
    last, next_one = ordered[:, count - 1], ordered[:, count]
    return chosen, last - next_one > _CLEAR * last.abs()


def _shares_check(layer: int, logits: Tensor, chosen: Tensor, shares: Tensor, settings: _Settings) -> Check:
    """Compare the shares of the chosen experts with their scores, as they are or with sum 1."""
    number_format = torch.finfo(shares.dtype)
    eps = 0.0 if shares.dtype == torch.float32 else number_format.eps
    wanted = _scores(logits, settings).gather(1, chosen.clamp(0, logits.shape[-1] - 1))
    if settings.is_normalised:
        wanted = wanted / wanted.sum(-1, keepdim=True)
    wanted = wanted * settings.factor
    allowed = (16 * FLOAT32_EPS + TWO_ROUNDINGS * eps) * wanted + number_format.tiny
    return compare("router", layer, ROUTER_SITE, wanted, shares, allowed=allowed)


def _sum_checks(module: nn.Module, layer: int, settings: _Settings, generator: torch.Generator) -> list[Check]:
    """Compare logits that are sums of many products, which a narrow accumulator gets wrong."""
    weight = module.get_parameter("weight")
    count, hidden = weight.shape
    if hidden < _LEAST_INPUTS:
        return []
    checks = []
    for make in (cancelling_operands, running_operands):
        x, test_weight, expected = make(_NUM_SUMMED, count, hidden, weight.dtype, generator)
        output = _run(module, test_weight.to(weight), settings.bias, x)
        if output is None:
            return []
        allowed = None
        if make is running_operands and output[0].dtype != torch.float32:  # parts of a split sum may be rounded
            allowed = sum_bound(x.abs() @ test_weight.abs().T, hidden, output[0].dtype)
        checks.append(compare("router", layer, ROUTER_SITE, expected, output[0], allowed=allowed))
    return checks
