"""Printed figures and claims of a paper, as `aqnpipe check-published` reads them; see config/published.yaml."""

from collections.abc import Iterator
from decimal import Decimal
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

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
"""A number as printed, in quotes, because its decimals matter: "70.20" is rounded to two places."""


class PublishedAccuracy(FrozenModel):
    """An accuracy in percent and its number of questions; `arm`, `noise_level` and `step` link it to a study."""

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
    ddof: Literal[0, 1] = 1
    """1: the deviation was divided by runs - 1 (assumed if not stated)"""
    num_runs: int = Field(ge=2)
    vocabulary_size: int | None = Field(default=None, ge=2)
    """a uniform guess has the loss ln(vocabulary_size)"""
    arm: str | None = None
    values: tuple[float, ...] = ()
    """the loss of every run, all in the same order of seeds; allows a paired test"""

    def _problems(self) -> Iterator[str]:
        if self.values and len(self.values) != self.num_runs:
            yield f"values: found {len(self.values)}, expected one for each of {self.num_runs} runs"


class PublishedSeries(FrozenModel):
    """Ids of the accuracies of one checkpoint at several noise levels."""

    id: str
    label: str
    accuracies: tuple[str, ...] = Field(min_length=2)


class ReportedNumbers(FrozenModel):
    """Figures printed about a claim, by the paper or by a re-analysis, in the unit of the claim."""

    by: str
    difference: Printed | None = None
    ci_low: Printed | None = None
    ci_high: Printed | None = None
    p_value: Printed | None = None


class PaperClaim(TestedClaim):
    """A claim of a paper, and the figures printed about it.

    `differs_in`: differences between the sides other than the factor of the claim. Any of them makes the claim invalid.
    """

    id: str
    differs_in: tuple[str, ...] = ()
    reported: tuple[ReportedNumbers, ...] = ()


class AccuracyClaim(PaperClaim):
    """One accuracy compared with another. `paired`: both sides answered the same questions."""

    kind: Literal["accuracies"] = "accuracies"
    treatment: str
    control: str
    between_runs: bool = True
    """whether the sides are different training runs, not one checkpoint"""
    paired: bool = True


class LossClaim(PaperClaim):
    """One loss compared with another; a lower loss is better."""

    kind: Literal["losses"] = "losses"
    treatment: str
    control: str


class Pair(FrozenModel):
    """Two accuracies by id, whose difference is meant."""

    treatment: str
    control: str


class DifferencesClaim(PaperClaim):
    """A difference of accuracies minus another one."""

    kind: Literal["differences"] = "differences"
    first: Pair
    second: Pair


class RatioClaim(PaperClaim):
    """A difference of accuracies divided by another one, tested against 1: "four times the effect"."""

    kind: Literal["ratio"] = "ratio"
    first: Pair
    second: Pair

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.test != "superiority":
            yield f"test: found {self.test}, expected superiority for a ratio"


PublishedClaim = Annotated[AccuracyClaim | LossClaim | DifferencesClaim | RatioClaim, Field(discriminator="kind")]


class RunScatter(FrozenModel):
    """Standard deviation of the accuracy between identical training runs, in percentage points."""

    points: float = Field(gt=0)
    num_runs: int = Field(ge=2)
    source: str = ""


class Detectable(FrozenModel):
    """A sample size for which the minimum detectable paired difference is computed."""

    num_questions: int = Field(ge=2)
    discordant_fraction: float = Field(gt=0, le=1)
    reported: Printed | None = None
    """minimum difference in points stated by an earlier analysis"""


class PublishedFile(FrozenModel):
    """Content of a file of published figures."""

    title: str
    source: str
    """source of the figures"""
    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    power: float = Field(default=0.8, gt=0.5, lt=1)
    run_scatter: RunScatter | None = None
    accuracies: tuple[PublishedAccuracy, ...] = ()
    losses: tuple[PublishedLoss, ...] = ()
    series: tuple[PublishedSeries, ...] = ()
    claims: tuple[PublishedClaim, ...] = ()
    detectable: tuple[Detectable, ...] = ()

    def _problems(self) -> Iterator[str]:
        # Messages contain ids as repr: pydantic cannot encode half a surrogate pair.
        for kind, entries in (("accuracies", self.accuracies), ("losses", self.losses), ("claims", self.claims)):
            names = [entry.id for entry in entries]
            repeated = sorted({name for name in names if names.count(name) > 1})
            if repeated:
                yield f"{kind}: id {repeated[0]!r} is used twice"
        accuracies, losses = {entry.id for entry in self.accuracies}, {entry.id for entry in self.losses}
        for where, name, known in self._references(accuracies, losses):
            if name not in known:
                yield f"{where}: unknown id {name!r}, the file has {', '.join(map(repr, sorted(known))) or 'none'}"

    def _references(self, accuracies: set[str], losses: set[str]) -> Iterator[tuple[str, str, set[str]]]:
        for series in self.series:
            yield from ((f"series {series.id!r}", name, accuracies) for name in series.accuracies)
        for claim in self.claims:
            known = losses if isinstance(claim, LossClaim) else accuracies
            pairs = [claim.first, claim.second] if isinstance(claim, DifferencesClaim | RatioClaim) else [claim]
            names = (name for pair in pairs for name in (pair.treatment, pair.control))
            yield from ((f"claim {claim.id!r}", name, known) for name in names)
