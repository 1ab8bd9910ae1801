"""The forms of operators: for each, what it should return for its inputs, and the algorithms it may use in 16 bits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from aqnpipe.errors import ModelError
from aqnpipe.parity import expected
from aqnpipe.parity.expected import Candidates, Expected

Inputs = tuple[Tensor, ...]


class Form(Protocol):
    """Computation of an operator. Inputs are rows [rows, width]; `positions` [rows] are those of their tokens."""

    def expected(self, inputs: Inputs, positions: Tensor, channels: Tensor, dtype: torch.dtype) -> Expected:
        """Return the exact result of some output channels, with bounds for results of `dtype`."""

    def candidates(self, inputs: Inputs, positions: Tensor, dtype: torch.dtype) -> Candidates:
        """Return the algorithms that an operator of 16 bits may use; empty if they cannot be told apart by bits."""
        return {}


@dataclass(frozen=True)
class Operator:
    """One operator of the model: `layers.3.q_proj` is of kind `q_proj` in layer 3; `form` is None for attention.

    `is_wide`: only its sampled channels are kept, because it has as many as the vocabulary.
    """

    name: str
    kind: str
    layer: int | None
    form: Form | None
    is_wide: bool = False


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
        weight, bias = self.rows(channels)
        return expected.linear(inputs[0].cpu(), weight.cpu(), None if bias is None else bias.cpu(), dtype)


@dataclass(frozen=True)
class EmbeddingForm(Form):
    """Rows of the embedding, by token id."""

    weight: Tensor
    scale: float = 1.0

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows of token ids."""
        return self.weight.detach()[ids.to(self.weight.device)]

    def expected(self, inputs: Inputs, positions: Tensor, channels: Tensor, dtype: torch.dtype) -> Expected:
        """See `Form`; `inputs` are token ids [rows, 1]."""
        return expected.copy(self.rows(inputs[0][:, 0]).cpu()[:, channels].double() * self.scale, dtype)


@dataclass(frozen=True)
class NormForm:
    """An RMSNorm or LayerNorm, over the last dimension of its weight: of a head, if the input is wider."""

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
        return x.cpu().reshape(len(x), -1, self.weight.numel())

    def expected(self, inputs: Inputs, positions: Tensor, channels: Tensor, dtype: torch.dtype) -> Expected:
        """See `Form`."""
        x = self._heads(inputs[0])
        if self.subtracts_mean:
            bias = None if self.bias is None else self.bias.detach().cpu()
            found = expected.layer_norm(x, self.gain, bias, self.epsilon, dtype)
        else:
            found = expected.rms_norm(x, self.gain, self.epsilon, dtype)
        return Expected(*(part.flatten(1) for part in (found.exact, found.strict, found.loose))).at(channels)

    def candidates(self, inputs: Inputs, positions: Tensor, dtype: torch.dtype) -> Candidates:
        """See `Form`."""
        if self.subtracts_mean:
            return {}
        found = expected.rms_norms(self._heads(inputs[0]), self.gain, self.epsilon, dtype)
        return {name: _flattened(compute) for name, compute in found.items()}


@dataclass(frozen=True)
class RotaryForm:
    """A rotary embedding of queries or keys [rows, heads * head_dim]."""

    inverse_frequencies: Tensor
    scaling: float
    head_dim: int
    interleaved: bool

    def expected(self, inputs: Inputs, positions: Tensor, channels: Tensor, dtype: torch.dtype) -> Expected:
        """See `Form`."""
        frequencies = self.inverse_frequencies.cpu()
        found = expected.rotary(
            inputs[0].cpu(), positions, frequencies, self.scaling, self.head_dim, dtype, interleaved=self.interleaved
        )
        return found.at(channels)

    def candidates(self, inputs: Inputs, positions: Tensor, dtype: torch.dtype) -> Candidates:
        """See `Form`."""
        if self.interleaved:
            return {}
        frequencies = self.inverse_frequencies.cpu()
        return expected.rotations(inputs[0].cpu(), positions, frequencies, self.scaling, self.head_dim, dtype)


class SumForm(Form):
    """The sum of the residual stream and the output of a branch."""

    def expected(self, inputs: Inputs, positions: Tensor, channels: Tensor, dtype: torch.dtype) -> Expected:
        """See `Form`."""
        return expected.addition(inputs[0].cpu()[:, channels], inputs[1].cpu()[:, channels], dtype)


@dataclass(frozen=True)
class ActivationForm:
    """act(x), act(gate) * up, or the same of the two halves of one input."""

    act: Callable[[Tensor], Tensor]
    is_gated: bool

    def _parts(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        if not self.is_gated:
            return inputs[0].cpu(), None
        gate, up = inputs if len(inputs) == 2 else inputs[0].chunk(2, -1)
        return gate.cpu(), up.cpu()

    def expected(self, inputs: Inputs, positions: Tensor, channels: Tensor, dtype: torch.dtype) -> Expected:
        """See `Form`."""
        values, factor = self._parts(inputs)
        values = values[:, channels]
        factor = None if factor is None else factor[:, channels]
        return expected.activation(values, factor, self.act(values.double()), dtype)

    def candidates(self, inputs: Inputs, positions: Tensor, dtype: torch.dtype) -> Candidates:
        """See `Form`."""
        values, factor = self._parts(inputs)
        return {} if factor is None else expected.activations(self.act, values, factor, dtype)


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
    errors = [(output - form.expected((x,), positions, channels, x.dtype).exact).abs().max() for form in forms]
    return forms[int(errors[1] < errors[0])]


def _flattened(compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return lambda: compute().flatten(1)
