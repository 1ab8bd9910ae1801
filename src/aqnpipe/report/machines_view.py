"""The same checkpoints on several machines: accuracy by the study itself and on each machine, with the devices."""

from dataclasses import dataclass

import polars as pl

from aqnpipe.config.study import Study
from aqnpipe.report import numbers
from aqnpipe.report.tables import Column, Table, table_of
from aqnpipe.report.words import Words


@dataclass(frozen=True)
class MachinesSection:
    """The table of differences, and sentences on what ran where."""

    sentences: tuple[str, ...]
    table: Table


def machines_section(study: Study, rows: pl.DataFrame, words: Words) -> MachinesSection | None:
    """Return the differences after the last steps; None if no checkpoint was evaluated on a further machine."""
    if rows.is_empty():
        return None
    last = rows.filter(pl.col("step") == pl.col("step").max().over("machine", "model", "arm"))
    several = last["model"].n_unique() > 1
    columns: list[Column] = [
        ("machine", lambda row: row["machine"]),
        *([("model", lambda row: row["model"])] if several else []),
        ("arm", lambda row: row["arm"]),
        ("noise", lambda row: words.level(row["noise_level"])),
        ("accuracy_here", lambda row: numbers.percent(row["accuracy_here"])),
        ("accuracy_there", lambda row: numbers.percent(row["accuracy_there"])),
        ("difference", lambda row: numbers.points(row["difference"])),
        ("interval", lambda row: words.span(row["ci_low"], row["ci_high"], numbers.points)),
        ("flipped", lambda row: numbers.percent(row["flipped"])),
        ("seeds", lambda row: str(row["num_seeds"])),
        ("questions", lambda row: numbers.count(row["num_questions"])),
        ("problem", lambda row: row["problem"] or numbers.MISSING),
    ]
    note = words("machines.note", level=1 - study.config.statistics.alpha)
    table = table_of(
        "machines",
        words("machines.table"),
        columns,
        last,
        words,
        num_text_columns=4 if several else 3,
        note=note,
        alert=lambda row: row["problem"] is not None,
    )
    return MachinesSection(tuple(_sentences(rows, words)), table)


def _sentences(rows: pl.DataFrame, words: Words) -> list[str]:
    """Return what each machine ran on, what else differs there, and on what the checkpoints were trained."""
    sentences = []
    for (machine,), part in rows.group_by("machine", maintain_order=True):
        there, here, differs = (_names(part, name) for name in ("device_there", "device_here", "differs_in"))
        if there:
            sentences.append(words("machines.devices", machine=machine, there=there, here=here))
        if differs:
            sentences.append(words("machines.differs", machine=machine, differs=differs))
    trained = _names(rows, "trained_on")
    return [*sentences, words("diagnosis.trained_on", device=trained)] if trained else sentences


def _names(rows: pl.DataFrame, column: str) -> str:
    return "; ".join(rows[column].drop_nulls().unique().sort())
