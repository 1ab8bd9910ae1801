"""Tables of the report as plain text cells; the template only lays them out."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import polars as pl

from aqnpipe.report import numbers
from aqnpipe.report.inputs import Diagnosis, Run

MAX_CURVE_ROWS = 60


@dataclass(frozen=True)
class Row:
    """Cells of one line; `alert` marks what went wrong."""

    cells: tuple[str, ...]
    alert: bool = False


@dataclass(frozen=True)
class Table:
    """A table: the first `num_text_columns` columns are text, the rest numbers."""

    caption: str
    headers: tuple[str, ...]
    rows: tuple[Row, ...]
    num_text_columns: int = 1
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """What a set of panels shows, and the numbers behind it."""

    caption: str
    panels: Sequence[object]
    tables: tuple[Table, ...]
    legend: Sequence[object] = field(default=())


def accuracy_table(accuracy: pl.DataFrame) -> Table:
    """Every evaluated checkpoint at every level."""
    rows = tuple(
        Row(
            (
                row["arm"],
                str(row["seed"]),
                str(row["step"]),
                numbers.noise_level(row["noise_level"]),
                numbers.percent(row["accuracy"]),
                f"{numbers.percent(row['ci_low'])} to {numbers.percent(row['ci_high'])}",
                numbers.percent(row["accuracy_strict"]),
                numbers.percent(row["accuracy_last_number"]),
                numbers.percent(row["truncated_fraction"]),
                numbers.percent(row["parse_failure_fraction"]),
                numbers.count(row["num_questions"]),
                str(row["num_noise_seeds"]),
            )
        )
        for row in accuracy.iter_rows(named=True)
    )
    headers = (
        "arm",
        "seed",
        "step",
        "noise",
        "accuracy %",
        "interval",
        "#### %",
        "last number %",
        "cut off %",
        "no answer %",
        "questions",
        "noise seeds",
    )
    return Table("Accuracy of every checkpoint at every noise level", headers, rows)


def comparison_table(comparisons: pl.DataFrame, labels: dict[str, str]) -> Table:
    """All declared comparisons with what their verdicts rest on; methods are numbered and named below the table."""
    methods = list(dict.fromkeys(comparisons["method"]))
    rows = tuple(
        Row(
            (
                row["comparison_id"],
                labels[row["verdict"]],
                numbers.percent(row["treatment_accuracy"]),
                numbers.percent(row["control_accuracy"]),
                numbers.points(row["difference"]),
                _interval(row["ci_low"], row["ci_high"]),
                numbers.p_value(row["p_value"]),
                numbers.p_value(row["p_holm"]),
                numbers.percent(row["minimum_detectable_difference"]),
                str(row["num_seeds"]),
                numbers.count(row["num_questions"]),
                str(methods.index(row["method"]) + 1),
            ),
            alert=row["verdict"] == "invalid",
        )
        for row in comparisons.iter_rows(named=True)
    )
    headers = (
        "comparison",
        "verdict",
        "treatment %",
        "control %",
        "difference, points",
        "interval",
        "p",
        "p, Holm",
        "detectable, points",
        "seeds",
        "questions",
        "method",
    )
    note = "; ".join(f"{number}: {method}" for number, method in enumerate(methods, start=1))
    return Table("Declared comparisons", headers, rows, num_text_columns=2, note=f"Methods: {note}." if note else "")


def curve_tables(runs: Sequence[Run]) -> tuple[Table, ...]:
    """Training metrics, one table per metric: a row per step, a column per run."""
    columns = {
        "reward_mean": "Reward",
        "kl": "KL, nats",
        "validation_accuracy": "Validation accuracy, fraction",
        "sigma_asked": "AQN sigma asked",
        "sigma_measured": "AQN sigma measured",
    }
    return tuple(_curve_table(runs, column, title) for column, title in columns.items())


def diagnosis_table(diagnoses: Sequence[Diagnosis]) -> Table:
    """Layer metrics and sigmas of every machine."""
    rows = tuple(
        Row(
            (
                one.machine,
                row["role"].replace("_", " "),
                str(row["layer"]),
                numbers.metric(row["instability"]),
                numbers.metric(row["instability_jump_z"]),
                numbers.metric(row["gain"]),
                numbers.metric(row["gain_z"]),
                numbers.metric(row["kurtosis"]),
                numbers.metric(row["log_kurtosis_drop_z"]),
                numbers.metric(row["zero_share"]),
                numbers.metric(row["values_at_maximum"]),
                numbers.scale(one.sigmas.aqn.layer_sigmas.get(row["layer"])),
                one.sigmas.reasons.get(row["layer"], ""),
            )
        )
        for one in diagnoses
        for row in one.layers.iter_rows(named=True)
    )
    headers = (
        "machine",
        "role",
        "layer",
        "instability",
        "jump z",
        "gain",
        "z",
        "kurtosis",
        "drop z",
        "zeros",
        "at maximum",
        "sigma",
        "why",
    )
    return Table("Layer metrics and sigmas", headers, rows, num_text_columns=2)


def _curve_table(runs: Sequence[Run], column: str, title: str) -> Table:
    steps = sorted({step for run in runs for step in run.metrics.filter(pl.col(column).is_not_null())["step"]})
    stride = -(-len(steps) // MAX_CURVE_ROWS) if steps else 1
    values = [dict(run.metrics.select("step", column).iter_rows()) for run in runs]
    rows = tuple(
        Row((str(step), *(numbers.metric(column_of.get(step)) for column_of in values))) for step in steps[::stride]
    )
    headers = ("step", *(f"{run.arm} seed {run.seed}" for run in runs))
    note = f"Every {stride} steps; all are in metrics.parquet." if stride > 1 else ""
    return Table(title, headers, rows, note=note)


def _interval(low: float | None, high: float | None) -> str:
    return numbers.MISSING if low is None or high is None else f"{numbers.points(low)} to {numbers.points(high)}"
