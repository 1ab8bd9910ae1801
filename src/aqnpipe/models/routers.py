"""The routers of a mixture of experts: which experts compute each token, and replay of another choice.

Every block of a mixture in transformers calls a module `experts` with hidden states [tokens, channels] and the numbers
of the chosen experts [tokens, experts of a token], however its router scores them. That call is observed. Routers
choose by `topk`, some of them after a `topk` of groups; `examine` finds the one whose indices reach the experts. A
replay puts given experts, with their own scores, in place of its result. What the router makes of these scores stays as
it is, so gradients reach the router.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from aqnpipe.errors import ModelError
from aqnpipe.models.layout import decoder_layers
from aqnpipe.models.parts import PlaceHook
from aqnpipe.models.sharding import gathered_weights


class Routers:
    """The routers of a model in the order of its layers; false for a model without experts.

    Experts of a token are one row of all layers, [slots]; `ends`: the slot behind those of each layer, once observed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._blocks = [
            module
            for layer in decoder_layers(model)
            for module in layer.modules()
            if isinstance(getattr(module, "experts", None), nn.Module) and not isinstance(module.experts, nn.ModuleList)
        ]
        self._choices = [_Choice() for _ in self._blocks]
        self._seen: list[Tensor] = []
        self.ends: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._blocks)

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Observe the forward passes of the body; call `take` after each."""
        self._seen = []
        with ExitStack() as stack:
            for block in self._blocks:
                experts = block.get_submodule("experts")
                stack.callback(experts.register_forward_pre_hook(PlaceHook(self._note)).remove)
            yield

    def _note(self, module: nn.Module, args: Any) -> None:
        # A backward pass that computes a layer again is no pass of its own.
        if torch._C._current_autograd_node() is None and (index := _index_of(args)) is not None:
            self._seen.append(index)

    def take(self, rows: int) -> Tensor | None:
        """Return the experts that the last pass of `rows` rows ran, [rows, places, slots] on the host.

        None for a mixture whose experts get no numbers of experts.
        """
        seen, self._seen = self._seen, []
        if len(seen) != len(self._blocks):
            return None
        self.ends = list(accumulate(index.shape[-1] for index in seen))
        return torch.cat(seen, -1).to("cpu", torch.int16).unflatten(0, (rows, -1))

    def by_layer(self, experts: Tensor) -> tuple[Tensor, ...]:
        """Return `experts` [..., slots] of each layer."""
        return experts.tensor_split(self.ends[:-1], -1)

    def examine(self) -> None:
        """Find the choice of each router in one forward. Raises ModelError if that of any cannot be replayed."""
        if not self:
            raise ModelError(
                f"routing_replay: {type(self._model).__name__} has no routers, expected a mixture of experts"
            )
        was_training = self._model.training
        with torch.no_grad(), gathered_weights(self._model), self.observed(), self._entered():
            token = torch.zeros(1, 1, dtype=torch.long, device=next(self._model.parameters()).device)
            self._model.eval()(input_ids=token, use_cache=False)
            self._model.train(was_training)
            given = self._seen if len(self._seen) == len(self._blocks) else []
            found = [choice.find(index) for choice, index in zip(self._choices, given, strict=False)]
            self.take(1)
        if not found or not all(found):
            raise ModelError(
                f"routing_replay: {type(self._model).__name__} has a router that does not choose by topk what its "
                "experts get, so its choice cannot be replaced"
            )

    @contextmanager
    def replayed(self, experts: Tensor) -> Iterator[None]:
        """Make the routers choose `experts` [rows, places, slots] in the body where they are not negative.

        Forward and backward pass of a micro-batch belong into one body. Call `examine` before.
        """
        device = next(self._model.parameters()).device
        for choice, of_layer in zip(self._choices, self.by_layer(experts.flatten(0, 1)), strict=True):
            choice.given = of_layer.to(device, torch.long)
        try:
            with self._entered():
                yield
        finally:
            for choice in self._choices:
                choice.given = None

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Run every block in the body inside its choice."""
        with ExitStack() as stack:
            for block, choice in zip(self._blocks, self._choices, strict=True):
                stack.callback(block.register_forward_pre_hook(PlaceHook(choice.begin)).remove)
                stack.callback(block.register_forward_hook(PlaceHook(choice.end), always_call=True).remove)
            yield


class _Choice(TorchFunctionMode):
    """The calls of `topk` in one block; replaces the result of the one that chooses the experts if any are `given`."""

    _TOPK = (torch.topk, torch.Tensor.topk)

    def __init__(self) -> None:
        super().__init__()
        self.given: Tensor | None = None
        self._turn: int | None = None
        self._results: list[Tensor] = []

    def begin(self, *_: Any) -> None:
        """Begin a pass of the block."""
        self._results = []
        self.__enter__()

    def end(self, *_: Any) -> None:
        """End a pass of the block."""
        self.__exit__(None, None, None)

    def find(self, index: Tensor) -> bool:
        """Note which call gave `index` in the last pass; return whether any did."""
        turns = [turn for turn, found in enumerate(self._results) if found.data_ptr() == index.data_ptr()]
        self._turn = turns[-1] if turns else None
        return bool(turns)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func`."""
        found = func(*args, **(kwargs or {}))
        if func not in self._TOPK:
            return found
        self._results.append(found.indices)
        if self.given is None or len(self._results) != (self._turn or 0) + 1:
            return found
        scores = args[0] if args else (kwargs or {})["input"]
        index = torch.where(self.given < 0, found.indices, self.given)
        return torch.return_types.topk((scores.gather(-1, index), index))


def _index_of(args: Sequence[Any]) -> Tensor | None:
    """Return the numbers of experts among the arguments of an `experts` module; None if it gets none."""
    return next((value for value in args if isinstance(value, Tensor) and not value.dtype.is_floating_point), None)


class ReadExperts:
    """The experts that computed the tokens that a batch has read, by row."""

    def __init__(self, routers: Routers, num_rows: int) -> None:
        self._routers = routers
        self._parts: list[list[Tensor]] = [[] for _ in range(num_rows)]

    def note(self, rows: Sequence[int], lengths: Sequence[int], *, padded_behind: bool) -> None:
        """Note a pass that read `lengths` tokens of `rows`, with padding behind or before them."""
        experts = self._routers.take(len(rows))
        if experts is None:
            return
        for row, length, of_row in zip(rows, lengths, experts, strict=True):
            self._parts[row].append(of_row[:length] if padded_behind else of_row[len(of_row) - length :])

    def of_rows(self) -> list[Tensor | None]:
        """Return the experts [tokens, slots] of every row: of its prompt and of its response but the last token."""
        return [torch.cat(parts) if parts else None for parts in self._parts]
