"""The arms of a study with what they are and their accuracies: the table of the first screen."""

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from aqnpipe.config.analysis import PRETRAINED
from aqnpipe.config.study import Study
from aqnpipe.report import numbers, translation
from aqnpipe.report.tables import mean_accuracy
from aqnpipe.report.words import Words


@dataclass(frozen=True)
class ArmRow:
    """An arm: what it is, and its accuracy by level after the last step. `anchor` is "" beyond the first model."""

    name: str
    model: str
    anchor: str
    description: str
    untranslated: bool
    control_of: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class ArmTable:
    """Accuracy in percent, a column per level: of arms after the last step, mean over seeds (lowest to highest).

    `title` heads the page's table, `caption` that of the summary, and `head` the column of names.
    """

    title: str
    caption: str
    head: str
    levels: tuple[str, ...]
    rows: tuple[ArmRow, ...]
    several_models: bool


def arm_table(study: Study, last: pl.DataFrame, words: Words) -> ArmTable:
    """Return every arm of the study, the pretrained models first; `last`: the accuracies of the last steps."""
    means = mean_accuracy(last)
    levels = sorted(means["noise_level"].unique().to_list())
    found = {(row["model"], row["arm"], row["noise_level"]): row for row in means.iter_rows(named=True)}
    models = list(dict.fromkeys([arm.model for arm in study.arms.values()] + means["model"].to_list()))
    present = {key[:2] for key in found}
    pairs = [
        (model, name)
        for model in models
        for name in (PRETRAINED, *study.config.arms)
        if (model, name) in present or (name in study.arms and study.arms[name].model == model)
    ]
    anchored: set[str] = set()
    rows = []
    for model, name in pairs:
        description, untranslated = _description(study, name, words)
        rows.append(
            ArmRow(
                name=name,
                model=model,
                anchor="" if name in anchored else f"arm-{name}",
                description=description,
                untranslated=untranslated,
                control_of=(study.arms[name].aa_control_of or "") if name in study.arms else "",
                cells=tuple(_cell(found.get((model, name, level)), words) for level in levels),
            )
        )
        anchored.add(name)
    if study.has_training:
        title, caption, head = words("arms.table"), words("summary.accuracy"), words("column.arm")
    else:  # Given checkpoints have neither steps nor seeds.
        title, caption, head = words("arms.checkpoints"), words("summary.checkpoints"), words("column.checkpoint")
    return ArmTable(title, caption, head, tuple(words.level(level) for level in levels), tuple(rows), len(models) > 1)


def _description(study: Study, name: str, words: Words) -> tuple[str, bool]:
    """Return what an arm is, and whether the language of the page lacks it."""
    if name not in study.arms:
        return words("arm.pretrained"), False
    text = translation.description(study.arms[name], words)
    return text.text, text.untranslated


def _cell(row: Mapping[str, float] | None, words: Words) -> str:
    """Return a mean with its range: 70.5 (69.8 to 71.2)."""
    if row is None:
        return numbers.MISSING
    mean = numbers.percent(row["mean"])
    if row["num_seeds"] == 1:
        return mean
    return f"{mean} ({words.span(row['lowest'], row['highest'], numbers.percent)})"
