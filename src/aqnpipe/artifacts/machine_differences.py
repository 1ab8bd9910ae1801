"""results/machines.parquet: accuracy of the same checkpoints on several machines."""

import pandera.polars as pa


class MachineDifferenceTable(pa.DataFrameModel):
    """Accuracy on a machine of `evaluation.machines` minus that by the study itself, of the same weights.

    One row per machine, arm, step and noise level, over all training seeds. Descriptive: no part of a family.
    - accuracy_here, accuracy_there: by the study, and on the machine.
    - flipped: share of answers (question, training seed, noise seed) that are right on one of the two only, or, where
      several samples are drawn, whose share of right samples differs.
    - device_here, device_there, trained_on: as in the records of the jobs; trained_on is null without training.
    - differs_in: what else differs between the two evaluations: dtype, threads, batch size, faults, versions, engine.
    - problem: why nothing was computed; null if something was.
    """

    machine: str
    model: str
    arm: str
    step: int = pa.Field(ge=0)
    noise_level: float = pa.Field(ge=0)
    num_seeds: int = pa.Field(ge=0)
    num_questions: int = pa.Field(ge=0)
    accuracy_here: float = pa.Field(ge=0, le=1, nullable=True)
    accuracy_there: float = pa.Field(ge=0, le=1, nullable=True)
    difference: float = pa.Field(nullable=True)
    ci_low: float = pa.Field(nullable=True)
    ci_high: float = pa.Field(nullable=True)
    flipped: float = pa.Field(ge=0, le=1, nullable=True)
    method: str = pa.Field(nullable=True)
    device_here: str = pa.Field(nullable=True)
    device_there: str = pa.Field(nullable=True)
    trained_on: str = pa.Field(nullable=True)
    differs_in: str = pa.Field(nullable=True)
    problem: str = pa.Field(nullable=True)

    class Config:
        """No other columns are allowed; one row per machine, arm, step and level."""

        strict = True
        unique = ["machine", "model", "arm", "step", "noise_level"]  # noqa: RUF012 - pandera's own form
