"""Declared comparisons and the settings of statistics and report."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from aqnpipe.config.base import FrozenModel

PRETRAINED = "pretrained"
"""Stands for the model before any training wherever an arm id is expected."""

Direction = Literal["higher", "lower"]
TestKind = Literal["superiority", "non_inferiority", "equivalence"]


class TestedClaim(FrozenModel):
    """What every comparison states: the claim, how it is tested, and the family that shares its error rate.

    superiority: the difference is above (or below, see `expected`) 0. non_inferiority: it is above -margin, "loses no
    more than". equivalence: it is between -margin and margin (two one-sided tests).
    """

    claim: str = Field(description="the claim in words, as the study poses it")
    claim_zh: str | None = Field(default=None, description="the claim in Chinese; null: reports show `claim`")
    test: TestKind = "superiority"
    margin: float | None = Field(
        default=None, gt=0, lt=1, description="of non_inferiority and equivalence, a fraction: 0.02 is 2 points"
    )
    expected: Direction | None = Field(
        default=None, description="of superiority: direction of the claim about the difference"
    )
    family: str = Field(default="main", min_length=1, description="Holm adjusts over the comparisons of one family")

    @model_validator(mode="after")
    def _test_fits(self) -> Self:
        if self.test == "superiority":
            if self.margin is not None:
                raise ValueError("margin belongs to test: non_inferiority or equivalence")
            if self.direction is None:
                raise ValueError("superiority needs expected: higher or lower")
        else:
            if self.margin is None:
                raise ValueError(f"{self.test} needs a margin, fixed before the data are seen")
            if self.expected is not None:
                raise ValueError(f"expected belongs to test: superiority, {self.test} has its margin")
        return self

    @property
    def direction(self) -> Direction | None:
        """The direction that superiority claims; null for tests against a margin."""
        return self.expected


class TwoArms(TestedClaim):
    """A comparison of one arm with another, both after their last step."""

    treatment: str
    control: str

    @model_validator(mode="after")
    def _two_sides(self) -> Self:
        if self.treatment == self.control:
            raise ValueError("treatment and control must differ")
        return self


class ArmComparison(TwoArms):
    """Treatment against control at one evaluation noise level."""

    kind: Literal["arms"] = "arms"
    noise_level: float = Field(default=0.0, ge=0, lt=1)


class DegradationComparison(TwoArms):
    """What a noise level costs the treatment minus what it costs the control; higher: the treatment loses less."""

    kind: Literal["degradation"] = "degradation"
    noise_level: float = Field(gt=0, lt=1)


class LevelComparison(TestedClaim):
    """One arm at a noise level against itself without noise."""

    kind: Literal["levels"] = "levels"
    arm: str
    noise_level: float = Field(gt=0, lt=1)

    @property
    def direction(self) -> Direction | None:
        """Noise is expected to hurt unless the study says otherwise."""
        return self.expected or ("lower" if self.test == "superiority" else None)


Comparison = Annotated[ArmComparison | LevelComparison | DegradationComparison, Field(discriminator="kind")]


class StatisticsConfig(FrozenModel):
    """Error rates of the analysis, and what else it looks at."""

    alpha: float = Field(default=0.05, gt=0, lt=0.5, description="error rate of every family of comparisons")
    power: float = Field(default=0.8, gt=0.5, lt=1, description="of the minimum detectable difference")
    seed: int = Field(default=0, ge=0, description="draws the bootstrap and the permutations")
    bootstrap_samples: int = Field(default=2000, ge=200)
    published: str | None = Field(
        default=None, description="file of published figures to audit beside the study; null: none"
    )


class ArmPair(FrozenModel):
    """Two arms at one evaluation noise level."""

    treatment: str
    control: str
    noise_level: float = Field(default=0.0, ge=0, lt=1)


class ReportConfig(FrozenModel):
    """Wording of the report, and what it looks at closely."""

    title: str
    question: str = Field(description="what the study wants to know, shown on top")
    language: Literal["en", "zh"] = Field(default="en", description="language of report, summary and sentences")
    explore: ArmPair | None = Field(
        default=None, description="whose flipped questions are shown; the first comparison of arms where not said"
    )
