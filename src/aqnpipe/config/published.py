"""Printed figures of a paper and its claims, as `aqnpipe check-published` reads them (config/published.yaml is an example)."""

from collections.abc import Iterator
from decimal import Decimal
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from aqnpipe.config.analysis import TestedClaim
from aqnpipe.config.base import FrozenModel


def _number(text: str) -> str:
    Decimal(text)
    return text


def _percentage(text: str) -> str:
    if not 0 <= Decimal(text) <= 100:
        raise ValueError("expected a percentage from 0 to 100")
    return text


Printed = Annotated[str, Field(strict=True, pattern=r"^[+-]?[0-9]*\.?[0-9]+(e[+-]?[0-9]+)?$"), AfterValidator(_number)]
"""A number as printed, in quotes: "70.20" has two decimals, which decide what it may stand for."""


class PublishedAccuracy(FrozenModel):
    """An accuracy in percent, of so many questions; `arm`, `noise_level` and `step` tie it to a study's arm."""

    id: str
    label: str
    percent: Annotated[Printed, AfterValidator(_percentage)]
    num_questions: int = Field(ge=2)
    arm: str | None = None
    noise_level: float | None = Field(default=None, ge=0, lt=1)
    step: int | None = Field(default=None, ge=0)


class PublishedLoss(FrozenModel):
    """Mean and standard deviation of a loss (nats per token) over runs."""

    id: str
    label: str
    mean: float
    std: float = Field(ge=0)
    ddof: Literal[0, 1] = Field(default=1, description="1 where the deviation divides by runs - 1 (assumed if unsaid)")
    num_runs: int = Field(ge=2)
    vocabulary_size: int | None = Field(default=None, ge=2, description="guessing uniformly has loss ln of it")
    arm: str | None = None
    values: tuple[float, ...] = Field(
        default=(), description="the loss of every run, in the same order of seeds on all sides: allows a paired test"
    )

    @model_validator(mode="after")
    def _values_of_all_runs(self) -> Self:
        if self.values and len(self.values) != self.num_runs:
            raise ValueError(f"values: found {len(self.values)}, expected one for each of {self.num_runs} runs")
        return self


class PublishedSeries(FrozenModel):
    """Accuracies of one checkpoint at several noise levels, by id."""

    id: str
    label: str
    accuracies: tuple[str, ...] = Field(min_length=2)


class ReportedNumbers(FrozenModel):
    """What somebody printed about a claim: the paper itself, or an earlier re-analysis. In the claim's unit."""

    by: str
    difference: Printed | None = None
    ci_low: Printed | None = None
    ci_high: Printed | None = None
    p_value: Printed | None = None


class AuditClaim(TestedClaim):
    """What every claim of a paper states beside its test.

    `differs_in`: what differs between the sides besides the factor that the claim names; anything makes it invalid.
    """

    id: str
    differs_in: tuple[str, ...] = ()
    reported: tuple[ReportedNumbers, ...] = ()


class AccuracyClaim(AuditClaim):
    """One accuracy against another. `paired`: both sides answered the same questions."""

    kind: Literal["accuracies"] = "accuracies"
    treatment: str
    control: str
    between_runs: bool = Field(default=True, description="the sides are different training runs, not one checkpoint")
    paired: bool = True


class LossClaim(AuditClaim):
    """One loss against another; a lower loss is better."""

    kind: Literal["losses"] = "losses"
    treatment: str
    control: str


class Pair(FrozenModel):
    """A difference of two accuracies, by id."""

    treatment: str
    control: str


class DifferencesClaim(AuditClaim):
    """One difference of accuracies minus another."""

    kind: Literal["differences"] = "differences"
    first: Pair
    second: Pair


class RatioClaim(AuditClaim):
    """One difference of accuracies divided by another, tested against 1: "four times the effect"."""

    kind: Literal["ratio"] = "ratio"
    first: Pair
    second: Pair

    @model_validator(mode="after")
    def _no_margin(self) -> Self:
        if self.test != "superiority":
            raise ValueError("a ratio is tested for superiority alone")
        return self


PublishedClaim = Annotated[AccuracyClaim | LossClaim | DifferencesClaim | RatioClaim, Field(discriminator="kind")]


class RunScatter(FrozenModel):
    """Standard deviation of the accuracy between identical training runs, in percentage points."""

    points: float = Field(gt=0)
    num_runs: int = Field(ge=2)
    source: str = ""


class Detectable(FrozenModel):
    """A sample size whose minimum detectable paired difference is wanted."""

    num_questions: int = Field(ge=2)
    discordant_fraction: float = Field(gt=0, le=1)
    reported: Printed | None = Field(default=None, description="points that an earlier analysis states")


class PublishedFile(FrozenModel):
    """The content of a file of published figures."""

    title: str
    source: str = Field(description="where the figures come from")
    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    power: float = Field(default=0.8, gt=0.5, lt=1)
    run_scatter: RunScatter | None = None
    accuracies: tuple[PublishedAccuracy, ...] = ()
    losses: tuple[PublishedLoss, ...] = ()
    series: tuple[PublishedSeries, ...] = ()
    claims: tuple[PublishedClaim, ...] = ()
    detectable: tuple[Detectable, ...] = ()

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        for kind, entries in (("accuracies", self.accuracies), ("losses", self.losses), ("claims", self.claims)):
            names = [entry.id for entry in entries]
            repeated = sorted({name for name in names if names.count(name) > 1})
            if repeated:
                raise ValueError(f"{kind}: id {repeated[0]} is used twice")
        accuracies, losses = {one.id for one in self.accuracies}, {one.id for one in self.losses}
        for where, name, known in self._references(accuracies, losses):
            if name not in known:
                raise ValueError(f"{where}: unknown id {name!r}, the file has {', '.join(sorted(known)) or 'none'}")
        return self

    def _references(self, accuracies: set[str], losses: set[str]) -> Iterator[tuple[str, str, set[str]]]:
        for series in self.series:
            yield from ((f"series {series.id}", name, accuracies) for name in series.accuracies)
        for claim in self.claims:
            where = f"claim {claim.id}"
            if isinstance(claim, AccuracyClaim | LossClaim):
                known = accuracies if isinstance(claim, AccuracyClaim) else losses
                yield from ((where, name, known) for name in (claim.treatment, claim.control))
            else:
                for pair in (claim.first, claim.second):
                    yield from ((where, name, accuracies) for name in (pair.treatment, pair.control))
