"""The experts that the sampler's routers chose: compared with those of the trained policy, and replayed in it.

Noise, other kernels or other shapes of the same products change scores, and with them the experts of some tokens:
sampler and policy are then different networks. With routing replay (R3, arXiv:2510.11370) every pass of the policy over
sampled tokens uses the sampler's experts, with its own scores. The reference of the KL term is another policy, so its
routers choose as they always do.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from aqnpipe.errors import ReceiptError
from aqnpipe.generation.backend import Completion, RoutedCompletion
from aqnpipe.models.routers import Routers
from aqnpipe.training.ranks import gathered


class RoutedRollouts:
    """The experts of the rollouts of this worker, by row; none for a dense model, or if the sampler noted none."""

    def __init__(self, network: nn.Module, *, replays: bool) -> None:
        self._routers = Routers(network)
        self._replays = replays
        self._rows: list[Tensor] = []
        self._counts: list[tuple[int, int, int, int]] = []
        if replays:
            self._routers.examine()

    def uncounted(self) -> "RoutedRollouts":
        """Return these rollouts with counts of their own, for a pass that is not the training."""
        other = copy.copy(self)
        other._counts = []
        return other

    def begin(self, completions: Sequence[Completion]) -> None:
        """Keep the experts of new rollouts."""
        self._rows = [completion.experts for completion in completions if isinstance(completion, RoutedCompletion)]
        if self._replays and len(self._rows) != len(completions):
            raise ReceiptError("receipt invalid: routing_replay: the sampler noted no experts")

    @contextmanager
    def replayed(self, rows: Sequence[int], mask: Tensor) -> Iterator[None]:
        """Compute passes over `rows` in the body with the sampler's experts, if the arm asks for it.

        mask [rows, places]: 1 where a row has a token. A backward pass belongs into the same body.
        """
        if not self._replays:
            yield
            return
        with self._routers.replayed(self._aligned(rows, mask)):
            yield

    @contextmanager
    def compared(self, rows: Sequence[int], mask: Tensor) -> Iterator[None]:
        """Compare the experts of the forward in the body with the sampler's."""
        if not self._rows:
            yield
            return
        with self._routers.observed():
            yield
            found = self._routers.take(len(rows))
        if found is not None:
            self._count(self._aligned(rows, mask), found)

    def _count(self, wanted: Tensor, found: Tensor) -> None:
        """Count choices, those that are the same set, tokens, and those with the same sets in all layers."""
        pairs = zip(*map(self._routers.by_layer, (wanted, found)), strict=True)
        equal = [(one.sort(-1).values == other.sort(-1).values).all(-1) for one, other in pairs]
        same = torch.stack(equal, -1)[wanted[..., 0] >= 0]
        self._counts.append((same.numel(), int(same.sum()), len(same), int(same.all(-1).sum())))

    def _aligned(self, rows: Sequence[int], mask: Tensor) -> Tensor:
        """Return the sampler's experts at the places of `mask`, [rows, places, slots]; -1 where it read no token."""
        wanted = torch.full((*mask.shape, self._rows[0].shape[-1]), -1, dtype=torch.int16)
        for place, (row, shown) in enumerate(zip(rows, mask.cpu(), strict=True)):
            # The last token of a response was drawn, but not read.
            wanted[place, shown.nonzero()[:-1, 0]] = self._rows[row]
        return wanted

    def settle(self) -> dict[str, float]:
        """Return the shares over all workers by their log names, and reset them; nothing without comparisons."""
        if not self._routers:
            return {}
        counts = [count for of_worker in gathered(self._counts) for count in of_worker]
        self._counts = []
        if not counts:
            return {}
        choices, same, tokens, same_tokens = (sum(part) for part in zip(*counts, strict=True))
        return {"routers/agreement": same / choices, "routers/tokens_differing": 1 - same_tokens / tokens}
