"""The sections of the page with their figures and tables."""

from collections.abc import Sequence

import polars as pl

from aqnpipe.artifacts.comparisons import ClaimsFile
from aqnpipe.artifacts.published import PublishedCheck
from aqnpipe.config.analysis import PRETRAINED
from aqnpipe.config.study import Study
from aqnpipe.data.scoring import NUMBER_SCORERS
from aqnpipe.report import charts, diagnosis, explorer, machines, published, receipts, tables, training
from aqnpipe.report.charts import SeriesKey
from aqnpipe.report.claims import MAX_CLAIMS_PER_LOOK, claim_text, look_table
from aqnpipe.report.inputs import Diagnosis, Evaluated, ReportData, Run
from aqnpipe.report.machines import MachineScale
from aqnpipe.report.tables import Figure, PanelGroup, Part, RunLink, Section, Table
from aqnpipe.report.training import (
    distance_table,
    engine_sentences,
    growth_sentences,
    leap_sentences,
    leap_table,
    leaps,
    router_tables,
)
from aqnpipe.report.words import Words

MINUTE = 60.0


def cost_rows(made: Sequence[Run] | Sequence[Evaluated]) -> pl.DataFrame:
    """Return a row per job that recorded its cost: model, arm, seed, seconds, cpu_seconds, peak_mb."""
    rows = [
        {name: one.record.identity[name] for name in ("model", "arm", "seed")} | vars(one.cost)
        for one in made
        if one.cost
    ]
    names = {"model": pl.String, "arm": pl.String, "seed": pl.Int64}
    return pl.DataFrame(rows, schema=names | dict.fromkeys(("seconds", "cpu_seconds", "peak_mb"), pl.Float64))


def cost_table(runs: Sequence[Run], evaluations: Sequence[Evaluated], words: Words) -> Table:
    """Return one row per arm with means over its runs, relative to the first arm that has measurements."""
    keys, seconds = ("model", "arm"), pl.col("seconds")
    steps = pl.Series("steps", [len(run.metrics) for run in runs if run.cost])
    several = pl.len() > 1
    trained = (
        cost_rows(runs)
        .with_columns(steps)
        .group_by(keys, maintain_order=True)
        .agg(
            runs=pl.len(),
            seconds_per_run=seconds.mean(),
            seconds_per_run_low=pl.when(several).then(seconds.min()),
            seconds_per_run_high=pl.when(several).then(seconds.max()),
            seconds_per_step=(seconds / pl.col("steps")).mean(),
            cpu_seconds=pl.col("cpu_seconds").mean(),
            peak_mb=pl.col("peak_mb").max(),
        )
    )
    evaluated = cost_rows(evaluations).group_by(keys).agg(evaluation_seconds=seconds.mean())
    rows = trained.join(evaluated, on=keys, how="left", maintain_order="left").with_columns(
        times_first=pl.col("seconds_per_step") / pl.col("seconds_per_step").first()
    )
    return tables.table("costs", rows, words)


ARMS_PER_PICTURE = 8
"""Lines of more arms than this in one picture cannot be distinguished, so training curves are split."""


def sections(study: Study, data: ReportData, scales: Sequence[MachineScale], words: Words) -> list[Section]:
    """Return the sections of the page behind the answer; the template has the questions of the explored pair."""
    run_link = receipts.run_links(data.runs)
    models = {model: model_figures(study, data, model, words, run_link) for model in model_roles(data)}
    verdicts = {model: [one for one in data.diagnoses if one.model == model] for model in models}

    def of_models(name: str, none: str, *, folded: str = "") -> Section:
        parts: list[Part] = []
        for model, figures in models.items():
            if name not in figures:
                continue
            stem = f"{name}-{model}" if len(models) > 1 else name
            parts += [Part("heading", _heading(study, model, words))] if len(models) > 1 else []
            if name == "diagnosis":
                found, reasons = diagnosis.verdict_tables(verdicts[model], words)
                parts.append(Part("table", found, stem=stem))
                parts.append(Part("folded", (Part("table", reasons, stem=stem),), reasons.caption))
            figure = Part("figure", figures[name], stem=stem)
            parts.append(Part("folded", (figure,), folded) if folded else figure)
        return Section(name, tuple(parts) or (Part("text", words(none)),))

    is_long = len(tables.arm_table(study, last_steps(data.accuracy), words).rows) > charts.MANY_ARMS
    costs = cost_figure(study, data, words)
    compared, checks = tables.comparison_tables(data.comparisons, words)
    segments = segment_figure(data.claims, words)
    comparisons = (
        Part("caption", words("comparisons.caption", power=study.config.statistics.power)),
        Part("table", compared),
        Part("folded", (Part("table", checks),), checks.caption),
        *([Part("figure", segments, stem="segments")] if segments else []),
    )
    pair = explorer.explored_pair(study, data.comparisons)
    outcomes = explorer.outcomes(pair, study, data, words) if pair else None
    found = [
        of_models("accuracy", "accuracy.none", folded=words("accuracy.figure") if is_long else ""),
        of_models("robustness", "accuracy.none"),
        Section("machines", machines.machine_parts(study, data.machines, words)),
        Section("scale", tuple(machines.scale_parts(scales))),
        of_models("training", "training.none"),
        of_models("diagnosis", "diagnosis.none"),
        Section("faults", diagnosis.fault_parts(data, words)),
        Section("receipts", tuple(receipts.receipt_parts(data, words, run_link))),
        Section(
            "explorer",
            (Part("folded", (Part("table", outcomes),), outcomes.caption),)
            if outcomes
            else (Part("text", words("explorer.none")),),
        ),
        Section("comparisons", comparisons if compared.rows else (Part("text", words("comparisons.none")),)),
        Section("costs", (Part("figure", costs) if costs else Part("text", words("costs.none")),)),
        Section("provenance", tuple(receipts.provenance_parts(study, data, words, run_link))),
        Section("published", published_parts(study, data.published, data.accuracy, words) if data.published else ()),
    ]
    return [section for section in found if section.parts]


def _heading(study: Study, model: str, words: Words) -> str:
    source = study.config.models[model].source if model in study.config.models else ""
    return words("model.heading", model=model, source=source) if study.has_training else words("model.checkpoints")


def model_figures(study: Study, data: ReportData, model: str, words: Words, run_link: RunLink) -> dict[str, Figure]:
    """Return the figures of one model role by section; there is none where there is nothing to show."""
    accuracy = data.accuracy.filter(pl.col("model") == model)
    robustness = data.robustness.filter(pl.col("model") == model)
    differences = data.differences.filter(pl.col("model") == model)
    last = last_steps(accuracy)
    runs = [run for run in data.runs if run.model == model]
    keys, cut = _shown_arms(study, {*accuracy["arm"], *(run.arm for run in runs)}, words)
    diagnoses = [diagnosis for diagnosis in data.diagnoses if diagnosis.model == model]
    figures = {}
    if not last.is_empty():
        figures["accuracy"] = _accuracy_figure(study, last, accuracy, keys, cut, words, run_link)
        figures["robustness"] = _robustness_figure(study, last, robustness, differences, keys, cut, words)
    if runs:
        figures["training"] = _training_figure(runs, keys, cut, words)
    if diagnoses:
        figures["diagnosis"] = _diagnosis_figure(study, diagnoses, runs, words)
    return figures


def _arm_keys(study: Study, present: set[str], words: Words) -> list[SeriesKey]:
    """Return the keys of the pretrained model (neutral) and of the arms present, so that an arm keeps its colour."""
    named = enumerate((PRETRAINED, *study.config.arms))
    return [SeriesKey(arm, n, tables.what_it_is(study, arm, words).text) for n, arm in named if arm in present]


def _shown_arms(study: Study, present: set[str], words: Words) -> tuple[list[SeriesKey], list[str]]:
    """Return the keys of the arms that pictures show, and the sentence on those that they leave out, if any."""
    keys = _arm_keys(study, present, words)
    shown = keys[: charts.MAX_ARMS_IN_PICTURES]
    return shown, [words("pictures.left_out", shown=len(shown), all=len(keys))] if len(shown) < len(keys) else []


def model_roles(data: ReportData) -> list[str]:
    """Return the models that there is anything to show of."""
    return sorted({*data.accuracy["model"], *(run.model for run in data.runs), *(one.model for one in data.diagnoses)})


def last_steps(accuracy: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of the last step of every run."""
    return accuracy.filter(pl.col("step") == pl.col("step").max().over("model", "arm", "seed"))


def published_parts(study: Study, check: PublishedCheck, accuracy: pl.DataFrame, words: Words) -> tuple[Part, ...]:
    """Return the section with the published figures beside the measured ones."""
    last = last_steps(accuracy)
    rows = published.side_by_side(check, last)
    keys = _arm_keys(study, set(rows["arm"]), words)
    panels = charts.published_panels(rows, keys, words) if not rows.is_empty() else []
    claims, sentences, *others = published.published_tables(check, words, published.means_of(last))
    shown = tuple(table for table in others if table.rows)
    parts = (
        Part("table", claims),
        Part("folded", (Part("table", sentences),), sentences.caption),
        Part("figure", Figure("", (PanelGroup(panels),), shown)),
    )
    caption = Part("caption", words("published.caption", title=check.title))
    return caption, Part("folded", parts, words("published.open"))


def cost_figure(study: Study, data: ReportData, words: Words) -> Figure | None:
    """Return the cost of the arms; None if no job recorded its cost."""
    rows = cost_rows(data.runs)
    if rows.is_empty():
        return None
    keys, cut = _shown_arms(study, set(rows["arm"]), words)
    training, evaluation = (sum(cost_rows(made)["seconds"]) / MINUTE for made in (data.runs, data.evaluations))
    caption = words("costs.caption", training=training, evaluation=evaluation)
    minutes = _of_arms(rows, keys).with_columns(minutes=pl.col("seconds") / MINUTE)
    return Figure(
        caption=words.paragraph([caption, *cut]),
        groups=(PanelGroup(charts.cost_panels(minutes, keys, words)),),
        tables=(cost_table(data.runs, data.evaluations, words),),
        is_open=True,
    )


def look_figure(claims: ClaimsFile, words: Words) -> Figure | None:
    """Return the claims over the looks of a study that adds seeds, as pictures and a table; None with fixed seeds."""
    table = look_table(claims, words)
    if table is None:
        return None
    # A claim that ended has the values of its last look at the later ones.
    tested = [one for look in claims.looks for one in look.claims if one.look == look.look and one.ci_low is not None]
    panels = [
        charts.look_panel(looks, claim_text(claim, words), words)
        for claim in claims.claims[:MAX_CLAIMS_PER_LOOK]
        if (looks := [one for one in tested if one.comparison_id == claim.comparison_id])
    ]
    caption = words("looks.caption", shown=len(panels), all=len(claims.claims))
    return Figure(caption, (PanelGroup(panels),), (table,), is_open=True)


def segment_figure(claims: ClaimsFile, words: Words) -> Figure | None:
    """Return the effect of one claim by segment of the questions, as pictures and a table; None without segments."""
    if not claims.segments:
        return None
    ways = dict.fromkeys(one.by for one in claims.segments)
    by_way = {by: [one for one in claims.segments if one.by == by] for by in ways}
    first = claims.segments[0].comparison_id
    claim = next((claim_text(claim, words) for claim in claims.claims if claim.comparison_id == first), first)
    table = tables.table("segments", claims.segments, words)
    caption = words("segments.caption", claim=claim, level=1 - claims.alpha)
    panels = [charts.segment_panel(segments, by, words) for by, segments in by_way.items()]
    return Figure(caption, (PanelGroup(panels),), (table,), is_open=True)


def training_table(runs: Sequence[Run]) -> pl.DataFrame:
    """Concatenate the metrics of all runs, with columns model, arm and seed first."""
    parts = [_named(run.metrics, model=run.model, arm=run.arm, seed=run.seed) for run in runs]
    return pl.concat(parts) if parts else pl.DataFrame()


def layer_table(diagnoses: Sequence[Diagnosis]) -> pl.DataFrame:
    """Concatenate the layer metrics of all machines, with columns model and machine first and sigma last."""
    parts = []
    for one in diagnoses:
        sigma = pl.col("layer").replace_strict(one.sigmas.aqn.layer_sigmas, default=None, return_dtype=pl.Float64)
        parts.append(_named(one.layers, model=one.model, machine=one.machine).with_columns(sigma.alias("sigma")))
    return pl.concat(parts) if parts else pl.DataFrame()


def _named(table: pl.DataFrame, **names: str | int) -> pl.DataFrame:
    types = {name: pl.Int64 if isinstance(value, int) else pl.String for name, value in names.items()}
    return table.select(*(pl.lit(value, types[name]).alias(name) for name, value in names.items()), pl.all())


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
    scorer = study.config.evaluation.primary_scorer
    links = (row | {"link": run_link(row["model"], row["arm"], row["seed"])} for row in accuracy.iter_rows(named=True))
    # A study that grades answers of another kind has nothing to say of scorers of numbers.
    without = () if scorer in NUMBER_SCORERS else ("strict", "last_number")
    table = tables.table("accuracy", links, words, without=without, scorer=scorer)
    return Figure(
        caption=words.paragraph([caption, *cut]),
        groups=(PanelGroup(charts.accuracy_panels(_of_arms(last, keys), keys, words)),),
        tables=(table,),
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
    compared = tables.table("differences", differences, words, level=level)
    slopes = tables.table("robustness", robustness, words, level=level)
    return Figure(
        caption=words.paragraph(caption),
        groups=tuple(_noise_group(group, last, differences, words) for group in _pictures(keys)),
        tables=(
            *(one for one in (compared, slopes) if one.rows),
            tables.table("robustness-means", tables.mean_accuracy(last), words),
        ),
    )


def _noise_group(group: Sequence[SeriesKey], last: pl.DataFrame, differences: pl.DataFrame, words: Words) -> PanelGroup:
    names = [key.name for key in group]
    many = charts.is_crowded(last["arm"].n_unique(), last.select("arm", "seed").n_unique())
    own = differences.filter(pl.col("arm").is_in(names) & pl.col("difference").is_not_null())
    panels = [] if own.is_empty() else [charts.difference_panel(own, group, words)]
    shown = last.filter(pl.col("arm").is_in(names))
    scales = shown.filter(pl.col("noise_level") < 1)
    if scales["noise_level"].n_unique() > 1:
        panels.append(charts.accuracy_over_noise(scales, group, words, many=many))
    # A named noise has no place on an axis of scales.
    named = shown.filter((pl.col("noise_level") >= 1) | (pl.col("noise_level") == 0))
    if named["noise_level"].max() not in (None, 0.0):
        panels.append(charts.accuracy_by_name(named, group, words, many=many))
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
    alerts = (*leap_sentences(found, runs, words), *growth_sentences(runs, words), *engine_sentences(runs, words))
    curves = tables.curve_tables(runs, words)
    caption = [words("training.caption")]
    caption += training.verified_sentences(runs, words)
    caption += [] if curves else [words("training.no_curve_tables", runs=len(runs))]
    caption += cut
    return Figure(
        caption=words.paragraph(caption),
        groups=tuple(
            PanelGroup(
                training.training_panels(
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
        tables=(
            *([leap_table(found, words)] if found else []),
            distance_table(runs, words),
            *router_tables(runs, words),
            *curves,
        ),
        alerts=alerts,
    )


def _diagnosis_figure(study: Study, diagnoses: Sequence[Diagnosis], runs: Sequence[Run], words: Words) -> Figure:
    keys = [SeriesKey(diagnosis.machine, number) for number, diagnosis in enumerate(diagnoses, start=1)]
    faults = [fault for diagnosis in diagnoses for fault in diagnosis.verdict.simulated_faults]
    fault_layers = [layer for fault in faults if isinstance(layer := fault.get("layer"), int)]
    layers = layer_table(diagnoses)
    reasons = {(one.machine, layer): why for one in diagnoses for layer, why in one.sigmas.reasons.items()}
    rows = (row | {"why": reasons.get((row["machine"], row["layer"]))} for row in layers.iter_rows(named=True))
    panels, constant = diagnosis.diagnosis_panels(layers, keys, fault_layers, words)
    caption = [words("diagnosis.caption")]
    caption += [words("diagnosis.rule")] if fault_layers else []
    caption += [words("diagnosis.constant", metrics=", ".join(constant))] if constant else []
    caption += diagnosis.device_sentences(diagnoses, runs, words)
    caption += diagnosis.guidance_sentences(study.arms, diagnoses, words)
    strategies, sigmas = diagnosis.strategy_group(diagnoses, words), diagnosis.strategy_table(diagnoses, words)
    return Figure(
        caption=words.paragraph(caption),
        groups=(PanelGroup(panels, legend=keys), *([strategies] if strategies else [])),
        tables=(tables.table("layers", rows, words), *([sigmas] if sigmas else [])),
    )
