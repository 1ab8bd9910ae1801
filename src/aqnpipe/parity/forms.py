"""The forms of operators: for each, its exact result, how far correct computations may be from it, and its algorithms.

A form gets the inputs that the operator was really given, so the difference to its result is the operator's own error.
The exact result is computed in float64. Two bounds come with it (u: half the spacing of numbers at 1 in the output's
dtype):

- `strict`: all arithmetic in float32, in any order, and one rounding of the result;
- `loose`: intermediate results rounded to the dtype as well, as a chain of separate operations would do.

What exceeds `loose` is no rounding. `reduced` (float32 only) is the bound for operands rounded to 10 bits, which is how
GPUs compute float32 products in TF32.

In 16 bits an operator can be computed in ways that differ in what they round. Each of these algorithms is computed here
on the operator's own inputs. Arithmetic in float32 that is rounded once gives nearly the same bits in any order of
summation: the right candidate agrees in almost all elements, the others in about three quarters.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from aqnpipe.error_bounds import FLOAT32_ROUNDOFF, gamma
from aqnpipe.errors import ModelError
from aqnpipe.noise.kernels.shards import Shard

_TF32_ROUNDOFF = 2.0**-11
_SMALLEST = torch.finfo(torch.float32).tiny

Inputs = tuple[Tensor, ...]
Candidates = Mapping[str, Callable[[], Tensor]]

CAST_BEFORE = "cast before the weight"
CAST_AFTER = "cast after the weight"
EACH_STEP = "every step rounded"
ONE_ROUNDING = "one rounding"
COS_SIN_ROUNDED = "cos and sin rounded, products in float32"
ACTIVATION_ROUNDED = "activation rounded, then multiplied"
SCORES_ROUNDED = "scores and probabilities rounded"
PROBABILITIES_ROUNDED = "scores in float32, probabilities rounded"
ALL_FLOAT32 = "scores and probabilities in float32"
_UNROUNDED = "of the sum before its rounding"


@dataclass(frozen=True)
class Expected:
    """The exact results [rows, channels] in float64, and the bounds of correct computations in the same shape."""

    exact: Tensor
    strict: Tensor
    loose: Tensor
    reduced: Tensor | None = None

    def at(self, channels: Tensor) -> "Expected":
        """Return the results and bounds of some channels."""
        reduced = None if self.reduced is None else self.reduced[:, channels]
        return Expected(self.exact[:, channels], self.strict[:, channels], self.loose[:, channels], reduced)


def half_ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return half the spacing of numbers of `dtype` at `values` (float64)."""
    # The spacing changes at powers of two: rounding may carry a value across one.
    size = values.abs().clamp_min(_SMALLEST) * (1 + torch.finfo(dtype).eps)
    return torch.finfo(dtype).eps / 2 * torch.exp2(torch.floor(torch.log2(size)))


def ulps(differences: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return |differences| in units of the spacing of numbers of `dtype` at `values`."""
    return differences.abs() / (2 * half_ulp(values, dtype))


def _roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def _bounded(
    exact: Tensor, arithmetic: Tensor, size: Tensor, roundings: int, dtype: torch.dtype, *, is_product: bool = False
) -> Expected:
    """Return exact results with bounds: `arithmetic` is the error of float32, `roundings` is how often a chain rounds.

    `size` is the sum of the magnitudes of what is added up, which those roundings are relative to.
    """
    strict = arithmetic + half_ulp(exact.abs() + arithmetic, dtype)
    reduced = strict + 2 * _TF32_ROUNDOFF * size if is_product and dtype == torch.float32 else None
    return Expected(exact, strict, strict + roundings * _roundoff(dtype) * size, reduced)


class Form(ABC):
    """Computation of an operator. Inputs are rows [rows, width] on the CPU; `positions` [rows] of their tokens."""

    @abstractmethod
    def expected(self, inputs: Inputs, positions: Tensor, channels: Tensor, dtype: torch.dtype) -> Expected:
        """Return the exact result of some output channels, with bounds for results of `dtype`."""

    def candidates(self, inputs: Inputs, positions: Tensor, dtype: torch.dtype) -> Candidates:
        """Return the algorithms that an operator of 16 bits may use; empty if they cannot be told apart by bits."""
        return {}


@dataclass(frozen=True)
class Operator:
    """One operator of the model: `layers.3.q_proj` is of kind `q_proj` in layer 3.

    `is_wide`: only its sampled channels are kept, because it has as many as the vocabulary. `shard`, `input_shards`:
    which columns a tensor-parallel worker has of its result and of its inputs; None if it has all.
    """

    name: str
    kind: str
    layer: int | None
    form: Form
    is_wide: bool = False
    shard: Shard | None = None
    input_shards: tuple[Shard | None, ...] = ()


@dataclass(frozen=True)
class LinearForm(Form):
    """A product with a weight [out, in]; sums differ in their order, which the bounds judge: no candidates."""

    weight: Tensor
    bias: Tensor | None

    def rows(self, channels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the rows of the weight that make some output channels, and their bias."""
        chosen = channels.to(self.weight.device)
        return self.weight.detach()[chosen], None if self.bias is None else self.bias.detach()[chosen]

    def expected(self, inputs: Inputs, positions: Tensor, channels: Tensor, dtype: torch.dtype) -> Expected:
        """See `Form`."""
        weight, bias = (None if part is None else part.cpu().double() for part in self.rows(channels))
        x = inputs[0].double()
        exact, size = x @ weight.T, x.abs() @ weight.abs().T  # type: ignore[union-attr]
        if bias is not None:
            exact, size = exact + bias, size + bias.abs()
        # A kernel may round parts of the sum, and the product before it adds the bias.
        return _bounded(exact, gamma(x.shape[-1] + 1) * size, size, 2, dtype, is_product=True)


@dataclass(frozen=True)
class EmbeddingForm(Form):
    """Rows of the embedding, by token id [rows, 1]; a scale may be rounded."""

    weight: Tensor
    scale: float = 1.0

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows of token ids."""
        return self.weight.detach()[ids.to(self.weight.device)]

    def expected(self, inputs: Inputs, positions: Tensor, channels: Tensor, dtype: torch.dtype) -> Expected:
        """See `Form`."""
        exact = self.rows(inputs[0][:, 0]).cpu()[:, channels].double() * self.scale
        return _bounded(exact, FLOAT32_ROUNDOFF * exact.abs(), exact.abs(), 2, dtype)


@dataclass(frozen=True)
class NormForm(Form):
    """An RMSNorm or LayerNorm, over the last dimension of its weight: of a head, if the input is wider.

    An engine may add the residual stream inside of the norm: further inputs are the addends of the first, the sum.
    """

    weight: Tensor
    bias: Tensor | None
    epsilon: float
    subtracts_mean: bool
    adds_one: bool

    @property
    def gain(self) -> Tensor:
        """The factor of the normalised values, in float32 where the model computes it."""
        weight = self.weight.detach().cpu()
        return 1.0 + weight.float() if self.adds_one else weight

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), -1, self.weight.numel())

    def expected(self, inputs: Inputs, positions: Tensor, channels: Tensor, dtype: torch.dtype) -> Expected:
        """See `Form`: the norm of the rounded sum, so that engines which do not add inside of it expect the same."""
        x, gain, width = self._heads(inputs[0]).double(), self.gain.double(), self.weight.numel()
        if not self.subtracts_mean:
            exact = size = _normalised(x, self.epsilon) * gain
            arithmetic = 8 * FLOAT32_ROUNDOFF + gamma(width)
        else:
            mean = x.mean(-1, keepdim=True)
            constant = torch.zeros_like(gain) if self.bias is None else self.bias.detach().cpu().double()
            scale = torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + self.epsilon)
            exact = (x - mean) * scale * gain + constant
            size = (x.abs() + x.abs().mean(-1, keepdim=True)) * scale * gain.abs() + constant.abs()
            arithmetic = 8 * FLOAT32_ROUNDOFF + 2 * gamma(width)
        exact, size = exact.flatten(1), size.flatten(1).abs()
        return _bounded(exact, arithmetic * size, size, 6, dtype).at(channels)

    def candidates(self, inputs: Inputs, positions: Tensor, dtype: torch.dtype) -> Candidates:
        """See `Form`."""
        if self.subtracts_mean:
            return {}
        gain, low = self.gain, self._heads(inputs[0]).to(dtype)
        found = self._casts(inputs[0].float(), dtype, "")
        found[EACH_STEP] = lambda: (_normalised(low, self.epsilon) * gain.to(dtype)).flatten(1)
        if len(inputs) == 3:
            found |= self._casts(inputs[1].float() + inputs[2].float(), dtype, f", {_UNROUNDED}")
        return found

    def _casts(self, x: Tensor, dtype: torch.dtype, of: str) -> dict[str, Callable[[], Tensor]]:
        normalised, gain = _normalised(self._heads(x), self.epsilon), self.gain
        return {
            f"{CAST_BEFORE}{of}": lambda: (gain.to(dtype) * normalised.to(dtype)).flatten(1),
            f"{CAST_AFTER}{of}": lambda: (normalised * gain.float()).to(dtype).flatten(1),
        }


def _normalised(x: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)


@dataclass(frozen=True)
class RotaryForm(Form):
    """A rotary embedding of queries or keys [rows, heads * head_dim]; channels behind the pairs are kept.

    `interleaved`: the pairs are neighbours; otherwise they lie in the two halves of a head. Frequencies are float32 in
    every engine, so the rounding of an angle grows with the position.
    """

    inverse_frequencies: Tensor
    scaling: float
    head_dim: int
    interleaved: bool

    def expected(self, inputs: Inputs, positions: Tensor, channels: Tensor, dtype: torch.dtype) -> Expected:
        """See `Form`."""
        cos, sin, angles = self._angles(positions, torch.float64)
        exact = self._turned(inputs[0], cos, sin, torch.float64, torch.float64)
        magnitudes = inputs[0].double().abs().unflatten(-1, (-1, self.head_dim)).clone()
        magnitudes[..., cos.shape[-1] :] = 0

        def sizes(factors: Tensor) -> Tensor:
            signs = torch.cat((-factors, factors), -1)
            both = torch.cat((factors, factors), -1)
            return abs(self.scaling) * self._turned(magnitudes.flatten(1), both, signs, torch.float64, torch.float64)

        size, drift = sizes(torch.ones_like(angles)), sizes(2 * FLOAT32_ROUNDOFF * angles.abs())
        return _bounded(exact, 8 * FLOAT32_ROUNDOFF * size + drift, size, 4, dtype).at(channels)

    def candidates(self, inputs: Inputs, positions: Tensor, dtype: torch.dtype) -> Candidates:
        """See `Form`."""
        x, (cos, sin, _) = inputs[0], self._angles(positions, torch.float32)
        low_cos, low_sin = cos.to(dtype), sin.to(dtype)
        return {
            EACH_STEP: lambda: self._turned(x, low_cos, low_sin, dtype, dtype),
            COS_SIN_ROUNDED: lambda: self._turned(x, low_cos.float(), low_sin.float(), torch.float32, dtype),
            ONE_ROUNDING: lambda: self._turned(x, cos, sin, torch.float32, dtype),
        }

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return cos and sin for both channels of every pair, [rows, 1, 2 * pairs], and the angles [rows, 1, pairs]."""
        angles = (positions.to(dtype)[:, None] * self.inverse_frequencies.cpu().to(dtype))[:, None]
        cos, sin = (torch.cat((part, part), -1) for part in (angles.cos() * self.scaling, angles.sin() * self.scaling))
        return cos, sin, angles

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor, working: torch.dtype, dtype: torch.dtype) -> Tensor:
        heads, width = x.reshape(len(x), -1, self.head_dim), cos.shape[-1]
        order = torch.arange(width)
        if self.interleaved:
            order = order.reshape(-1, 2).T.flatten()
        part, kept = heads[..., :width][..., order].to(working), heads[..., width:].to(dtype)
        first, second = part.chunk(2, -1)
        turned = (part * cos + torch.cat((-second, first), -1) * sin).to(dtype)
        return torch.cat((turned[..., order.argsort()], kept), -1).flatten(1)


class SumForm(Form):
    """The sum of the residual stream and the output of a branch, rounded once."""

    def expected(self, inputs: Inputs, positions: Tensor, channels: Tensor, dtype: torch.dtype) -> Expected:
        """See `Form`."""
        first, second = (part[:, channels].double() for part in inputs)
        size = first.abs() + second.abs()
        return _bounded(first + second, FLOAT32_ROUNDOFF * size, size, 1, dtype)


@dataclass(frozen=True)
class ActivationForm(Form):
    """act(x), act(gate) * up, or the same of the two halves of one input."""

    act: Callable[[Tensor], Tensor]
    is_gated: bool

    def _parts(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        if not self.is_gated:
            return inputs[0], torch.ones_like(inputs[0])
        gate, up = inputs if len(inputs) == 2 else inputs[0].chunk(2, -1)
        return gate, up

    def expected(self, inputs: Inputs, positions: Tensor, channels: Tensor, dtype: torch.dtype) -> Expected:
        """See `Form`."""
        values, factor = (part[:, channels].double() for part in self._parts(inputs))
        size = values.abs() * factor.abs()
        # exp(-x) has |x| times the relative error of x. tanh and erf cancel for negative values.
        arithmetic = size * (16 + values.abs()) * FLOAT32_ROUNDOFF
        return _bounded(self.act(values) * factor, arithmetic, size, 4, dtype)

    def candidates(self, inputs: Inputs, positions: Tensor, dtype: torch.dtype) -> Candidates:
        """See `Form`."""
        if not self.is_gated:
            return {}
        values, factor = self._parts(inputs)
        return {
            ACTIVATION_ROUNDED: lambda: self.act(values.float()).to(dtype) * factor.to(dtype),
            ONE_ROUNDING: lambda: (self.act(values.float()) * factor.float()).to(dtype),
        }


@dataclass(frozen=True)
class AttentionForm(Form):
    """Causal attention. Inputs are queries, keys and values [rows, heads * head_dim], each sequence from its start.

    The error of a score is that of a sum of `head_dim` products. A relative error d of every probability changes the
    result by at most d times the sum of |p v|, and scores wrong by at most e change probabilities by at most
    exp(2 e) - 1.
    """

    scaling: float
    head_dim: int
    window: int | None = None
    soft_cap: float | None = None

    def _sequences(self, inputs: Inputs, positions: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield queries, keys and values [heads, tokens, dim] of each sequence; keys and values of every head."""
        starts = [*(positions == 0).nonzero()[:, 0].tolist(), len(positions)]
        for first, last in pairwise(starts):
            query, key = (part[first:last].unflatten(-1, (-1, self.head_dim)) for part in inputs[:2])
            value = inputs[2][first:last].unflatten(-1, (key.shape[1], -1))
            repeats = query.shape[1] // key.shape[1]
            key, value = (part.repeat_interleave(repeats, 1).transpose(0, 1) for part in (key, value))
            yield query.transpose(0, 1), key, value

    def expected(self, inputs: Inputs, positions: Tensor, channels: Tensor, dtype: torch.dtype) -> Expected:
        """See `Form`."""
        found = [self._of_sequence(*parts, dtype) for parts in self._sequences(inputs, positions)]
        exact, strict, loose, reduced = (torch.cat(parts) for parts in zip(*found, strict=True))
        return Expected(exact, strict, loose, reduced if dtype == torch.float32 else None).at(channels)

    def _of_sequence(self, query: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return exact results and the bounds, all [tokens, heads * dim]."""
        query, key, value = query.double(), key.double(), value.double()
        tokens, dim = query.shape[1:]
        scores = query @ key.transpose(1, 2) * self.scaling
        sizes = query.abs() @ key.abs().transpose(1, 2) * abs(self.scaling)
        if self.soft_cap is not None:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
        visible = (distance >= 0) if self.window is None else (distance >= 0) & (distance < self.window)
        probabilities = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        exact, spread = probabilities @ value, probabilities @ value.abs()
        seen_sizes = sizes.masked_fill(~visible, 0).amax(-1)
        seen_scores = scores.abs().masked_fill(~visible, 0).amax(-1)
        exact, spread = (part.transpose(0, 1).flatten(1) for part in (exact, spread))

        def bound(score_roundoff: float, probability_roundoff: float) -> Tensor:
            error = seen_sizes * (gamma(dim + 2) + score_roundoff)
            error = error + seen_scores * (4 * FLOAT32_ROUNDOFF + score_roundoff)
            per_head = torch.expm1(2 * error) + gamma(tokens + 4) + probability_roundoff
            return spread * per_head.T.repeat_interleave(value.shape[-1], 1)

        u, rounding = _roundoff(dtype), half_ulp(exact.abs(), dtype)
        reduced = bound(2 * _TF32_ROUNDOFF, 2 * _TF32_ROUNDOFF) + rounding
        # Fused kernels round the probabilities before the second product.
        half = 0.0 if dtype == torch.float32 else u
        return exact, bound(0.0, half) + rounding, bound(2 * u, 3 * u) + 2 * rounding, reduced

    def candidates(self, inputs: Inputs, positions: Tensor, dtype: torch.dtype) -> Candidates:
        """See `Form`."""
        if self.window is not None or self.soft_cap is not None:
            return {}

        def attended(name: str) -> Tensor:
            return torch.cat([self._attended(name, *parts, dtype) for parts in self._sequences(inputs, positions)])

        names = (SCORES_ROUNDED, PROBABILITIES_ROUNDED, ALL_FLOAT32)
        return {name: lambda name=name: attended(name) for name in names}  # type: ignore[misc]

    def _attended(self, name: str, query: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
        query, key, value, tokens = query.float(), key.float(), value.float(), query.shape[1]
        scores = query @ key.transpose(1, 2)
        scores = (scores.to(dtype) * self.scaling).float() if name == SCORES_ROUNDED else scores * self.scaling
        scores = scores.masked_fill(torch.arange(tokens)[:, None] < torch.arange(tokens), -torch.inf)
        if name == PROBABILITIES_ROUNDED:
            # Fused kernels divide by the sum of the exponentials last.
            exponentials = torch.exp(scores - scores.amax(-1, keepdim=True))
            result = exponentials.to(dtype).float() @ value / exponentials.sum(-1, keepdim=True)
        else:
            probabilities = scores.softmax(-1)
            result = (probabilities.to(dtype).float() if name == SCORES_ROUNDED else probabilities) @ value
        return result.to(dtype).transpose(0, 1).flatten(1)


def norm_form(module: nn.Module) -> NormForm:
    """Return the form of a norm, which is tried on random numbers: some families store its gain minus one.

    Raises ModelError for a norm with a gain of each head (Cohere with `use_qk_norm`).
    """
    weight: Tensor = module.weight.detach()  # type: ignore[operator]
    if weight.dim() != 1:
        raise ModelError(
            f"{type(module).__name__}: its weight has the shape {tuple(weight.shape)}, expected one value per channel; "
            "parity does not know norms with a gain of each head"
        )
    bias = getattr(module, "bias", None)
    epsilon = float(getattr(module, "variance_epsilon", None) or getattr(module, "eps", None) or 1e-6)
    subtracts_mean = isinstance(module, nn.LayerNorm) or "rms" not in type(module).__name__.lower()
    forms = [NormForm(weight, bias, epsilon, subtracts_mean, adds_one) for adds_one in (False, True)]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, weight.numel(), generator=generator).to(weight)
    with torch.no_grad():
        output = module(x).cpu().double()
    channels, positions = torch.arange(weight.numel()), torch.zeros(4)
    errors = [(output - form.expected((x.cpu(),), positions, channels, x.dtype).exact).abs().max() for form in forms]
    return forms[int(errors[1] < errors[0])]
