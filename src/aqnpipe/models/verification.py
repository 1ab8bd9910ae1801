"""Compares a model in memory with the folder it was loaded from: its weights, its adapters and what it computes.

transformers renames some weights when it loads them, and fuses others: the experts of a layer are many matrices in the
files and one tensor in memory. What compares a model with its files undoes this, as `save_pretrained` does.

The digests of a checkpoint's files prove that the weights are those that were written. They do not prove that the model
in memory computes what the trainer's model computed: that depends on buffers (rope), configuration (tied head,
scaling), code, and on whether adapters are applied, and with which factor. So 16 fixed tokens are computed in both
places and compared.

The comparison must see an update of 1e-6, far below the rounding of bfloat16. Therefore weights are first rounded to
the checkpoint's number format, which changes nothing where they were loaded in it, and everything is computed in double
precision, one decoder layer at a time. The output that each adapter adds is compared by itself.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from aqnpipe.config.model import Dtype
from aqnpipe.errors import ModelError
from aqnpipe.models.adapters import adapted_modules, refuse_other_adapters
from aqnpipe.models.layout import decoder_layers, layer_of
from aqnpipe.models.loading import stored_weights
from aqnpipe.models.prepared import (
    PREPARED_MODEL_FILE,
    AdapterEffect,
    Probe,
    find_base,
    has_only_adapters,
    read_prepared_model,
)
from aqnpipe.models.sharding import is_sharded, whole
from aqnpipe.seeding import keyed_generator

_NAMES = ((".base_layer.", "."), (".lora_A.default.", ".lora_A."), (".lora_B.default.", ".lora_B."))
"""Names of the weights of a module with adapters: in memory, and in files."""

_NUM_TOKENS = 16
_POSITIONS = 2
_TOP = 4

_TOLERANCE = 1e-5
"""Accepted difference, relative to the largest logit or to the effect of the adapters.

In double precision other kernels give the same first 12 digits; frequencies of rotary embeddings are float32.
"""
_COARSE_STEPS = 16
"""Accepted difference in units of the number format, where a model was loaded in a coarser one than its checkpoint."""

_SCALED = 0.01
"""A proportional difference from here on is reported as another factor."""

_Effects = dict[str, AdapterEffect]


def refuse_other_weights(model: PreTrainedModel, folder: Path, dtype: Dtype) -> None:
    """Raise ModelError unless `model` is the one in `folder`: its weights bit for bit in `dtype`, and its outputs.

    Weights that the loader renames or fuses are compared as the files have them. Adapters are compared with those in
    `folder`, the weights below them with their base. The outputs are those of the folder's probe.
    """
    if has_only_adapters(folder):
        refuse_other_adapters(model, folder)
        _compare_weights(model, find_base(folder), dtype)
    else:
        _compare_weights(model, folder, dtype)
    refuse_other_outputs(model, folder)


def _compare_weights(model: PreTrainedModel, folder: Path, dtype: Dtype) -> None:
    wanted, compared = getattr(torch, dtype), 0
    kept_in_float32 = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    mixed = any(getattr(model, name, None) for name in kept_in_float32)
    for name, mine, in_file in weights_and_files(model, folder):
        compared += 1
        if mine.dtype != wanted and not mixed:
            raise ModelError(f"model {str(folder)!r}: {name} is in {mine.dtype}, requested {wanted}")
        stored = in_file.to(mine)
        if not torch.equal(mine, stored):
            # NaN is not equal to itself.
            what = "in memory is not the weight of this checkpoint"
            if stored.isnan().any():
                what = "has NaN in its file, expected numbers"
            raise ModelError(f"model {str(folder)!r}: {name} {what}")
    if not compared:
        raise ModelError(f"model {str(folder)!r}: none of its weights is in memory under its name")


def weights_and_files(model: nn.Module, folder: Path) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, weight in memory and tensor in the files of `folder`, for every weight that both have.

    A weight that the loader renamed or fused is compared by its names in the files, one decoder layer at a time. Those
    of a divided model are this worker's shares, renamed ones are gathered: a collective operation, in the same order on
    every worker.
    """
    # The state dict of a sharded model would free gathered weights.
    held = [*model.named_parameters(), *model.named_buffers()] if is_sharded(model) else model.state_dict().items()
    own = {name_in_files(name): weight.detach() for name, weight in held}
    parts: dict[int | None, dict[str, Tensor]] = {}
    with stored_weights(folder) as files:
        for name in (name for name in files if name in own):
            yield name, own[name], files[name].get_tensor(name)
        renamed = files.keys() - own.keys()
        for name in own if renamed else ():
            if name not in files:
                parts.setdefault(layer_of(name), {})[name] = own[name]
        for part in parts.values():
            converted = revert_weight_conversion(model, {name: whole(weight) for name, weight in part.items()})
            for name in (name for name in converted if name in renamed):
                yield name, converted[name], files[name].get_tensor(name)


def name_in_files(name: str) -> str:
    """Return the name in files of a weight that a model with adapters has in memory as `name`."""
    for in_memory, in_files in _NAMES:
        name = name.replace(in_memory, in_files)
    return name


def take_probe(model: PreTrainedModel, dtype: Dtype) -> Probe:
    """Return what `model` computes for 16 fixed random tokens with its weights in `dtype`.

    Nothing about the model changes. Noise must not be installed.
    """
    vocabulary = model.get_input_embeddings().weight.shape[0]
    generator = keyed_generator("cpu", 0, "probe of a checkpoint")
    token_ids = torch.randint(vocabulary, (_NUM_TOKENS,), generator=generator).tolist()
    logits, effects = _compute(model, dtype, token_ids)
    top = logits[-_POSITIONS:].topk(min(_TOP, logits.shape[-1]))
    return Probe(
        dtype=dtype,
        token_ids=tuple(token_ids),
        top_tokens=tuple(map(tuple, top.indices.tolist())),
        top_logits=tuple(map(tuple, top.values.float().tolist())),
        logits_sha256=_sha256(logits),
        adapter_effects=effects,
    )


def refuse_other_outputs(model: PreTrainedModel, folder: Path) -> None:
    """Raise ModelError unless `model` computes what the trainer's model computed when it saved `folder`.

    Folders without a probe in their record pass: they are no checkpoints of this package.
    """
    if not (folder / PREPARED_MODEL_FILE).is_file():
        return
    stored = read_prepared_model(folder).probe
    problem = probe_problem(model, stored) if stored is not None else None
    if problem is not None:
        raise ModelError(f"model {str(folder)!r}: {problem}")


def probe_problem(model: PreTrainedModel, stored: Probe) -> str | None:
    """Return how the outputs of `model` differ from the stored ones, in one line; None if they are equal."""
    tolerance = _tolerance(model, stored.dtype)
    logits, effects = _compute(model, stored.dtype, stored.token_ids)
    problem = _effects_problem(effects, stored.adapter_effects, tolerance)
    if problem is not None or _sha256(logits) == stored.logits_sha256:
        return problem
    return _logits_problem(logits, stored, tolerance)


def _compute(model: PreTrainedModel, dtype: Dtype, token_ids: Sequence[int]) -> tuple[Tensor, _Effects]:
    """Return the logits [tokens, vocabulary] in double precision, and the effects of adapters."""
    with ExitStack() as stack:
        effects = _watch_adapters(model, stack)
        device = stack.enter_context(_double_precision(model, getattr(torch, dtype)))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_DoubleForFloat())
        # For tensors that a model creates without a format.
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        output = model(torch.tensor([token_ids], device=device), use_cache=False)
        return output.logits[0].double().cpu(), effects()


def _sha256(logits: Tensor) -> str:
    return hashlib.sha256(logits.float().numpy().tobytes()).hexdigest()


def _effects_problem(found: _Effects, stored: _Effects, tolerance: float) -> str | None:
    """Compare the effects of adapters, relative to their own size."""
    for name in sorted({*found, *stored}):
        ours, theirs = (effects.get(name, AdapterEffect(norm=0.0, projection=0.0)) for effects in (found, stored))
        margin = tolerance * theirs.norm
        if abs(ours.norm - theirs.norm) <= margin and abs(ours.projection - theirs.projection) <= margin:
            continue
        if ours.norm == 0.0:
            return f"adapters not applied to {name} (switched off, removed or merged with loss)"
        ratio = ours.norm / theirs.norm if theirs.norm else 1.0
        if abs(ratio - 1) > _SCALED and abs(ours.projection - ratio * theirs.projection) <= 10 * tolerance * ours.norm:
            return f"adapters scaled: those of {name} have {ratio:.4g} times the effect that they had in training"
        return f"the adapters of {name} have another effect than in training: of another step, run or base"
    return None


def _logits_problem(logits: Tensor, stored: Probe, tolerance: float) -> str | None:
    expected = torch.tensor(stored.top_logits, dtype=torch.float64)
    found = logits[-len(stored.top_tokens) :].gather(-1, torch.tensor(stored.top_tokens))
    difference = float((found - expected).abs().max() / expected.abs().max())
    if difference <= tolerance:
        return None
    return (
        f"it does not compute what the trainer's model computed: logits of fixed tokens differ by {difference:.2g} of "
        f"the largest one, {tolerance:.2g} would be rounding; adapters or weights not applied, scaled or merged with "
        "loss, or another configuration or other code"
    )


def _tolerance(model: nn.Module, dtype: Dtype) -> float:
    """Return the accepted relative difference of a model whose weights were probed in `dtype`."""
    held, probed = torch.finfo(next(model.parameters()).dtype), torch.finfo(getattr(torch, dtype))
    keeps_every_bit = held.eps <= probed.eps and held.smallest_normal <= probed.smallest_normal
    return _TOLERANCE if keeps_every_bit else _COARSE_STEPS * held.eps


class _DoubleForFloat(TorchFunctionMode):
    """Computes in double precision where a model asks for float32: in norms, softmax and rotary embeddings."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        wider = {name: _wider(value) for name, value in (kwargs or {}).items()}
        return func(*map(_wider, args), **wider)


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _watch_adapters(model: nn.Module, stack: ExitStack) -> Callable[[], _Effects]:
    """Measure what each adapter adds to the output of the module below it; the result is called after the forward."""
    sums: dict[str, Tensor] = {}
    below: dict[str, Tensor] = {}

    def note(name: str, _module: nn.Module, _args: Any, output: Tensor) -> None:
        # The clone stays what it is if the adapter is added in place.
        below[name] = output.clone()

    def add(name: str, _module: nn.Module, _args: Any, output: Tensor) -> None:
        added, kind = (output - below.pop(name)).double().cpu(), name.rsplit(".", 1)[-1]
        signs = torch.randint(0, 2, added.shape, generator=keyed_generator("cpu", 0, f"probe of {name}")) * 2 - 1
        found = torch.stack([added.square().sum(), (added * signs).sum()])
        sums[kind] = sums.get(kind, torch.zeros_like(found)) + found

    for name, module in adapted_modules(model).items():
        stack.callback(module.get_base_layer().register_forward_hook(partial(note, name)).remove)
        stack.callback(module.register_forward_hook(partial(add, name)).remove)
    return lambda: {
        kind: AdapterEffect(norm=float(squares) ** 0.5, projection=float(projection))
        for kind, (squares, projection) in sorted(sums.items())
    }


@contextmanager
def _double_precision(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[torch.device]:
    """Make `model` compute in double precision, in evaluation mode; yields the device of its inputs.

    Every decoder layer, and every module outside the layers, gets copies of its weights while it computes. The weights
    themselves are not touched: data parallelism has hooks on them. Devices without double precision leave the
    computation to the CPU.
    """
    own = next(model.parameters()).device
    device = own if own.type in ("cpu", "cuda") else torch.device("cpu")
    layers = list(decoder_layers(model))
    inside = {module for layer in layers for module in layer.modules()}
    training = [module for module in model.modules() if module.training]
    experts = model.config._experts_implementation
    with ExitStack() as stack:
        stack.callback(_set_training, training)
        model.eval()
        if experts is not None:
            # The grouped product of experts has no double precision.
            stack.callback(setattr, model.config, "_experts_implementation", experts)
            model.config._experts_implementation = "eager"
        for layer in layers:
            _with_copies(layer, list(layer.modules()), device, dtype, stack)
        for module in model.modules():
            if module not in inside and (module._parameters or module._buffers):
                _with_copies(module, [module], device, dtype, stack)
        yield device


def _set_training(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        module.training = True


def _with_copies(
    module: nn.Module, owners: Sequence[nn.Module], device: torch.device, dtype: torch.dtype, stack: ExitStack
) -> None:
    """Replace the weights and buffers of `owners` by copies in double precision while `module` computes."""
    saved: list[tuple[dict[str, Any], str, Tensor]] = []
    factors = [getattr(owner, name) for owner in owners for name in ("lora_A", "lora_B") if hasattr(owner, name)]
    # Adapters are stored with every bit, other weights in the checkpoint's number format.
    adapters = {part for factor in factors for part in factor.modules()}

    def enter(*_: object) -> None:
        for owner in owners:
            for name, weight in owner._parameters.items():
                if weight is not None and weight.is_floating_point():
                    saved.append((owner._parameters, name, weight))
                    rounded = weight.detach().to(weight.dtype if owner in adapters else dtype)
                    owner._parameters[name] = nn.Parameter(rounded.to(device, torch.float64), requires_grad=False)
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    saved.append((owner._buffers, name, buffer))
                    wide = torch.float64 if buffer.is_floating_point() else buffer.dtype
                    owner._buffers[name] = buffer.to(device, wide)

    def leave(*_: object) -> None:
        for holder, name, tensor in saved:
            holder[name] = tensor
        saved.clear()

    stack.callback(leave)
    stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
    stack.callback(module.register_forward_hook(leave, always_call=True).remove)
