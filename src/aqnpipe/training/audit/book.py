"""The completions of the current rollout: who must be trained on what, with which advantage."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from aqnpipe.seeding import derive_seed

Row = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids of a prompt and of its completion."""


@dataclass
class Completed:
    """One completion with its advantage, and its log-probabilities by place, as far as forwards computed them."""

    row: Row
    reward: float
    centred_reward: float
    advantage: float
    group: int
    sampled: Sequence[float]
    reference: dict[int, float] | None = None
    old: dict[int, float] | None = None
    is_trained: bool = False


@dataclass
class RolloutBook:
    """The completions of one rollout on this worker. `tokens`: of all workers together, as a mean per worker."""

    completions: list[Completed] = field(default_factory=list)
    tokens_per_worker: float = 0.0

    def __post_init__(self) -> None:
        self._by_row: dict[Row, list[Completed]] = defaultdict(list)
        for completed in self.completions:
            self._by_row[completed.row].append(completed)

    def candidates(self, row: Row) -> list[Completed]:
        """Return the completions with these tokens: several rows of a group may have the same."""
        return self._by_row.get(row, [])

    def take(self, row: Row) -> str | None:
        """Note that a row is trained on; return what is wrong with it."""
        found = self.candidates(row)
        if not found:
            prompts = {completed.row[0] for completed in self.completions}
            if row[0] in prompts and not row[1]:
                return "the tokens of a completion are masked"
            return "a micro-batch has a row that is no completion of the rollout (other tokens, or another mask)"
        free = next((completed for completed in found if not completed.is_trained), None)
        if free is None:
            return "a completion was trained on twice"
        free.is_trained = True
        return None

    @property
    def num_untrained(self) -> int:
        """Completions that no micro-batch contained."""
        return sum(not completed.is_trained for completed in self.completions)


def audited_places(row: Row, width: int, seed: int) -> list[int]:
    """Return the places of a completion, in a batch of `width` places, that are audited: some tokens and a padding."""
    length = len(row[1])
    keyed = derive_seed(seed, "audited places", *row[1][:16], length)
    places = {length - 1, *((keyed >> 9 * number) % length for number in range(4))} if length else set()
    return sorted(places | ({length + keyed % (width - length)} if length < width else set()))
