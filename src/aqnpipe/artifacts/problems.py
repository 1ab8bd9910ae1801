"""The table of questions that the prepare_data stage writes for training, evaluation and diagnosis."""

import pandera.polars as pa


class ProblemTable(pa.DataFrameModel):
    """results/data/<split>.parquet: one question per row."""

    question_id: str = pa.Field(unique=True)
    question: str
    answer: str
    gold_answer: str

    class Config:
        """No other columns are allowed."""

        strict = True
