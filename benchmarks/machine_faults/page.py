"""The page of the detection benchmark, from its two tables."""

from collections.abc import Iterable, Sequence
from typing import Any

import polars as pl
from scipy import stats

from machine_faults.catalogue import FAULTS
from machine_faults.observe import OBSERVABLE

TARGETS = {"found": 0.95, "abstained": 0.02, "forwards": 25.0}
LEAST_HEALTHY = 300
# Commits of rows that were measured before several were landed as one, which the history has.
LANDED_AS = {"e6effe2": "cab62a5", "6b9c4c1": "cab62a5"}
_IDENTITY = ["group", "name", "architecture", "dtype", "seed", "layer"]
_FLAGS = ("permanent", "observable", "layer_right", "operation_right", "device_wide", "restored")


def page(effects: pl.DataFrame, faults: pl.DataFrame, healthy: pl.DataFrame) -> str:
    """Return the content of detection.md; rows of faults without an effect are left out."""
    rows = faults.join(effects, on=_IDENTITY, suffix="_effect").with_columns(_flag(name) for name in _FLAGS)
    counted = rows.filter(pl.col("permanent") & pl.col("observable"))
    parts = [
        _head(rows, healthy),
        _summary(rows, counted, healthy),
        _groups(rows, counted),
        _dtypes(counted),
        _healthy(healthy),
        _intermittent(rows),
        _unobservable(rows),
        _limits(counted),
        _beyond(),
    ]
    return "\n\n".join(parts) + "\n"


def _flag(name: str) -> pl.Expr:
    """Return a column of CSV truth values as booleans; empty is false."""
    return (pl.col(name).cast(pl.String).str.to_lowercase() == "true").fill_null(False).alias(name)


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows])


def _share(flags: pl.Series) -> str:
    count, total = int(flags.sum()), len(flags)
    return f"{count} of {total} ({count / total:.1%})" if total else "0 of 0"


def _head(faults: pl.DataFrame, healthy: pl.DataFrame) -> str:
    return (
        "# Detection benchmark\n\n"
        "Command: `OMP_NUM_THREADS=1 python benchmarks/detection.py`. Faults measured at commit: "
        f"{commits(faults)}. Healthy runs: {commits(healthy)}. Rows: [effects](detection_effects.csv), "
        "[faults](detection_faults.csv), [healthy devices](detection_healthy.csv).\n\n"
        f"{faults['name'].n_unique()} faults and {healthy['name'].n_unique()} kinds of healthy arithmetic act on an "
        "emulated device: what runs inside the modules of a model is changed from outside, without the project's fault "
        f"simulation. Models: {faults['architecture'].n_unique()} architectures with random weights (4 layers of 64 "
        f"channels), {faults['dtype'].n_unique()} dtypes. A fault is observable if it changes some logits (96 tokens, "
        "16 decoded tokens with the cache, a batch of 576 rows, 5 tokens; gradients for backward faults) by more than "
        f"{OBSERVABLE:g} times the spread of healthy re-orderings. It is found if the report names its layer, or the "
        "device as a whole for faults that every layer shares, and its operation. No wide model and no accelerator "
        f"was measured.{_unfinished(faults, healthy)}"
    )


def commits(rows: pl.DataFrame) -> str:
    """Return the number of rows that were measured at each commit."""
    counts = sorted(rows["commit"].value_counts().iter_rows())
    landed = {code: f" (landed with later changes as {LANDED_AS[code]})" for code, _ in counts if code in LANDED_AS}
    return ", ".join(f"{count} at {code}{landed.get(code, '')}" for code, count in counts)


def _unfinished(faults: pl.DataFrame, healthy: pl.DataFrame) -> str:
    """Return which part of the catalogue has no row yet; empty if all has been measured."""
    missing, runs = len(FAULTS) - faults["name"].n_unique(), healthy.height
    if not missing and runs >= LEAST_HEALTHY:
        return ""
    return (
        f" The run was interrupted: {missing} of {len(FAULTS)} faults were not diagnosed, and {runs} healthy runs were "
        f"made, expected at least {LEAST_HEALTHY}. Cases run in random order, so that the rows are a sample of all "
        "groups; the same command runs the rest."
    )


def _summary(faults: pl.DataFrame, counted: pl.DataFrame, healthy: pl.DataFrame) -> str:
    runs = healthy.height
    alarms = int((healthy["verdict"] == "fault").sum())
    bound = stats.beta.ppf(0.95, alarms + 1, runs - alarms) if alarms < runs else 1.0
    forwards = [value for table in (faults, healthy) if (value := table["forwards"].max()) is not None]
    rows = [
        ("permanent observable faults found (layer and operation)", _share(counted["operation_right"]), ">= 95 %"),
        ("- in the right layer, or named device-wide", _share(counted["layer_right"]), ""),
        ("- with verdict fault", _share(counted["verdict"] == "fault"), ""),
        ("healthy runs called faulty", f"{alarms} of {runs} (95 % bound {bound:.2%})", "0"),
        ("healthy runs without a verdict", _share(healthy["verdict"].is_in(["abstain", "error", "crash"])), "< 2 %"),
        ("cost, whole-model forwards, at most", f"{max(forwards):.1f}", "<= 25"),
        ("seconds per diagnosis, median", f"{healthy['seconds'].median():.2f}", ""),
        (
            "runs that did not restore the weights",
            int((~faults["restored"] & faults["seconds"].is_not_null()).sum()),
            "0",
        ),
    ]
    return "## Summary\n\n" + _table(("", "measured", "target"), rows)


def _groups(faults: pl.DataFrame, counted: pl.DataFrame) -> str:
    rows = []
    for group in faults["group"].unique(maintain_order=True).sort():
        mine, seen = (table.filter(pl.col("group") == group) for table in (faults, counted))
        if not mine["permanent"].any():
            continue
        rows.append(
            (
                group,
                mine["name"].n_unique(),
                _share(seen["operation_right"]),
                _share(seen["layer_right"]),
                int((seen["verdict"] == "healthy").sum()),
                int((seen["elsewhere"].fill_null(0) > 0).sum()),
            )
        )
    header = ("group", "faults", "layer and operation", "layer", "called healthy", "other places named too")
    return "## Permanent observable faults by group\n\n" + _table(header, rows)


def _dtypes(counted: pl.DataFrame) -> str:
    def row(column: str, value: str) -> tuple[str, str]:
        return value, _share(counted.filter(pl.col(column) == value)["operation_right"])

    rows = [row(column, value) for column in ("dtype", "architecture") for value in sorted(set(counted[column]))]
    return "## The same by dtype and architecture\n\n" + _table(("", "layer and operation"), rows)


def _healthy(healthy: pl.DataFrame) -> str:
    rows = []
    for name in healthy["name"].unique(maintain_order=True):
        mine = healthy.filter(pl.col("name") == name)
        counts = [int((mine["verdict"] == verdict).sum()) for verdict in ("healthy", "fault", "abstain")]
        rows.append((name, mine.height, *counts, mine.height - sum(counts)))
    header = ("arithmetic", "runs", "healthy", "faulty", "abstains", "error")
    return "## Healthy devices\n\n" + _table(header, rows)


def _intermittent(faults: pl.DataFrame) -> str:
    seen = faults.filter(~pl.col("permanent"))
    rows = [
        (name, _share(mine["operation_right"]), _share(mine["verdict"] == "fault"))
        for name in seen["name"].unique(maintain_order=True).sort()
        if (mine := seen.filter(pl.col("name") == name)).height
    ]
    header = ("fault", "layer and operation", "called faulty")
    return (
        "## Intermittent faults\n\nA fault in one call of 1,000 rarely happens during a diagnosis; "
        "`--duration` repeats it.\n\n" + _table(header, rows)
    )


def _unobservable(faults: pl.DataFrame) -> str:
    hidden = faults.filter(pl.col("permanent") & ~pl.col("observable") & (pl.col("verdict") != "crash"))
    return (
        f"## Faults below rounding\n\n{hidden.height} runs with permanent faults change no logits by more than "
        f"rounding in that model; {int((hidden['verdict'] == 'fault').sum())} of them are called faulty all the same."
    )


def _limits(counted: pl.DataFrame) -> str:
    missed = counted.filter(~pl.col("operation_right"))
    rows = []
    for name in missed["name"].unique().sort():
        mine = missed.filter(pl.col("name") == name)
        runs = counted.filter(pl.col("name") == name).height
        answers = ", ".join(sorted({_answer(row) for row in mine.iter_rows(named=True)}))
        models = ", ".join(f"{row['architecture']} {row['dtype']}" for row in mine.iter_rows(named=True))
        rows.append((FAULTS[name].group, name, f"{mine.height} of {runs}", models, answers))
    header = ("group", "fault", "missed", "models", "answer")
    return "## What is not found\n\n" + (_table(header, rows) if rows else "Every observable fault is found.")


BEYOND = (
    (
        "lengths, numbers of rows and of sequences that no probe uses",
        "kernels are chosen by shape; the report lists those that ran",
    ),
    ("gradients of linears with other numbers of tokens than 1, 32 and 513", "the operands of the backward probe"),
    (
        "gradients of embedding, lm_head, experts, router, gains, biases, rotation, residual sums",
        "no probe; listed in the report",
    ),
    (
        "norms, activations and softmax that round towards zero in 16 bits",
        "within one epsilon, as devices that round twice are",
    ),
    ("sums of ordinary numbers that are off by less than their error bound", "an order of summation could explain it"),
    (
        "a setting that the model itself holds wrongly, such as the epsilon of a norm",
        "the reference is made from the module",
    ),
    ("faults that the host shares", "the reference runs there"),
    (
        "faults in fewer than some calls or values of a hundred",
        "stated in the report as a probability; `--duration` repeats",
    ),
    ("attention kernels other than the one that the model uses", "listed in the report"),
)
"""Classes of faults that the probes cannot find by their construction, and why."""


def _beyond() -> str:
    return "## What cannot be found\n\nBy construction, whatever was measured above.\n\n" + _table(
        ("fault", "why"), BEYOND
    )


def _answer(row: dict[str, Any]) -> str:
    if row["verdict"] != "fault":
        return str(row["verdict"])
    return "another operation" if row["layer_right"] else "another layer"
