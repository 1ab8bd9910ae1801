"""Artifacts of a loss study: the losses of its texts, and the comparisons of its conditions."""

from typing import Literal, Optional

import pandera.polars as pa

from aqnpipe.artifacts.base import Artifact, Statement
from aqnpipe.artifacts.comparisons import ClaimVerdict, Family
from aqnpipe.artifacts.files import Table


class LossStudyTable(Table, unique=("question_id", "condition", "magnitude", "order", "noise_seed")):
    """results/loss_study/<model>/<name>.parquet: the loss of one text in one pass per row, in nats per token.

    `loss`: mean cross entropy of the gold solution's tokens given the question; `text_loss`: of all tokens but the
    first. `magnitude`: of the machine's faults, 0 without a fault. `order`: null unless a faulty layer has noise.
    `survival_rate`: share of the elements at the faulty sites that the faults leave unchanged. `cluster`: as in
    `EvaluationTable`.
    """

    question_id: str
    cluster: Optional[str]  # noqa: UP045 - pandera's form of a column that may be absent
    condition: str
    magnitude: float = pa.Field(ge=0, le=1)
    order: str = pa.Field(nullable=True, isin=["after_noise", "before_noise", "around_noise"])
    noise_seed: int = pa.Field(ge=0)
    loss: float = pa.Field(ge=0)
    text_loss: float = pa.Field(ge=0)
    scored_tokens: int = pa.Field(ge=1)
    text_tokens: int = pa.Field(ge=1)
    survival_rate: float = pa.Field(ge=0, le=1)


class LossStudyCondition(Artifact):
    """One condition of a loss study at one magnitude and order; losses in nats per token, means over texts and seeds.

    `mean_loss`: over the tokens of gold solutions, `mean_text_loss`: over all tokens but the first. `seed_sd`: standard
    deviation of the mean between noise seeds. `gradient_zeroed_share` and `gradient_zeroed_norm_share`: how much of the
    gradient's elements and of its norm the faulty sites set to zero (null: no fault, or no backward pass).
    """

    condition: str
    magnitude: float
    order: str | None
    noised_layers: tuple[int, ...]
    mean_loss: float
    seed_sd: float | None
    mean_text_loss: float
    survival_rate: float | None
    gradient_zeroed_share: float | None
    gradient_zeroed_norm_share: float | None
    above_uniform: bool


class LossStudyComparison(Artifact):
    """Two conditions of a loss study, texts and noise seeds paired; differences in nats, treatment minus control.

    The claim of the families `noise` and `place` is a lower loss, that of `harm` a higher one. `p_value` and the
    interval at 1 - alpha treat texts, or their clusters, and noise seeds as crossed random effects. `p_holm` is
    adjusted over the family (null: not tested, because a side is worse than guessing). `statements`: the numbers, then
    the conclusion.
    """

    comparison_id: str
    family: Literal["harm", "noise", "place"]
    magnitude: float
    order: str | None
    treatment: str
    control: str
    num_seeds: int
    num_texts: int
    difference: float
    ci_low: float
    ci_high: float
    p_value: float
    p_holm: float | None
    claim: Statement
    verdict: ClaimVerdict
    statements: tuple[Statement, ...]


class LossStudyFile(Artifact):
    """results/loss_study/<model>/<name>.claims.json: conditions and comparisons of a loss study. `uniform` is ln|V|."""

    name: str
    model: str
    gamma: float
    num_layers: int
    faulty_layers: tuple[int, ...]
    num_texts: int
    uniform: float
    alpha: float
    families: tuple[Family, ...]
    conditions: tuple[LossStudyCondition, ...]
    comparisons: tuple[LossStudyComparison, ...]
