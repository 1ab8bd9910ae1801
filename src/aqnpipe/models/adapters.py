"""Low-rank adapters in a model: inserted, switched off, saved and loaded, and merged into the weights below them.

Adapters are inserted into the model itself, without a wrapper around it, so layers, norms and hooks keep their places.
"""

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import Linear as AdaptedLinear
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from aqnpipe.artifacts.files import STAGED
from aqnpipe.config.model import Dtype
from aqnpipe.config.training import LoraConfig
from aqnpipe.errors import ModelError, ReceiptError
from aqnpipe.models.layout import layer_of, weight_of
from aqnpipe.models.loading import load_model, refuse_damaged
from aqnpipe.models.prepared import (
    ADAPTERS_FILE,
    HEADER_KEY,
    PREPARED_MODEL_FILE,
    AdaptersHeader,
    has_only_adapters,
    read_adapters_header,
)
from aqnpipe.models.sharding import (
    distinct_weights,
    free_gathered,
    is_share,
    like_share,
    local,
    own_rows,
    whole,
    whole_state_dict,
)

_ADAPTER = "default"
_PARTS = ("lora_A", "lora_B")

LARGEST_MERGE_LOSS = 0.05
"""Weights for an engine may lose this fraction of the adapters' update by rounding."""


def add_adapters(model: PreTrainedModel, lora: LoraConfig, seed: int) -> None:
    """Insert adapters, initialised by `seed`; all other weights are frozen.

    Raises ModelError if no linear module of the layers has a name in `lora.target_modules`.
    """
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for target in lora.target_modules:
        if not any(name.endswith(f".{target}") and layer_of(name) is not None for name in linears):
            found = sorted({name.rsplit(".", 1)[-1] for name in linears if layer_of(name) is not None})
            raise ModelError(
                f"training.lora.target_modules: {target!r} is no linear module of the layers of this "
                f"{type(model).__name__}, expected a subset of {', '.join(found)}"
            )
        for name in (name for name in linears if name.endswith(f".{target}")):
            _refuse_unadaptable(name, model.get_submodule(name))
    config = PeftLoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type] # declared int, used as a factor
        lora_dropout=lora.dropout,
        target_modules=list(lora.target_modules),
        bias="none",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, adapter_name=_ADAPTER)


def _refuse_unadaptable(name: str, linear: nn.Module) -> None:
    """Raise ModelError if a linear module returns more than its product, to which an adapter cannot be added."""
    weight = weight_of(linear)
    with torch.no_grad():
        output = linear(torch.zeros(1, weight.shape[1], dtype=weight.dtype, device=weight.device))
    if not isinstance(output, Tensor):
        raise ModelError(
            f"training.lora.target_modules: {name} is a {type(linear).__name__} that returns a "
            f"{type(output).__name__}, not a product alone, expected linear modules other than routers"
        )


def adapted_modules(model: nn.Module) -> dict[str, AdaptedLinear]:
    """Return the modules of `model` that have a low-rank adapter, by qualified name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, AdaptedLinear)}


def has_adapters(model: nn.Module) -> bool:
    """Return True if any module of `model` has a low-rank adapter."""
    return bool(adapted_modules(model))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Switch the adapters off while the body runs, so that it computes with the base weights only."""
    layers = adapted_modules(model).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def adapter_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the two matrices of every adapter, as `<name of the module>.lora_A.weight` and `.lora_B.weight`."""
    return {
        f"{name}.{part}.weight": getattr(module, part)[_ADAPTER].weight
        for name, module in adapted_modules(model).items()
        for part in _PARTS
    }


def save_adapters(model: nn.Module, folder: Path, header: AdaptersHeader) -> None:
    """Write the adapters of `model` to `folder` in float32, with their header."""
    tensors = {
        name: weight.detach().to("cpu", torch.float32).contiguous() for name, weight in adapter_weights(model).items()
    }
    save_file(tensors, folder / ADAPTERS_FILE, metadata={HEADER_KEY: header.model_dump_json()})


def load_adapters(model: PreTrainedModel, folder: Path) -> None:
    """Insert the adapters in `folder` into `model`, their base, in the number format in which they were trained.

    Raises ModelError if the file is damaged, or does not have exactly the adapters that its header describes.
    """
    header = read_adapters_header(folder)
    saved = _read_tensors(folder)
    add_adapters(model, header.lora(), seed=0)
    own = adapter_weights(model)
    if differing := sorted(own.keys() ^ saved.keys()):
        raise ModelError(f"{folder / ADAPTERS_FILE}: not the adapters of this model, on one side only: {differing[0]}")
    for name, weight in own.items():
        if weight.shape != saved[name].shape:
            raise ModelError(
                f"{folder / ADAPTERS_FILE}: {name} has shape {tuple(saved[name].shape)}, expected {tuple(weight.shape)}"
            )
        weight.data = saved[name].to(weight.device, getattr(torch, header.dtype))


def refuse_other_adapters(model: nn.Module, folder: Path) -> None:
    """Raise ModelError unless the adapters of `model` are those in `folder`, bit for bit, and scaled as there."""
    header, saved, own = read_adapters_header(folder), _read_tensors(folder), adapter_weights(model)
    dtype = getattr(torch, header.dtype)
    if own.keys() != saved.keys():
        raise ModelError(
            f"model {str(folder)!r}: adapters not applied: {len(own)} of its {len(saved)} matrices are in memory"
        )
    for name, weight in own.items():
        if weight.dtype != dtype or not torch.equal(weight.detach().cpu(), saved[name].to(dtype)):
            raise ModelError(f"model {str(folder)!r}: {name} in memory is not the adapter of this checkpoint")
    for name, module in adapted_modules(model).items():
        if module.scaling[_ADAPTER] != header.alpha / header.rank:
            raise ModelError(
                f"model {str(folder)!r}: adapters scaled: {name} by {module.scaling[_ADAPTER]:g}, expected alpha / "
                f"rank = {header.alpha / header.rank:g}"
            )


def merged_weights(model: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the state dict of `model` with adapters merged: W + B A alpha/rank, under the names without adapters.

    Computed in float32 and then rounded once, to `dtype`. The model itself does not change. Without adapters this is
    its own state dict.
    """
    return dict(_merged(model, whole_state_dict(model).items(), dtype))


def _merged(
    model: nn.Module, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield `weights` of `model` with adapters merged, under the names without adapters; shares are gathered."""
    adapted = adapted_modules(model)
    for key, tensor in weights:
        owner = next((name for name in adapted if key.startswith(f"{name}.")), None)
        if owner is None:
            yield key, whole(tensor, dtype)
        elif key == f"{owner}.base_layer.weight":
            yield f"{owner}.weight", whole(_plus(tensor.detach(), _update(adapted[owner])).to(dtype))
        elif key.startswith(f"{owner}.base_layer."):
            yield f"{owner}.{key.removeprefix(f'{owner}.base_layer.')}", whole(tensor, dtype)


def _plus(weight: Tensor, update: Tensor) -> Tensor:
    """Return the sum in float32, of a weight that is divided among workers divided alike."""
    return like_share(weight, local(weight).float() + own_rows(update)) if is_share(weight) else weight.float() + update


def merge_loss(model: nn.Module, dtype: torch.dtype) -> float | None:
    """Return the relative error of the adapters' update if they are merged and rounded to `dtype`.

    It is |rounded(W + U) - rounded(W) - U| / |U|, Frobenius norms over all adapted matrices, where U = B A alpha/rank.
    None without adapters, or if every U is 0.
    """
    lost = total = 0.0
    for module in adapted_modules(model).values():
        update, weight = _update(module), whole(weight_of(module.get_base_layer()))
        arrived = (weight.float() + update).to(dtype).float() - weight.to(dtype).float()
        lost += float((arrived - update).double().square().sum())
        total += float(update.double().square().sum())
    return float((lost / total) ** 0.5) if total else None


def refuse_merge_loss(loss: float | None, dtype: torch.dtype) -> None:
    """Raise ReceiptError if merging into weights of `dtype` loses more than `LARGEST_MERGE_LOSS` of the update."""
    if loss is not None and loss > LARGEST_MERGE_LOSS:
        raise ReceiptError(
            f"receipt invalid: vLLM needs the adapters merged, and in {str(dtype).removeprefix('torch.')} weights "
            f"{loss:.0%} of their update is lost (relative error over all adapted matrices; at most "
            f"{LARGEST_MERGE_LOSS:.0%} is accepted): expected generation.backend: transformers, which applies the "
            "adapters, or a model dtype of float32, or a higher training.learning_rate"
        )


class MergedForEngine:
    """Returns a policy's weights for an engine that computes in `dtype`, adapters merged.

    Raises ReceiptError at the first update that is not 0 if merging loses too much of it.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._is_checked = False

    def __call__(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Return the weights by their plain names, one after the other; tied ones once, by the first name.

        Those of a sharded model are gathered one by one: a collective operation.
        """
        free_gathered(model)
        if not self._is_checked:
            loss = merge_loss(model, self._dtype)
            refuse_merge_loss(loss, self._dtype)
            self._is_checked = loss is not None
        return _merged(model, distinct_weights(model), self._dtype)


def _update(module: AdaptedLinear) -> Tensor:
    down, up = (getattr(module, part)[_ADAPTER].weight for part in _PARTS)
    update: Tensor = (whole(up).float() @ whole(down).float()) * module.scaling[_ADAPTER]
    return update


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / ADAPTERS_FILE
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ModelError(f"{path}: not a valid safetensors file ({error})") from error


@contextmanager
def whole_weights(folder: Path, dtype: Dtype) -> Iterator[Path]:
    """Yield a folder with the whole weights of the model in `folder`, for an engine that computes in `dtype`.

    It is `folder` itself, except for a checkpoint of adapters: these are merged in float32, rounded once, and written
    to a temporary folder beside it. Raises ReceiptError if rounding loses too much of their update, ModelError if the
    model is damaged or its base is missing.
    """
    if not has_only_adapters(folder):
        refuse_damaged(folder)
        yield folder
        return
    with tempfile.TemporaryDirectory(STAGED, f".{folder.name}.", folder.parent) as merged:
        _write_merged(folder, dtype, Path(merged))
        yield Path(merged)


def _write_merged(folder: Path, dtype: Dtype, output: Path) -> None:
    model = load_model(folder, dtype=dtype, attention="eager")
    rounded = getattr(torch, dtype)
    refuse_merge_loss(merge_loss(model, rounded), rounded)
    model.save_pretrained(output, state_dict=merged_weights(model, rounded))
    for path in folder.iterdir():
        if path.name not in (ADAPTERS_FILE, PREPARED_MODEL_FILE):
            shutil.copyfile(path, output / path.name)
