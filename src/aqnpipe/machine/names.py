"""The names of operators, as a parity names them: the error of each was measured separately.

Linear modules and norms have the names of their modules. Every other product in a decoder layer is one of attention: of
queries and keys first, then of weights and values, or both in one operator.
"""

from torch import nn

from aqnpipe.config.measured_noise import ATTENTION, LM_HEAD, SCORES, LayerErrors, OperatorError
from aqnpipe.errors import ModelError
from aqnpipe.machine.norms import NORM
from aqnpipe.machine.operators import ATTENTION as FUSED_ATTENTION
from aqnpipe.machine.places import Place, Places
from aqnpipe.models.layout import is_norm, norms_outside_layers, output_projection

_PRODUCTS_OF_ATTENTION = (SCORES, ATTENTION)


def named_modules(model: nn.Module) -> dict[nn.Module, str]:
    """Return the linear modules and norms of a decoder with the names of their operators."""
    found = {
        module: path.rpartition(".")[2]
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) or is_norm(module)
    }
    found |= {norm: name for name, norm in norms_outside_layers(model).items()}
    return found | {module: LM_HEAD for module in output_projection(model).modules() if isinstance(module, nn.Linear)}


def measured_name(operator: str, errors: LayerErrors, places: Places, here: Place) -> tuple[str, OperatorError]:
    """Return the name in receipts of the operator that computes, such as `mm.q_proj`, and its error.

    Raises ModelError for an operator that the parity does not measure.
    """
    place = {places.outside: "outside the layers", places.outside - 1: "lm_head"}.get(here.part, f"layer {here.part}")
    names = places.local.names
    if names:
        name = names[-1]
    elif here.part == places.outside or operator == NORM:
        raise ModelError(f"{place}: {operator} is no operator with a measured error")
    elif operator in FUSED_ATTENTION:
        name = ATTENTION
    elif here.others == len(_PRODUCTS_OF_ATTENTION):
        raise ModelError(
            f"{place} computes more than two products besides its linear modules, expected those of attention alone; a "
            "measured error cannot be put on them"
        )
    else:
        name = _PRODUCTS_OF_ATTENTION[here.others]
        here.others += 1
    error = errors.operators.get(name)
    if error is None:
        raise ModelError(
            f"{place}: the parity of the measured error has no operator {name}, found {', '.join(errors.operators)}"
        )
    return f"{operator}.{name}", error
