"""The table of questions that the prepare_data stage writes for training, evaluation and diagnosis."""

from typing import Optional

from aqnpipe.artifacts.files import Table


class ProblemTable(Table, unique=("question_id",)):
    """results/data/<split>.parquet: one question per row; `cluster`: the unit of tests and intervals, if not itself."""

    question_id: str
    question: str
    answer: str
    gold_answer: str
    cluster: Optional[str]  # noqa: UP045 - pandera's form of a column that may be absent
