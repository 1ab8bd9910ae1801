"""Weights in memory against their file, and against themselves before the probes.

The probes replace the weights of a model, so they cannot show that a weight is wrong. Here every tensor is copied from
the device and compared with the file it was loaded from, bit for bit after the same conversion of the number format.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from aqnpipe.diagnosis.checks import OUTSIDE_LAYERS, Check, compare
from aqnpipe.diagnosis.probes.experts import EXPERT_SITE
from aqnpipe.errors import ModelError
from aqnpipe.models.layout import decoder_layers, is_norm, layer_of
from aqnpipe.models.loading import load_model, stored_tensors

PROBE = "weights"
LATER_PROBE = "restored"

_CHECKSUM_BITS = 24
_NDIM_OF_EXPERTS = 3
_ROWS_AT_ONCE = 4096
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def compare_with_file(model: nn.Module, folder: Path) -> list[Check]:
    """Return a check for every weight of `model`, loaded from the safetensors files in `folder`; channels are rows.

    A weight that the file has under another name or in several tensors (the experts of a mixture) is compared with a
    second copy of the model, loaded into the memory of the host. Raises ModelError if the folder cannot be loaded.
    """
    checks: list[Check] = []
    missing = dict(_weights(model))
    for name, stored in stored_tensors(folder):
        own = missing.get(name)
        if own is not None and own.shape == stored.shape:
            checks += _compared(model, name, stored, missing.pop(name))
    if missing:
        dtype = next(iter(missing.values())).dtype
        copy = load_model(folder, dtype=_DTYPES[dtype], attention="eager")  # type: ignore[arg-type]
        stored_again = dict(_weights(copy))
        checks += [check for name, own in missing.items() for check in _compared(model, name, stored_again[name], own)]
    return checks


def row_checksums(model: nn.Module) -> dict[str, Tensor]:
    """Return two numbers for every row of every weight, which change if any one value of the row does.

    float32 [2, rows] on the CPU: the lower and the upper 24 bits of a weighted sum of the bit patterns.
    """
    return {name: _checksums(weight) for name, weight in _weights(model)}


def compare_with_earlier(model: nn.Module, before: Mapping[str, Tensor]) -> list[Check]:
    """Return a check for every weight against its checksums `before`: the probes have to leave all of them as found."""
    checks = []
    for name, weight in _weights(model):
        pair = before[name], _checksums(weight)
        if weight.ndim == _NDIM_OF_EXPERTS:  # [experts, 2, 1]
            pair = pair[0].T.unsqueeze(-1), pair[1].T.unsqueeze(-1)
        checks += _by_expert(LATER_PROBE, model, name, *pair)
    return checks


def refuse_weights_that_are_not_finite(model: nn.Module) -> None:
    """Raise ModelError if a weight of `model` is NaN or infinite: outputs are then, without a fault of the machine."""
    for name, weight in _weights(model):
        if not bool(torch.isfinite(weight).all()):
            raise ModelError(f"{type(model).__name__}: {name} has NaN or infinity, expected finite weights")


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight once, also if two modules share it."""
    seen: set[int] = set()
    for name, parameter in model.named_parameters():
        if parameter.data_ptr() not in seen:
            seen.add(parameter.data_ptr())
            yield name, parameter.detach()


def _compared(model: nn.Module, name: str, stored: Tensor, own: Tensor) -> list[Check]:
    wanted, seen = stored.to(own.dtype), own.cpu()
    if own.ndim != _NDIM_OF_EXPERTS:
        wanted, seen = _as_columns(wanted), _as_columns(seen)
    return _by_expert(PROBE, model, name, wanted, seen)


def _by_expert(probe: str, model: nn.Module, name: str, wanted: Tensor, seen: Tensor) -> list[Check]:
    """Return the check of one weight [values, rows]; of those of all experts in one tensor, one check per expert."""
    layer, site = _place(model, name)
    if wanted.ndim != _NDIM_OF_EXPERTS:
        return [compare(probe, layer, site, wanted, seen)]
    return [
        compare(probe, layer, f"{EXPERT_SITE}.{number}", _as_columns(stored), _as_columns(own))
        for number, (stored, own) in enumerate(zip(wanted, seen, strict=True))
    ]


def _as_columns(weight: Tensor) -> Tensor:
    """Return [values, rows]: the rows of a weight are the channels of the module's output."""
    return weight.reshape(1, -1) if weight.ndim == 1 else weight.flatten(1).T


def _place(model: nn.Module, name: str) -> tuple[int, str]:
    """Return layer and site of a weight, with the sites that other probes use for the ends of the model."""
    layer = layer_of(name)
    parts = [part for part in name.split(".") if part not in ("weight", "bias")]
    if layer is not None:
        return layer, parts[-1]
    module = model.get_submodule(".".join(parts)) if len(parts) < len(name.split(".")) else None
    if module is not None and module is model.get_input_embeddings():  # type: ignore[operator]
        return OUTSIDE_LAYERS, "embedding"
    outside = set(model.modules()) - set(decoder_layers(model).modules())
    norms = [other for other in outside if is_norm(other)]
    return OUTSIDE_LAYERS, "final_norm" if norms == [module] else parts[-1]


def _checksums(weight: Tensor) -> Tensor:
    bits = weight.detach().cpu().reshape(weight.shape[0], -1)
    numbers = bits.view(torch.int32 if bits.element_size() == 4 else torch.int16)
    factors = 2 * torch.arange(numbers.shape[1], dtype=torch.int32) + 1  # odd: every bit counts modulo a power of two
    total = torch.cat([(part.int() * factors).long().sum(1) for part in numbers.split(_ROWS_AT_ONCE)])
    lower = 2**_CHECKSUM_BITS - 1
    return torch.stack([total & lower, (total >> _CHECKSUM_BITS) & lower]).float()
