"""What the evaluation of a checkpoint hands to the comparison."""

import pandera.polars as pa


class EvaluationTable(pa.DataFrameModel):
    """results/eval/.../step<N>.parquet: a row per question, noise level, noise seed and sample.

    `sample`: number of the response among those drawn for the question, 0 in greedy evaluations. `answer_<scorer>`:
    what the scorer of `aqnpipe.data.scoring` found, null if it found no answer.
    """

    question_id: str
    noise_level: float = pa.Field(ge=0, lt=1)
    noise_seed: int = pa.Field(ge=0)
    sample: int = pa.Field(ge=0)
    response: str
    answer_strict: str = pa.Field(nullable=True)
    answer_last_number: str = pa.Field(nullable=True)
    answer_harness_strict: str = pa.Field(nullable=True)
    answer_harness_flexible: str = pa.Field(nullable=True)
    correct_strict: bool
    correct_last_number: bool
    correct_harness_strict: bool
    correct_harness_flexible: bool
    response_tokens: int = pa.Field(ge=0)
    finish_reason: str = pa.Field(isin=["stop", "length"])

    class Config:
        """Columns as declared, one row per question, pass and sample."""

        strict = True
        unique = ["question_id", "noise_level", "noise_seed", "sample"]  # noqa: RUF012 - pandera's own form
