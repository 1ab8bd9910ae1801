"""The training seeds of a study: a fixed list, or a rule by which a study adds seeds until its claims are decided."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Discriminator, Field, Tag, model_validator

from aqnpipe.config.base import FrozenModel, TrainingSeed

MAX_LOOKS = 50
MOST_SEEDS = 10_000
"""Most seeds of an arm. Planning takes time in proportion, and no study needs as many."""

FixedSeeds = Annotated[tuple[TrainingSeed, ...], Field(min_length=1, max_length=MOST_SEEDS)]


class AdaptiveSeeds(FrozenModel):
    """Seeds that are added while claims are open: 0 to start - 1, then `step` per interim analysis, up to `max`.

    Arms of open claims get more seeds, other arms keep theirs. Raising `max` continues a finished study.
    """

    start: int = Field(default=2, ge=2, description="seeds of every arm before the first look at the claims")
    step: int = Field(default=2, ge=1, description="seeds added after an interim analysis to arms with open claims")
    max: int = Field(
        le=MOST_SEEDS, description="most seeds of an arm: `start` plus a multiple of `step`; may be raised later"
    )
    futility: float = Field(
        default=0.05,
        ge=0,
        lt=0.5,
        description="a claim stays open without more seeds where its probability of being decided by `max` is lower",
    )
    reserve: float = Field(
        default=0.1,
        ge=0,
        lt=0.5,
        description="share of the error rate kept for analyses after `max` is raised; 0: `max` cannot be raised",
    )

    @model_validator(mode="after")
    def _looks_fit(self) -> Self:
        if self.max < self.start or (self.max - self.start) % self.step:
            above = self.start + -(-max(self.max - self.start, 0) // self.step) * self.step
            raise ValueError(
                f"max: found {self.max}, expected start plus a multiple of step, for example {above} "
                f"(start {self.start}, step {self.step})"
            )
        if self.num_looks > MAX_LOOKS:
            raise ValueError(f"max: {self.num_looks} looks at the claims, expected at most {MAX_LOOKS}")
        return self

    @property
    def num_looks(self) -> int:
        """Number of looks up to `max` seeds."""
        return 1 + (self.max - self.start) // self.step

    def seeds_at(self, look: int) -> int:
        """Return the number of seeds at a look; the first look is 1."""
        return self.start + (look - 1) * self.step


def _form(seeds: Any) -> str:
    """Return the form in which seeds are given, so that mistakes in one are not judged as the other."""
    return "AdaptiveSeeds" if isinstance(seeds, Mapping | AdaptiveSeeds) else "list"


Seeds = Annotated[
    Annotated[FixedSeeds, Tag("list")] | Annotated[AdaptiveSeeds, Tag("AdaptiveSeeds")], Discriminator(_form)
]
"""A list of seeds, or the rule by which they are added."""


def seed_numbers(seeds: tuple[int, ...] | AdaptiveSeeds) -> tuple[int, ...]:
    """Return all seeds that a study may use: those of the list, or 0 to max - 1."""
    return tuple(range(seeds.max)) if isinstance(seeds, AdaptiveSeeds) else seeds
