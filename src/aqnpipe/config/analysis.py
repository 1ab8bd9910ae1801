"""Declared comparisons and the settings of statistics and report."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from aqnpipe.config.base import FrozenModel

PRETRAINED = "pretrained"
"""Stands for the model before any training wherever an arm id is expected."""


class ArmComparison(FrozenModel):
    """Treatment against control, both after their last step, at one evaluation noise level."""

    kind: Literal["arms"] = "arms"
    treatment: str
    control: str
    noise_level: float = Field(default=0.0, ge=0, lt=1)
    expected: Literal["higher", "lower"] = Field(description="direction of the claim about the treatment's accuracy")
    claim: str = Field(description="the claim in words, as the study poses it")

    @model_validator(mode="after")
    def _two_sides(self) -> Self:
        if self.treatment == self.control:
            raise ValueError("treatment and control must differ")
        return self


class LevelComparison(FrozenModel):
    """One arm at a noise level against itself without noise."""

    kind: Literal["levels"] = "levels"
    arm: str
    noise_level: float = Field(gt=0, lt=1)
    expected: Literal["higher", "lower"] = "lower"
    claim: str


Comparison = Annotated[ArmComparison | LevelComparison, Field(discriminator="kind")]


class StatisticsConfig(FrozenModel):
    """Error rates of the analysis."""

    alpha: float = Field(default=0.05, gt=0, lt=0.5, description="family-wise error rate over all comparisons")
    power: float = Field(default=0.8, gt=0.5, lt=1, description="of the minimum detectable difference")


class ReportConfig(FrozenModel):
    """Wording of the report."""

    title: str
    question: str = Field(description="what the study wants to know, shown on top")
