"""The parts of a model that an audit observes, and the norms in them that were requested to have measured errors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from aqnpipe.models.layout import is_norm, norms_outside_layers


@dataclass(frozen=True)
class AuditedPart:
    """A part of the model that noise can be requested for: a decoder layer, or the output projection (`layer` None).

    `runs_after_model`: the part is called when the forward of the model has returned, as vLLM's logits are. `norm`:
    the part is a norm outside the layers, and this its name in a parity.
    """

    place: int
    layer: int | None
    module: nn.Module
    runs_after_model: bool = False
    norm: str | None = None


def with_norms_outside(model: nn.Module, parts: Sequence[AuditedPart]) -> list[AuditedPart]:
    """Return `parts` and the norms outside the layers, whose places follow that of the model around the parts."""
    first = parts[-1].place + 2
    norms = enumerate(norms_outside_layers(model).items(), first)
    return [*parts, *(AuditedPart(place, None, norm, norm=name) for place, (name, norm) in norms)]


def norms_of(part: AuditedPart) -> Iterator[tuple[str, nn.Module]]:
    """Yield the norms of a part with their names in a parity."""
    if part.norm is not None:
        yield part.norm, part.module
        return
    for path, module in part.module.named_modules():
        if is_norm(module):
            yield path.rpartition(".")[2], module
