"""Names the operator that computes, as a parity names it: the error of each operator was measured separately."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from aqnpipe.config.measured_noise import ATTENTION, LM_HEAD, SCORES
from aqnpipe.errors import ModelError
from aqnpipe.noise.injection.phase_state import PhaseState

_PRODUCTS_OF_ATTENTION = (SCORES, ATTENTION)


class MeasuredOperators:
    """The names of the operators of a model, such as `q_proj`, `attention` or `lm_head`.

    Linear modules are known by their weights. Every other product in a decoder layer is one of attention: of queries
    and keys first, then of weights and values, or both in one operator.
    """

    def __init__(self, state: PhaseState) -> None:
        self._state = state
        self._linears: dict[int, tuple[Tensor, str]] = {}

    def name_of(self, operator: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Return the name of the operator called now. Raises ModelError for one that a parity does not measure."""
        place = self._state.place
        if operator == "linear":
            return self._linear(args[1] if len(args) > 1 else kwargs["weight"])
        if place.layer is None or operator not in ("matmul", "bmm", "scaled_dot_product_attention"):
            raise ModelError(f"{type(self._state.model).__name__}: {operator} is no operator with a measured error")
        if operator == "scaled_dot_product_attention":
            return ATTENTION
        if place.other_products == len(_PRODUCTS_OF_ATTENTION):
            raise ModelError(
                f"{type(self._state.model).__name__}: layer {place.layer} computes more than two products besides its "
                "linear modules, expected those of attention alone; a measured error cannot be put on them"
            )
        place.other_products += 1
        return _PRODUCTS_OF_ATTENTION[place.other_products - 1]

    def _linear(self, weight: Tensor) -> str:
        found = self._linears.get(id(weight))
        if found is None or found[0] is not weight:
            # Sharded weights are other tensors in every pass.
            self._linears = {
                id(module.weight): (module.weight, LM_HEAD if root is self._state.head else name.rpartition(".")[2])
                for root in (*self._state.layers, self._state.head)
                for name, module in root.named_modules()
                if isinstance(module, nn.Linear)
            }
            found = self._linears.get(id(weight))
        if found is None or found[0] is not weight:
            raise ModelError(
                f"{type(self._state.model).__name__}: a product with a weight that belongs to no linear module; a "
                "measured error cannot be put on it"
            )
        return found[1]
