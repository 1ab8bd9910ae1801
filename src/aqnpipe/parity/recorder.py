"""Records what operators make of the sampled tokens, and puts other values in their place where that is asked.

The recorder sees operators by taps: hooks on the modules of a model, of whatever engine. An engine says which modules
are which operators; how they are seen is the same for all. Results are replaced in place, so no hook returns anything.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from aqnpipe.errors import DataError, ModelError
from aqnpipe.noise.kernels.shards import Shard
from aqnpipe.parity.forms import ActivationForm, AttentionForm, Form, LinearForm, Operator, RotaryForm
from aqnpipe.parity.sample import Sample, Token
from aqnpipe.seeding import keyed_generator

MAX_CHANNELS = 64
"""Output channels of every operator whose exact results are computed and stored."""

RESIDUALS = ("attention_residual", "mlp_residual")

Edit = Callable[[str, Tensor, Tensor], Tensor | None]
"""Returns what replaces the results [rows, width] of an operator; gets its name, the rows of the sample, the results.

None leaves them.
"""

Hook = Callable[..., object]


class Result(NamedTuple):
    """An input that is the result of an operator before, or some of its columns."""

    name: str
    first: int | None = None
    last: int | None = None


@lru_cache(maxsize=64)
def sampled_channels(width: int) -> Tensor:
    """Return the sampled output channels, in order, not to be written to; random: a stride meets the same lanes."""
    if width <= MAX_CHANNELS:
        return torch.arange(width)
    return torch.randperm(width, generator=keyed_generator("cpu", 0, "parity.channels", width))[:MAX_CHANNELS].sort()[0]


def replaying(values: Mapping[str, Tensor]) -> Edit:
    """Return the edit that feeds the results of another capture, by operator, to the operators behind."""

    def edit(name: str, rows: Tensor, results: Tensor) -> Tensor | None:
        found = values.get(name)
        if found is None:
            return None
        if found.shape[1] != results.shape[1]:
            raise DataError(
                f"operator {name} has {found.shape[1]} channels in the replayed capture, {results.shape[1]} here"
            )
        return found[rows].to(results)

    return edit


@dataclass(frozen=True)
class Recording:
    """What was recorded: a row of facts for each operator (`OPERATOR_COLUMNS`), and tensors by kind/operator.

    The kinds are output, and exact, bound and input_rms if results were judged.
    """

    operators: dict[str, dict[str, Any]]
    tensors: dict[str, Tensor]


@dataclass
class _Seen:
    """What was seen of an operator: in each call the rows of the sample, its results, and the inputs that are tensors.

    `sources` are all inputs: those that are results of operators, and None for tensors.
    """

    operator: Operator
    width: int
    sources: list[Result | None]
    calls: list[tuple[Tensor, ...]] = field(default_factory=list)

    def joined(self) -> list[Tensor]:
        """Return the rows of the sample in order, and results and inputs in their order."""
        rows, *parts = (torch.cat(column) for column in zip(*self.calls, strict=True))
        order = rows.argsort()
        return [rows[order], *(part[order] for part in parts)]

    def inputs(self, parts: Iterable[Tensor], results: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return all inputs: `parts` are those that were seen, the others are results before it."""
        left = iter(parts)
        return tuple(
            next(left) if source is None else results[source.name][:, source.first : source.last]
            for source in self.sources
        )

    def is_linked(self, inputs: Sequence[Tensor], results: Mapping[str, Tensor]) -> bool:
        """Return whether inputs are results of operators before, so that nothing else computes in between."""
        # The values of attention may be the last columns of a merged projection.
        may_be_part = isinstance(self.operator.form, AttentionForm)
        latest = list(results.values())[::-1]
        return not results or all(
            any(
                torch.equal(part, result[:, -part.shape[1] :].to(part))
                for result in latest
                if result.shape == part.shape or (may_be_part and result.shape[1] > part.shape[1])
            )
            for source, part in zip(self.sources, inputs, strict=True)
            if source is None
        )

    def facts(self, output: Tensor) -> dict[str, Any]:
        """Return the row of the operator in the table of a capture, without what is judged."""
        values, operator = output.double(), self.operator
        return {
            "name": operator.name,
            "kind": operator.kind,
            "layer": operator.layer,
            "width": self.width,
            "dtype": str(output.dtype).removeprefix("torch."),
            "mean": float(values.mean()),
            "rms": float(values.square().mean().sqrt()),
            "largest": float(values.abs().max()),
            "zero_share": float((values == 0).double().mean()),
            "sha256": sha256(output.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest(),
            **{"strict": 0.0, "loose": 0.0, "reduced": None, "algorithms": "{}", "is_linked": True},
        }


class Recorder:
    """Sees the results of operators in their order. `begin` names the call that the next results belong to.

    `edit` replaces results after they were recorded, so the next operator gets the new ones as its input. Without
    `judges`, no exact results are computed; only sampled channels are kept, and nothing where results are edited.
    `gather` returns the columns of all tensor-parallel workers for those of this one.
    """

    def __init__(
        self,
        sample: Sample,
        *,
        edit: Edit | None = None,
        judges: bool = True,
        gather: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.sample = sample
        self._edit, self._judges, self._gather = edit, judges, gather
        self._seen: dict[str, _Seen] = {}
        self._shape = torch.Size((0, 0))
        self._places = sample.places(())

    def begin(self, shape: Sequence[int], tokens: Iterable[Token]) -> None:
        """Start a forward call over `tokens` of a batch of this shape, (rows, columns)."""
        self._shape, self._places = torch.Size(shape), self.sample.places(tokens)

    @property
    def is_idle(self) -> bool:
        """Return whether no token of this call is recorded."""
        return not len(self._places[2])

    @property
    def num_columns(self) -> int:
        """Number of columns of this call."""
        return self._shape[1]

    def see(self, operator: Operator, inputs: Sequence[Tensor | Result], output: Tensor) -> None:
        """Record an operator's results [batch, columns, ...], and replace them in place if they are edited.

        Inputs are tensors of the same kind.
        """
        if self.is_idle:
            return
        values, rows = self._rows(output, operator.shard), self._places[2]
        if self._judges or self._edit is None:
            self._record(operator, inputs, values)
        edited = None if self._edit is None else self._edit(operator.name, rows, values)
        if edited is not None:
            own = edited if operator.shard is None else operator.shard.of(edited)
            numbers, columns = (place.to(output.device) for place in self._places[:2])
            output.detach()[numbers, columns] = own.reshape(len(rows), *output.shape[2:])

    def _rows(self, tensor: Tensor, shard: Shard | None) -> Tensor:
        """Return the recorded tokens of a tensor of this call as a copy [rows, width], of all workers' columns."""
        if tensor.shape[:2] != self._shape:
            raise ModelError(
                f"parity: an operator has values of shape {list(tensor.shape)}, expected a row of channels for each of "
                f"{list(self._shape)} tokens"
            )
        numbers, columns = (place.to(tensor.device) for place in self._places[:2])
        own = tensor.detach()[numbers, columns].reshape(len(numbers), -1)
        return own if shard is None or self._gather is None else shard.whole(self._gather(own))

    def _record(self, operator: Operator, inputs: Sequence[Tensor | Result], values: Tensor) -> None:
        seen = self._seen.get(operator.name)
        if seen is None:
            sources = [source if isinstance(source, Result) else None for source in inputs]
            seen = self._seen[operator.name] = _Seen(operator, values.shape[1], sources)
        if operator.is_wide or not self._judges:
            values = values[:, sampled_channels(values.shape[1]).to(values.device)]
        shards = operator.input_shards or (None,) * len(inputs)
        parts = [
            self._rows(part, shard).cpu()
            for part, shard in zip(inputs, shards, strict=True)
            if self._judges and isinstance(part, Tensor)
        ]
        seen.calls.append((self._places[2], values.cpu(), *parts))

    def finish(self) -> Recording:
        """Return what was recorded; ModelError unless every sampled token was seen exactly once by every operator."""
        if not self._seen:
            raise ModelError("no operator was seen: no forward pass was over the tokens of the capture")
        recording, results = Recording({}, {}), dict[str, Tensor]()
        for name, seen in self._seen.items():
            rows, output, *parts = seen.joined()
            if not torch.equal(rows, torch.arange(self.sample.num_rows)):
                raise ModelError(
                    f"operator {name}: seen for {len(rows)} tokens, expected each of {self.sample.num_rows} once; "
                    "a forward pass of another kind (profiling, padding) would be compared"
                )
            recording.tensors[f"output/{name}"] = output
            recording.operators[name] = seen.facts(output)
            if not self._judges:
                continue
            inputs = seen.inputs(parts, results)
            fed = None if self._edit is None or seen.operator.is_wide else self._edit(name, rows, output)
            recording.operators[name]["is_linked"] = seen.is_linked(inputs, results)
            results[name] = output if fed is None else fed
            _judge(recording, seen.operator, inputs, fed, self.sample.positions)
        return recording


def _judge(
    recording: Recording, operator: Operator, inputs: tuple[Tensor, ...], fed: Tensor | None, positions: Tensor
) -> None:
    """Add the exact results of an operator, and how far its own are from them; `fed` are results of another capture."""
    name, facts = operator.name, recording.operators[operator.name]
    output, dtype = recording.tensors[f"output/{name}"], recording.tensors[f"output/{name}"].dtype
    sampled = sampled_channels(facts["width"])
    judged = _judged_channels(operator, facts["width"], output, fed)
    expected = operator.form.expected(inputs, positions, judged, dtype)
    error = ((output if operator.is_wide else output[:, judged]).double() - expected.exact).abs()
    facts["strict"], facts["loose"] = (_largest(error / bound) for bound in (expected.strict, expected.loose))
    facts["reduced"] = None if expected.reduced is None else _largest(error / expected.reduced)
    if dtype in (torch.bfloat16, torch.float16):
        candidates = operator.form.candidates(inputs, positions, dtype)
        equal = {kind: float((run().to(dtype) == output).double().mean()) for kind, run in candidates.items()}
        facts["algorithms"] = json.dumps(equal)
    kept = expected.at(torch.isin(judged, sampled))
    recording.tensors[f"exact/{name}"], recording.tensors[f"bound/{name}"] = kept.exact, kept.loose.float()
    recording.tensors[f"input_rms/{name}"] = inputs[0].float().square().mean(-1).sqrt()


def _judged_channels(operator: Operator, width: int, output: Tensor, fed: Tensor | None) -> Tensor:
    """Return the channels to compare with exact results, in order: all, of a linear the sampled ones.

    The exact result of a linear costs as much as the operator. In a replay it is computed also for the channels that
    differ most from those of the other side, so that a fault of one channel does not escape the sample.
    """
    if not isinstance(operator.form, LinearForm):
        return torch.arange(width)
    if fed is None:
        return sampled_channels(width)
    apart, size = (output.double() - fed.double()).abs().amax(0), fed.double().square().mean(0).sqrt()
    share = (apart / (size + size.mean())).nan_to_num(torch.inf, posinf=torch.inf)
    return torch.cat((sampled_channels(width), share.topk(min(MAX_CHANNELS, len(share))).indices)).unique()


def _largest(ratios: Tensor) -> float:
    largest = float(ratios.max())
    return largest if math.isfinite(largest) else math.inf


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
