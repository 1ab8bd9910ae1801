"""The report stage: one self-contained HTML page, a summary and a README in Markdown, and tables, from artifacts."""

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from aqnpipe.artifacts.comparisons import ClaimsFile
from aqnpipe.artifacts.files import atomic_path, write_csv, write_text
from aqnpipe.config.analysis import PRETRAINED
from aqnpipe.config.study import Study
from aqnpipe.data.scoring import NUMBER_SCORERS
from aqnpipe.report import charts, claims, diagnosis, explorer, machines, numbers, published, receipts, tables, training
from aqnpipe.report.charts import SeriesKey
from aqnpipe.report.inputs import Diagnosis, Evaluated, ReportData, Run
from aqnpipe.report.markup import inline, page_template, palette_position, series_dash
from aqnpipe.report.summary import readme, render_summary
from aqnpipe.report.tables import Figure, PanelGroup, Part, RunLink, Section, Table
from aqnpipe.report.words import Words, at_noise, load_words

MINUTE = 60.0
ARMS_PER_PICTURE = 8
"""Lines of more arms than this in one picture cannot be distinguished, so training curves are split."""


def build_report(study: Study, data: ReportData, folder: Path) -> None:
    """Write page, summary and tables from what exists of the study; the same files give the same bytes.

    Into `folder`: report.html, summary.md and README.md, and training, layers and flips, each as .parquet and .csv.
    The page names the files that do not exist.
    """
    words = load_words(study.config.report.language, study.config.evaluation.noise_names())
    pair = explorer.explored_pair(study, data.comparisons)
    flipped, num_questions, num_seeds = explorer.flips(pair, study, data)
    explored = explorer.explorer(pair, flipped, num_questions, num_seeds) if pair and num_seeds else None
    overview = claims.claims_overview(study, data, words)
    scales = machines.machine_scales(study, data, words)
    # All text is made visible and escaped; only the SVGs of `markup.py` stay markup.
    page = page_template("report.html.jinja").render(
        w=words,
        css=inline("report.css"),
        script=inline("report.js"),
        study=study.config,
        title=words.own(study.config.report.title, study.config.report.title_zh),
        question=words.own(study.config.report.question, study.config.report.question_zh),
        arm_table=tables.arm_table(study, data.last, words),
        facts=facts(study, data, words),
        power=study.config.statistics.power,
        data=data,
        overview=overview,
        symbols=claims.VERDICT_SYMBOLS,
        left_out=lambda verdicts: claims.left_out_claims(verdicts, words),
        answer=claims.answer_text(data.claims, words),
        looks=look_figure(data.claims, words),
        summary=claims.summary_line((row.verdict for row in overview.rows), words),
        sections=sections(study, data, scales, words),
        explored=explored,
        explored_where=at_noise(explored.pair.noise_level, words) if explored else "",
        explored_limit=explorer.MAX_QUESTIONS_PER_GROUP,
        max_rows=tables.MAX_ROWS_ON_PAGE,
        colour_of=palette_position,
        dash_of=lambda index: " ".join(map(str, series_dash(index))),
    )
    write_text(folder / "README.md", readme(study, words))
    write_text(folder / "report.html", page)
    write_text(folder / "summary.md", render_summary(study, data, overview, scales, words))
    found = {"training": training_table(data.runs), "layers": layer_table(data.diagnoses), "flips": flipped}
    for name, table in found.items():
        with atomic_path(folder / f"{name}.parquet") as temporary:
            table.write_parquet(temporary, compression="zstd")
        write_csv(folder / f"{name}.csv", table.drop(explorer.TEXT_COLUMNS, strict=False))


def facts(study: Study, data: ReportData, words: Words) -> str:
    """Return the sizes of the study: arms, seeds, steps, questions and noise levels."""
    questions = numbers.count(data.accuracy["num_questions"].max())  # type: ignore[arg-type]
    arms, levels = len(study.config.arms), len(study.config.evaluation.all_levels())
    if not study.has_training:
        return words("page.facts.checkpoints", checkpoints=arms, questions=questions, levels=levels)
    seeds = claims.seeds_per_arm(study, words)
    return words("page.facts", arms=arms, seeds=seeds, steps=study.num_steps, questions=questions, levels=levels)


def sections(study: Study, data: ReportData, scales: Sequence[machines.MachineScale], words: Words) -> list[Section]:
    """Return the sections of the page behind the answer; the template has the questions of the explored pair."""
    run_link = receipts.run_links(data.runs)
    models = {model: model_figures(study, data, model, words, run_link) for model in data.models}

    def of_models(name: str, none: str, *, folded: str = "") -> Section:
        parts: list[Part] = []
        for model, figures in models.items():
            if name not in figures:
                continue
            stem = f"{name}-{model}" if len(models) > 1 else name
            parts += [Part("heading", _heading(study, model, words))] if len(models) > 1 else []
            if name == "diagnosis":
                found, reasons = diagnosis.verdict_tables(data.of_model(model).diagnoses, words)
                parts += [Part("table", found, stem=stem), _folded(reasons, stem)]
            figure = Part("figure", figures[name], stem=stem)
            parts.append(Part("folded", (figure,), folded) if folded else figure)
        return Section(name, tuple(parts) or (Part("text", words(none)),))

    is_long = len(tables.arm_table(study, data.last, words).rows) > charts.MANY_ARMS
    costs, segments = cost_figure(study, data, words), segment_figure(data.claims, words)
    compared, checks = tables.comparison_tables(data.comparisons, words)
    comparisons = (
        Part("caption", words("comparisons.caption", power=study.config.statistics.power)),
        Part("table", compared),
        _folded(checks),
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
        Section("explorer", (_folded(outcomes) if outcomes else Part("text", words("explorer.none")),)),
        Section("comparisons", comparisons if compared.rows else (Part("text", words("comparisons.none")),)),
        Section("costs", (Part("figure", costs) if costs else Part("text", words("costs.none")),)),
        Section("provenance", tuple(receipts.provenance_parts(study, data, words, run_link))),
        Section("published", _published_parts(study, data, words)),
    ]
    return [section for section in found if section.parts]


def _folded(table: Table, stem: str = "") -> Part:
    """Return a table that is folded below its caption."""
    return Part("folded", (Part("table", table, stem=stem),), table.caption)


def _heading(study: Study, model: str, words: Words) -> str:
    source = study.config.models[model].source if model in study.config.models else ""
    return words("model.heading", model=model, source=source) if study.has_training else words("model.checkpoints")


def model_figures(study: Study, data: ReportData, model: str, words: Words, run_link: RunLink) -> dict[str, Figure]:
    """Return the figures of one model role by section; there is none where there is nothing to show."""
    own = data.of_model(model)
    keys, cut = _shown_arms(study, {*own.accuracy["arm"], *(run.arm for run in own.runs)}, words)
    figures = {}
    if not own.last.is_empty():
        figures["accuracy"] = _accuracy_figure(study, own, keys, cut, words, run_link)
        figures["robustness"] = _robustness_figure(study, own, keys, cut, words)
    if own.runs:
        figures["training"] = _training_figure(own.runs, keys, cut, words)
    if own.diagnoses:
        figures["diagnosis"] = _diagnosis_figure(study, own, words)
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


def _of_arms(rows: pl.DataFrame, keys: Sequence[SeriesKey]) -> pl.DataFrame:
    return rows.filter(pl.col("arm").is_in([key.name for key in keys]))


def _pictures(keys: Sequence[SeriesKey]) -> list[Sequence[SeriesKey]]:
    return [keys[start : start + ARMS_PER_PICTURE] for start in range(0, len(keys), ARMS_PER_PICTURE)]


def _accuracy_figure(
    study: Study, own: ReportData, keys: Sequence[SeriesKey], cut: Sequence[str], words: Words, run_link: RunLink
) -> Figure:
    questions = int(own.last["num_questions"].max())  # type: ignore[arg-type]
    caption = words("accuracy.caption", level=1 - study.config.statistics.alpha, questions=questions)
    scorer = study.config.evaluation.primary_scorer
    rows = (row | {"link": run_link(row["model"], row["arm"], row["seed"])} for row in own.accuracy.rows(named=True))
    # A study that grades answers of another kind has nothing to say of scorers of numbers.
    without = () if scorer in NUMBER_SCORERS else ("strict", "last_number")
    panels = charts.accuracy_panels(_of_arms(own.last, keys), keys, words)
    table = tables.table("accuracy", rows, words, without=without, scorer=scorer)
    return Figure(words.paragraph([caption, *cut]), (PanelGroup(panels),), (table,))


def _robustness_figure(
    study: Study, own: ReportData, keys: Sequence[SeriesKey], cut: Sequence[str], words: Words
) -> Figure:
    level, noises = 1 - study.config.statistics.alpha, study.config.evaluation.noises
    named = [words("robustness.named_noises", names=", ".join(noises))] if noises else []
    found = (
        tables.table("differences", own.differences, words, level=level),
        tables.table("robustness", own.robustness, words, level=level),
    )
    means = tables.table("robustness-means", tables.mean_accuracy(own.last), words)
    return Figure(
        caption=words.paragraph([words("robustness.caption", level=level), *named, *cut]),
        groups=tuple(_noise_group(group, own, words) for group in _pictures(keys)),
        tables=(*(table for table in found if table.rows), means),
    )


def _noise_group(group: Sequence[SeriesKey], own: ReportData, words: Words) -> PanelGroup:
    last, differences = own.last, _of_arms(own.differences, group).filter(pl.col("difference").is_not_null())
    many = charts.is_crowded(last["arm"].n_unique(), last.select("arm", "seed").n_unique())
    panels = [] if differences.is_empty() else [charts.difference_panel(differences, group, words)]
    shown, level = _of_arms(last, group), pl.col("noise_level")
    scales = shown.filter(level < 1)
    if scales["noise_level"].n_unique() > 1:
        panels.append(charts.accuracy_over_noise(scales, group, words, many=many))
    # A named noise has no place on an axis of scales.
    named = shown.filter((level >= 1) | (level == 0))
    if named["noise_level"].max() not in (None, 0.0):
        panels.append(charts.accuracy_by_name(named, group, words, many=many))
    return PanelGroup(panels, legend=group)


def _thinning(num_arms: int) -> int:
    """Return by how much curves have fewer points: the page of 250 arms has to open in time."""
    return 1 if num_arms <= charts.MANY_ARMS else 3 if num_arms <= 3 * charts.MANY_ARMS else 6


def _training_figure(runs: Sequence[Run], keys: Sequence[SeriesKey], cut: Sequence[str], words: Words) -> Figure:
    metrics, found, curves = training_table(runs), training.leaps(runs), tables.curve_tables(runs, words)
    arms = set(metrics["arm"].unique())
    trained = [key for key in keys if key.name in arms]
    less = _thinning(len(trained))
    caption = [words("training.caption"), *training.verified_sentences(runs, words)]
    caption += [] if curves else [words("training.no_curve_tables", runs=len(runs))]
    return Figure(
        caption=words.paragraph([*caption, *cut]),
        groups=tuple(
            PanelGroup(training.training_panels(_of_arms(metrics, group), group, words, found, less=less), legend=group)
            for group in _pictures(trained)
        ),
        tables=(
            *([training.leap_table(found, words)] if found else []),
            training.distance_table(runs, words),
            *training.router_tables(runs, words),
            *curves,
        ),
        alerts=(
            *training.leap_sentences(found, runs, words),
            *training.growth_sentences(runs, words),
            *training.engine_sentences(runs, words),
        ),
    )


def _diagnosis_figure(study: Study, own: ReportData, words: Words) -> Figure:
    diagnoses = own.diagnoses
    keys, layers = charts.keys_of(one.machine for one in diagnoses), layer_table(diagnoses)
    faults = [fault for one in diagnoses for fault in one.verdict.simulated_faults]
    fault_layers = [layer for fault in faults if isinstance(layer := fault.get("layer"), int)]
    reasons = {(one.machine, layer): why for one in diagnoses for layer, why in one.sigmas.reasons.items()}
    rows = (row | {"why": reasons.get((row["machine"], row["layer"]))} for row in layers.iter_rows(named=True))
    panels, constant = diagnosis.diagnosis_panels(layers, keys, fault_layers, words)
    caption = [words("diagnosis.caption")]
    caption += [words("diagnosis.rule")] if fault_layers else []
    caption += [words("diagnosis.constant", metrics=", ".join(constant))] if constant else []
    caption += diagnosis.device_sentences(diagnoses, own.runs, words)
    caption += diagnosis.guidance_sentences(study.arms, diagnoses, words)
    groups, sigmas = diagnosis.strategies(diagnoses, words)
    return Figure(
        caption=words.paragraph(caption),
        groups=(PanelGroup(panels, legend=keys), *groups),
        tables=(tables.table("layers", rows, words), *sigmas),
    )


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


def look_figure(file: ClaimsFile, words: Words) -> Figure | None:
    """Return the claims over the looks of a study that adds seeds, as pictures and a table; None with fixed seeds."""
    table = claims.look_table(file, words)
    if table is None:
        return None
    # A claim that ended has the values of its last look at the later ones.
    tested = [one for look in file.looks for one in look.claims if one.look == look.look and one.ci_low is not None]
    panels = [
        charts.look_panel(looks, claims.claim_text(claim, words), words)
        for claim in file.claims[: claims.MAX_CLAIMS_PER_LOOK]
        if (looks := [one for one in tested if one.comparison_id == claim.comparison_id])
    ]
    caption = words("looks.caption", shown=len(panels), all=len(file.claims))
    return Figure(caption, (PanelGroup(panels),), (table,), is_open=True)


def segment_figure(file: ClaimsFile, words: Words) -> Figure | None:
    """Return the effect of one claim by segment of the questions, as pictures and a table; None without segments."""
    if not file.segments:
        return None
    ways = dict.fromkeys(one.by for one in file.segments)
    panels = [charts.segment_panel([one for one in file.segments if one.by == by], by, words) for by in ways]
    first = file.segments[0].comparison_id
    claim = next((claims.claim_text(claim, words) for claim in file.claims if claim.comparison_id == first), first)
    caption = words("segments.caption", claim=claim, level=1 - file.alpha)
    return Figure(caption, (PanelGroup(panels),), (tables.table("segments", file.segments, words),), is_open=True)


def cost_rows(made: Sequence[Run] | Sequence[Evaluated]) -> pl.DataFrame:
    """Return a row per job that recorded its cost: model, arm, seed, seconds, cpu_seconds, peak_mb."""
    names = {"model": pl.String, "arm": pl.String, "seed": pl.Int64}
    rows = [{name: one.record.identity[name] for name in names} | vars(one.cost) for one in made if one.cost]
    return pl.DataFrame(rows, schema=names | dict.fromkeys(("seconds", "cpu_seconds", "peak_mb"), pl.Float64))


def cost_table(runs: Sequence[Run], evaluations: Sequence[Evaluated], words: Words) -> Table:
    """Return one row per arm with means over its runs, relative to the first arm that has measurements."""
    keys, seconds, several = ("model", "arm"), pl.col("seconds"), pl.len() > 1
    trained = (
        cost_rows(runs)
        .with_columns(steps=pl.Series([len(run.metrics) for run in runs if run.cost]))
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


def cost_figure(study: Study, data: ReportData, words: Words) -> Figure | None:
    """Return the cost of the arms; None if no job recorded its cost."""
    rows = cost_rows(data.runs)
    if rows.is_empty():
        return None
    keys, cut = _shown_arms(study, set(rows["arm"]), words)
    training, evaluation = (sum(cost_rows(made)["seconds"]) / MINUTE for made in (data.runs, data.evaluations))
    minutes = _of_arms(rows, keys).with_columns(minutes=pl.col("seconds") / MINUTE)
    return Figure(
        caption=words.paragraph([words("costs.caption", training=training, evaluation=evaluation), *cut]),
        groups=(PanelGroup(charts.cost_panels(minutes, keys, words)),),
        tables=(cost_table(data.runs, data.evaluations, words),),
        is_open=True,
    )


def _published_parts(study: Study, data: ReportData, words: Words) -> tuple[Part, ...]:
    """Return the section with the published figures beside the measured ones; empty where the study names none."""
    check = data.published
    if check is None:
        return ()
    rows = published.side_by_side(check, data.last)
    keys = _arm_keys(study, set(rows["arm"]), words)
    panels = charts.published_panels(rows, keys, words) if not rows.is_empty() else []
    compared, sentences, *others = published.published_tables(check, words, published.means_of(data.last))
    figure = Figure("", (PanelGroup(panels),), tuple(table for table in others if table.rows))
    parts = (Part("table", compared), _folded(sentences), Part("figure", figure))
    caption = Part("caption", words("published.caption", title=check.title))
    return caption, Part("folded", parts, words("published.open"))
