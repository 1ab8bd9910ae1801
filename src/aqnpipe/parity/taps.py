"""Taps: the hooks by which a recorder sees the operators of a model, of whatever engine.

An engine says which modules are which operators; how they are seen is the same for all. Results are replaced in place,
so no hook returns anything.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from aqnpipe.errors import ModelError
from aqnpipe.noise.kernels.shards import Shard
from aqnpipe.parity.forms import ActivationForm, AttentionForm, Form, Operator, RotaryForm
from aqnpipe.parity.recorder import Recorder, Result
from aqnpipe.parity.sample import Sample

RESIDUALS = ("attention_residual", "mlp_residual")

Hook = Callable[..., object]


class Attention:
    """Attention of a layer: what is seen where an engine gives it queries, keys and values, and what it returns.

    `rotary` is the form of the rotations before it, None if there are none; `before` are the kinds of operators of the
    layer. `shards`: which columns of queries, keys and values this worker has, and of the result.
    """

    def __init__(
        self,
        taps: "Taps",
        layer: int,
        rotary: RotaryForm | None,
        before: Collection[str],
        shards: Sequence[Shard | None] = (None,) * 4,
    ) -> None:
        self._taps, self._layer, self._before = taps, layer, before
        kinds = ("rotary_q", "rotary_k") if rotary is not None else ()
        self._rotations = [
            taps.operator(kind, rotary, layer, shard=shard)  # type: ignore[arg-type] # without a form there are no kinds
            for kind, shard in zip(kinds, shards, strict=False)
        ]
        self._core = taps.operator(
            "attention", AttentionForm(1.0, 1), layer, shard=shards[3], input_shards=tuple(shards[:3])
        )

    def see_inputs(self, parts: Sequence[Tensor]) -> None:
        """See the rotated queries and keys; `parts` [batch, columns, ...] are these and the values."""
        for number, operator in enumerate(self._rotations):
            self._taps.recorder.see(operator, [self._source(number, parts)], parts[number])

    def see_output(self, parts: Sequence[Tensor], form: AttentionForm, output: Tensor) -> None:
        """See the result."""
        self._taps.recorder.see(replace(self._core, form=form), parts, output)

    def _source(self, number: int, parts: Sequence[Tensor]) -> Result:
        """Return what makes queries (0) or keys (1): the last of norm and product, or columns of a merged product."""
        letter, prefix = "qk"[number], f"layers.{self._layer}."
        for kind in (f"{letter}_norm", f"{letter}_layernorm", f"{letter}_proj"):
            if kind in self._before:
                return Result(f"{prefix}{kind}")
        if "qkv_proj" not in self._before:
            raise ModelError(
                "parity: no linear that makes queries and keys was found by name in this model's attention"
            )
        widths = [part.flatten(2).shape[-1] for part in parts]
        return Result(f"{prefix}qkv_proj", sum(widths[:number]), sum(widths[: number + 1]))


class Taps:
    """The taps of a model; `with taps.of(recorder)` puts them in place, by which the recorder sees the operators.

    `operators` are those that the model is expected to run, `watched` the modules whose results are those of operators.
    """

    def __init__(self) -> None:
        self.recorder = Recorder(Sample(()))
        self.operators: list[Operator] = []
        self.watched: list[nn.Module] = []
        self.stack = ExitStack()
        self._hooks: list[Callable[[], Any]] = []

    def of(self, recorder: Recorder) -> Self:
        """Return these taps, as those of a recorder."""
        self.recorder = recorder
        return self

    def __enter__(self) -> Self:
        for register in self._hooks:
            self.stack.callback(register().remove)
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def batched(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the engine as a view [batch, columns, ...]."""
        return tensor

    def operator(self, kind: str, form: Form, layer: int | None = None, *, name: str = "", **facts: Any) -> Operator:
        """Return an operator of the model, of a layer or outside of them."""
        usual = kind if layer is None else f"layers.{layer}.{kind}"
        found = Operator(name or usual, kind, layer, form, **facts)
        self.operators.append(found)
        return found

    def before(self, module: nn.Module, hook: Hook) -> None:
        """Call `hook` with arguments and named arguments before the module, in calls that are recorded."""

        def run(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._unless_idle(hook, args, kwargs)

        self._hooks.append(lambda: module.register_forward_pre_hook(run, with_kwargs=True))

    def after(self, module: nn.Module, hook: Hook) -> None:
        """Call `hook` with arguments and result behind the module, in calls that are recorded."""

        def run(_: nn.Module, args: Any, output: Any) -> None:
            self._unless_idle(hook, args, output)

        self._hooks.append(lambda: module.register_forward_hook(run))

    def _unless_idle(self, hook: Hook, *given: Any) -> None:
        if not self.recorder.is_idle:
            with torch._C.DisableTorchFunction():
                hook(*given)

    def watch(
        self,
        module: nn.Module,
        *operators: Operator,
        views: Callable[[Tensor], Sequence[Tensor]] = lambda output: (output,),
    ) -> None:
        """See the first argument of a module, and its result as those of `operators`, each with some of its columns."""

        def hook(args: Any, output: Any) -> None:
            parts = views(output[0] if isinstance(output, tuple) else output)
            for operator, part in zip(operators, parts, strict=True):
                self.recorder.see(operator, [self.batched(args[0])], self.batched(part))

        self.after(module, hook)
        self.watched.append(module)

    def watch_activation(
        self, layer: int, form: ActivationForm, before: Sequence[str], down: nn.Module, shard: Shard | None = None
    ) -> None:
        """See what the linear `down` gets as the activation of what the linears `before` returned, by their kinds."""
        operator = self.operator("activation", form, layer, shard=shard)
        sources = [Result(f"layers.{layer}.{kind}") for kind in before]
        self.before(down, lambda args, _: self.recorder.see(operator, sources, self.batched(args[0])))
