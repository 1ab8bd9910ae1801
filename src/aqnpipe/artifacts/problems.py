"""What the preparation of data hands to training, evaluation and diagnosis."""

import pandera.polars as pa


class ProblemTable(pa.DataFrameModel):
    """results/data/<split>.parquet: one question per row."""

    question_id: str = pa.Field(unique=True)
    question: str
    answer: str
    gold_answer: str

    class Config:
        """Columns as declared, in this order, nothing else."""

        strict = True
