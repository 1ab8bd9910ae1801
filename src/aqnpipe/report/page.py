"""The sections of the page with their figures and tables."""

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from aqnpipe.artifacts.published import PublishedCheck
from aqnpipe.config.analysis import PRETRAINED
from aqnpipe.config.study import Study
from aqnpipe.report import (
    charts,
    costs_view,
    depth_charts,
    diagnosis_view,
    guidance_view,
    noise_charts,
    published,
    sigmas_view,
    tables,
    training_charts,
)
from aqnpipe.report.charts import SeriesKey
from aqnpipe.report.distance_view import growth_sentences, invariance_sentences
from aqnpipe.report.inputs import Diagnosis, ReportData, Run
from aqnpipe.report.leaps import leap_sentences, leap_table, leaps
from aqnpipe.report.tables import Figure, PanelGroup, RunLink, Table
from aqnpipe.report.words import Words

ARMS_PER_PICTURE = 8
"""Lines of more arms than this in one picture cannot be distinguished, so training curves are split."""


@dataclass(frozen=True)
class ModelSection:
    """The figures of one model role; None if there is nothing to show."""

    heading: str
    accuracy: Figure | None
    robustness: Figure | None
    training: Figure | None
    diagnosis: Figure | None
    diagnosis_verdicts: Table | None


@dataclass(frozen=True)
class PublishedSection:
    """The published results beside the measured ones."""

    caption: str
    figure: Figure
    claims: Table
    sentences: Table


def model_section(study: Study, data: ReportData, model: str, words: Words, run_link: RunLink) -> ModelSection:
    """Return the figures of one model role."""
    accuracy = data.accuracy.filter(pl.col("model") == model)
    robustness = data.robustness.filter(pl.col("model") == model)
    differences = data.differences.filter(pl.col("model") == model)
    last = last_steps(accuracy)
    runs = [run for run in data.runs if run.model == model]
    every_key = _arm_keys(study, {*accuracy["arm"], *(run.arm for run in runs)})
    keys = every_key[: charts.MAX_ARMS_IN_PICTURES]
    cut = left_out_sentence(len(keys), len(every_key), words)
    diagnoses = [diagnosis for diagnosis in data.diagnoses if diagnosis.model == model]
    source = study.config.models[model].source if model in study.config.models else ""
    heading = words("model.heading", model=model, source=source) if study.has_training else words("model.checkpoints")
    return ModelSection(
        heading=heading,
        accuracy=None if last.is_empty() else _accuracy_figure(study, last, accuracy, keys, cut, words, run_link),
        robustness=None
        if last.is_empty()
        else _robustness_figure(study, last, robustness, differences, keys, cut, words),
        training=_training_figure(runs, keys, cut, words) if runs else None,
        diagnosis=_diagnosis_figure(study, diagnoses, runs, words) if diagnoses else None,
        diagnosis_verdicts=diagnosis_view.diagnosis_verdicts(diagnoses, words) if diagnoses else None,
    )


def left_out_sentence(num_shown: int, num_arms: int, words: Words) -> list[str]:
    """Return the sentence on arms that the pictures leave out, as a list; empty if they show all."""
    return [words("pictures.left_out", shown=num_shown, all=num_arms)] if num_shown < num_arms else []


def model_roles(data: ReportData) -> list[str]:
    """Return the models that there is anything to show of."""
    return sorted({*data.accuracy["model"], *(run.model for run in data.runs), *(one.model for one in data.diagnoses)})


def last_steps(accuracy: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of the last step of every run."""
    return accuracy.filter(pl.col("step") == pl.col("step").max().over("model", "arm", "seed"))


def published_section(study: Study, check: PublishedCheck, accuracy: pl.DataFrame, words: Words) -> PublishedSection:
    """Return the published figures beside the measured ones."""
    last = last_steps(accuracy)
    rows = published.side_by_side(check, last)
    found = (
        published.published_accuracies(check, published.means_of(last), words),
        published.published_series(check, words),
        published.published_losses(check, words),
    )
    panels = charts.published_panels(rows, _arm_keys(study, set(rows["arm"])), words) if not rows.is_empty() else []
    return PublishedSection(
        caption=words("published.caption", title=check.title),
        figure=Figure(
            caption="",
            groups=(PanelGroup(panels),),
            tables=tuple(table for table in found if table.rows),
        ),
        claims=published.published_claims(check, words),
        sentences=published.published_sentences(check, words),
    )


def cost_figure(study: Study, data: ReportData, words: Words) -> Figure | None:
    """Return the cost of the arms; None if no job recorded its cost."""
    rows = costs_view.cost_rows(data.runs)
    if rows.is_empty():
        return None
    training, evaluation = costs_view.total_minutes(data.runs, data.evaluations)
    every_key = _arm_keys(study, set(rows["arm"]))
    keys = every_key[: charts.MAX_ARMS_IN_PICTURES]
    caption = words("costs.caption", training=training, evaluation=evaluation)
    return Figure(
        caption=words.paragraph([caption, *left_out_sentence(len(keys), len(every_key), words)]),
        groups=(PanelGroup(charts.cost_panels(_of_arms(rows, keys), keys, words)),),
        tables=(costs_view.cost_table(data.runs, data.evaluations, words),),
    )


def training_table(runs: Sequence[Run]) -> pl.DataFrame:
    """Concatenate the metrics of all runs, with columns model, arm and seed first."""
    identified = [
        run.metrics.select(
            pl.lit(run.model).alias("model"),
            pl.lit(run.arm).alias("arm"),
            pl.lit(run.seed, dtype=pl.Int64).alias("seed"),
            pl.all(),
        )
        for run in runs
    ]
    return pl.concat(identified) if identified else pl.DataFrame()


def layer_table(diagnoses: Sequence[Diagnosis]) -> pl.DataFrame:
    """Concatenate the layer metrics of all machines, with columns model and machine first and sigma last."""
    identified = [
        diagnosis.layers.select(
            pl.lit(diagnosis.model).alias("model"),
            pl.lit(diagnosis.machine).alias("machine"),
            pl.all(),
            pl.col("layer")
            .replace_strict(diagnosis.sigmas.aqn.layer_sigmas, default=None, return_dtype=pl.Float64)
            .alias("sigma"),
        )
        for diagnosis in diagnoses
    ]
    return pl.concat(identified) if identified else pl.DataFrame()


def _accuracy_figure(
    study: Study,
    last: pl.DataFrame,
    accuracy: pl.DataFrame,
    keys: Sequence[SeriesKey],
    cut: Sequence[str],
    words: Words,
    run_link: RunLink,
) -> Figure:
    caption = words(
        "accuracy.caption",
        level=1 - study.config.statistics.alpha,
        questions=int(last["num_questions"].max()),  # type: ignore[arg-type]
    )
    return Figure(
        caption=words.paragraph([caption, *cut]),
        groups=(PanelGroup(charts.accuracy_panels(_of_arms(last, keys), keys, words)),),
        tables=(tables.accuracy_table(accuracy, study.config.evaluation.primary_scorer, words, run_link),),
    )


def _robustness_figure(
    study: Study,
    last: pl.DataFrame,
    robustness: pl.DataFrame,
    differences: pl.DataFrame,
    keys: Sequence[SeriesKey],
    cut: Sequence[str],
    words: Words,
) -> Figure:
    level = 1 - study.config.statistics.alpha
    caption = [words("robustness.caption", level=level)]
    if study.config.evaluation.noises:
        caption.append(words("robustness.named_noises", names=", ".join(study.config.evaluation.noises)))
    caption += cut
    slopes = () if robustness.is_empty() else (tables.robustness_table(robustness, level, words),)
    compared = () if differences.is_empty() else (tables.difference_table(differences, level, words),)
    return Figure(
        caption=words.paragraph(caption),
        groups=tuple(_noise_group(group, last, differences, words) for group in _pictures(keys)),
        tables=(*compared, *slopes, tables.robustness_means_table(last, words)),
    )


def _noise_group(group: Sequence[SeriesKey], last: pl.DataFrame, differences: pl.DataFrame, words: Words) -> PanelGroup:
    names = [key.name for key in group]
    many = charts.is_crowded(last["arm"].n_unique(), last.select("arm", "seed").n_unique())
    own = differences.filter(pl.col("arm").is_in(names) & pl.col("difference").is_not_null())
    panels = [] if own.is_empty() else [noise_charts.difference_panel(own, group, words)]
    shown = last.filter(pl.col("arm").is_in(names))
    scales = shown.filter(pl.col("noise_level") < 1)
    if scales["noise_level"].n_unique() > 1:
        panels.append(noise_charts.accuracy_over_noise(scales, group, words, many=many))
    # A named noise has no place on an axis of scales.
    named = shown.filter((pl.col("noise_level") >= 1) | (pl.col("noise_level") == 0))
    if named["noise_level"].max() not in (None, 0.0):
        panels.append(noise_charts.accuracy_by_name(named, group, words, many=many))
    return PanelGroup(panels, legend=group)


def _thinning(num_arms: int) -> int:
    """Return by how much curves have fewer points: the page of 250 arms has to open in time."""
    return 1 if num_arms <= charts.MANY_ARMS else 3 if num_arms <= 3 * charts.MANY_ARMS else 6


def _pictures(keys: Sequence[SeriesKey]) -> list[Sequence[SeriesKey]]:
    return [keys[start : start + ARMS_PER_PICTURE] for start in range(0, len(keys), ARMS_PER_PICTURE)]


def _of_arms(rows: pl.DataFrame, keys: Sequence[SeriesKey]) -> pl.DataFrame:
    return rows.filter(pl.col("arm").is_in([key.name for key in keys]))


def _training_figure(runs: Sequence[Run], keys: Sequence[SeriesKey], cut: Sequence[str], words: Words) -> Figure:
    metrics = training_table(runs)
    arms = set(metrics["arm"].unique())
    trained = [key for key in keys if key.name in arms]
    found = leaps(runs)
    curves = tables.curve_tables(runs, words)
    caption = [words("training.caption")]
    caption += [] if curves else [words("training.no_curve_tables", runs=len(runs))]
    caption += cut
    return Figure(
        caption=words.paragraph(caption),
        groups=tuple(
            PanelGroup(
                training_charts.training_panels(
                    metrics.filter(pl.col("arm").is_in([key.name for key in group])),
                    group,
                    words,
                    found,
                    less=_thinning(len(trained)),
                ),
                legend=group,
            )
            for group in _pictures(trained)
        ),
        tables=(*([leap_table(found, words)] if found else []), *curves),
        alerts=(*leap_sentences(found, words), *growth_sentences(runs, words), *invariance_sentences(runs, words)),
    )


def _diagnosis_figure(study: Study, diagnoses: Sequence[Diagnosis], runs: Sequence[Run], words: Words) -> Figure:
    keys = [SeriesKey(diagnosis.machine, number) for number, diagnosis in enumerate(diagnoses, start=1)]
    faults = [fault for diagnosis in diagnoses for fault in diagnosis.verdict.simulated_faults]
    fault_layers = [layer for fault in faults if isinstance(layer := fault.get("layer"), int)]
    panels, constant = depth_charts.diagnosis_panels(layer_table(diagnoses), keys, fault_layers, words)
    caption = [words("diagnosis.caption")]
    caption += [words("diagnosis.rule")] if fault_layers else []
    caption += [words("diagnosis.constant", metrics=", ".join(constant))] if constant else []
    caption += diagnosis_view.device_sentences(diagnoses, runs, words)
    caption += guidance_view.guidance_sentences(study.arms, diagnoses, words)
    strategies, reasons = sigmas_view.strategy_group(diagnoses, words), sigmas_view.strategy_table(diagnoses, words)
    return Figure(
        caption=words.paragraph(caption),
        groups=(PanelGroup(panels, legend=keys), *([strategies] if strategies else [])),
        tables=(tables.diagnosis_table(diagnoses, words), *([reasons] if reasons else [])),
    )


def _arm_keys(study: Study, present: set[str]) -> list[SeriesKey]:
    """Return the keys of the pretrained model (neutral) and of the arms present, so that an arm keeps its colour."""
    neutral = [SeriesKey(PRETRAINED, 0)] if PRETRAINED in present else []
    return neutral + [SeriesKey(arm, n) for n, arm in enumerate(study.config.arms, start=1) if arm in present]
