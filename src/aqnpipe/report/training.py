"""Training: curves of all runs, steps at which a metric leaps, and the distance between sampler and trained policy."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import altair as alt
import polars as pl

from aqnpipe.report.charts import (
    Panel,
    SeriesKey,
    base_chart,
    colour_scale,
    dash_scale,
    number_axis,
    panel,
    switched,
    told,
)
from aqnpipe.report.inputs import Run
from aqnpipe.report.markup import INK, described, small_dot
from aqnpipe.report.tables import Table, table
from aqnpipe.report.words import Words

METRICS = ("kl", "loss")
MAX_SHOWN = 3
"""Leaps, or runs, that are named where there are more."""
_NEIGHBOURS = 9
_TIMES_USUAL = 10.0
_SMALLEST_SPREAD = 0.05
"""Deviations are compared with at least this, in nats: a curve without any variance has no usual deviation."""


@dataclass(frozen=True)
class Leap:
    """One step of one run whose metric is `value`, while its neighbours are about `usual`."""

    model: str
    arm: str
    seed: int
    metric: str
    step: int
    value: float
    usual: float


def leaps(runs: Sequence[Run]) -> list[Leap]:
    """Return the leaps of KL and loss of all runs, the farthest first.

    A value leaps if it is farther from the median of its 9 neighbours than 10 times the run's usual deviation from
    that median (the median absolute deviation, scaled to a standard deviation), and than 0.5 nats.
    """
    found = [leap for run in runs for metric in METRICS for leap in _leaps_of(run, metric)]
    return sorted(found, key=lambda leap: (-abs(leap.value - leap.usual), leap.arm, leap.seed, leap.step))


def leap_sentence(leap: Leap, words: Words) -> str:
    """Return what leapt where, from which value to which."""
    return words(
        "training.leap",
        metric=words(f"metric.{leap.metric}"),
        run=words("run.name", arm=leap.arm, seed=leap.seed),
        step=leap.step,
        value=leap.value,
        usual=leap.usual,
    )


def leap_sentences(found: Sequence[Leap], runs: Sequence[Run], words: Words) -> list[str]:
    """Return each of the farthest leaps with the validations around it, and how many more there are."""
    shown, more = found[:MAX_SHOWN], len(found) - MAX_SHOWN
    sentences = [words.paragraph([leap_sentence(leap, words), *_validations(leap, runs, words)]) for leap in shown]
    return [*sentences, *([words("training.more_leaps", count=more)] if more > 0 else [])]


def _validations(leap: Leap, runs: Sequence[Run], words: Words) -> Iterator[str]:
    """Yield validation accuracy before and after a leap, and whether that change is larger than others of the run."""
    run = next(run for run in runs if (run.model, run.arm, run.seed) == (leap.model, leap.arm, leap.seed))
    table = run.metrics.select("step", "validation_accuracy").drop_nulls().sort("step")
    steps, values = table["step"].to_list(), table["validation_accuracy"].to_list()
    # The values of a step are of the policy before its update, validations of that after the update of their step.
    after = bisect_left(steps, leap.step - 1)
    if not 0 < after < len(steps):
        yield words("training.leap_unknown")
        return
    first, second = steps[after - 1], steps[after]
    yield words("training.leap_validations", first=first, before=values[after - 1], second=second, after=values[after])
    changes = [later - earlier for earlier, later in pairwise(values)]
    if elsewhere := changes[: after - 1] + changes[after:]:
        low, high = min(elsewhere), max(elsewhere)
        yield words("training.leap_elsewhere", low=low, high=high)
        yield words("training.leap_harmless" if changes[after - 1] >= low else "training.leap_loss")


def leap_table(found: Sequence[Leap], words: Words) -> Table:
    """Return every leap with its neighbours' value."""
    rows = (vars(leap) | {"run": words("run.name", arm=leap.arm, seed=leap.seed)} for leap in found)
    return table("leaps", rows, words)


def _leaps_of(run: Run, metric: str) -> Iterator[Leap]:
    table = run.metrics.select("step", metric).drop_nulls().sort("step")
    if len(table) < 3:
        return
    values = table[metric].cast(pl.Float64)
    usual = values.rolling_median(_NEIGHBOURS, min_samples=1, center=True)
    distance = (values - usual).abs()
    spread = max(1.4826 * float(distance.median() or 0.0), _SMALLEST_SPREAD)  # type: ignore[arg-type]
    for step, value, nearby, far in zip(table["step"], values, usual, distance > _TIMES_USUAL * spread, strict=True):
        if far:
            yield Leap(run.model, run.arm, run.seed, metric, step, value, nearby)


def distance_table(runs: Sequence[Run], words: Words) -> Table:
    """Return how far sampler and trained policy are apart in the runs of each model, number format and arm."""
    columns = (pl.col("logp_difference_mean", "sampler_kl").mean(), pl.col("logp_difference_max").max())
    others = (pl.col("logp_difference_max").max().alias("largest"), pl.col("sampler_kl").mean())
    return table("distances", _by_format(_means(runs, *columns), "logp_difference_mean", *others), words)


def router_tables(runs: Sequence[Run], words: Words) -> list[Table]:
    """Return how often routers of sampler and trained policy chose the same experts; nothing without such runs."""
    means = _means(runs, pl.col("router_agreement", "tokens_routed_differently").mean()).drop_nulls()
    if means.is_empty():
        return []
    rows = _by_format(means, "router_agreement", pl.col("tokens_routed_differently").mean().alias("tokens"))
    return [table("routers", rows, words)]


def _means(runs: Sequence[Run], *columns: pl.Expr) -> pl.DataFrame:
    """Return a row of `columns` for each run, with its model, number format and arm."""
    return pl.concat(
        run.metrics.select(
            pl.lit(run.model).alias("model"),
            pl.lit(str(run.record.config["dtype"])).alias("format"),
            pl.lit(run.arm).alias("arm"),
            *columns,
        )
        for run in runs
    )


def _by_format(of_runs: pl.DataFrame, column: str, *others: pl.Expr) -> Iterator[dict[str, Any]]:
    """Yield a row per model, number format and arm: the runs, mean, lowest and highest of `column`, and `others`."""
    value = pl.col(column)
    groups = of_runs.group_by("model", "format", "arm").agg(
        pl.len().alias("runs"),
        value.mean().alias("mean"),
        value.min().alias("lowest"),
        value.max().alias("highest"),
        *others,
    )
    yield from groups.sort("model", "format", "arm").iter_rows(named=True)


def growth_sentences(runs: Sequence[Run], words: Words) -> list[str]:
    """Return a sentence for each of the runs whose distance has grown the most, and how many more there are."""
    growths = [(run, run.record.training.distance_growth) for run in runs if run.record.training]
    grown = [(run, growth) for run, growth in growths if growth is not None and growth.has_grown]
    grown.sort(key=lambda pair: (pair[1].first_mean - pair[1].last_mean, pair[0].arm, pair[0].seed))
    sentences = [
        words(
            "distance.grown",
            run=words("run.name", arm=run.arm, seed=run.seed),
            first=growth.first_mean,
            last=growth.last_mean,
            rollouts=growth.num_compared,
            error=growth.standard_error,
        )
        for run, growth in grown[:MAX_SHOWN]
    ]
    more = len(grown) - MAX_SHOWN
    return [*sentences, *([words("distance.more_grown", count=more)] if more > 0 else [])]


def verified_sentences(runs: Sequence[Run], words: Words) -> list[str]:
    """Return a sentence on the steps of which a micro-batch was computed twice; nothing if there are none."""
    facts = [run.record.training for run in runs if run.record.training]
    verified = sum(len(of_run.verified_steps) for of_run in facts)
    return [words("training.verified", verified=verified, steps=sum(of.steps for of in facts))] if verified else []


def engine_sentences(runs: Sequence[Run], words: Words) -> list[str]:
    """Return a sentence if only some of the runs on vLLM used its batch-invariant mode, and one if any used graphs."""
    found, separator = [], words("list.separator")
    for setting, is_used, text in (("batch_invariant", True, "invariance"), ("enforce_eager", False, "graphs")):
        arms: dict[bool, dict[str, None]] = {True: {}, False: {}}
        for run in runs:
            if (mode := run.record.generation.get(setting)) is not None:
                arms[mode is is_used][run.arm] = None
        on, off = (separator.join(arms[used]) for used in (True, False))
        if on and off:
            found.append(words(f"distance.mixed.{text}", on=on, off=off))
        elif on and text == "graphs":
            found.append(words("distance.graphs", on=on))
    return found


SMOOTHING_STEPS = 5
MAX_POINTS_PER_LINE = 60
MAX_DOTS = 3000
"""Dots of one picture; longer runs are thinned, and none are drawn where a run would have fewer than 12."""
MIN_DOTS_PER_RUN = 12
VALUES_PER_LINE = 12
"""Places of a line at which the picture shows its value."""
_FAR = 20


def training_panels(
    metrics: pl.DataFrame, keys: Sequence[SeriesKey], words: Words, found: Sequence[Leap] = (), *, less: int = 1
) -> list[Panel]:
    """Return reward, KL, loss (where it leaps), validation accuracy and sigma over optimiser steps.

    `metrics`: the concatenated tables of the runs, with columns arm and seed. `found`: leaps to mark. `less`: divisor
    of the number of points, for a page with very many arms.
    """
    num_steps = int(metrics["step"].max())  # type: ignore[arg-type]
    points = MAX_POINTS_PER_LINE // less
    stride = max(-(-num_steps // points), 1)
    window = max(SMOOTHING_STEPS, stride)
    names = ("reward_mean", "kl", *(("loss",) if any(leap.metric == "loss" for leap in found) else ()))
    thinning = (window, stride, less)
    panels = [
        _curves(metrics, name, words(f"training.{name}_smooth", window=window), thinning, keys, words, found)
        for name in names
        if metrics[name].null_count() < len(metrics)
    ]
    validated = metrics.filter(pl.col("validation_accuracy").is_not_null())
    if not validated.is_empty():
        percent = validated.with_columns(pl.col("validation_accuracy") * 100)
        title = words("training.validation")
        panels.append(_curves(percent, "validation_accuracy", title, (1, 1, less), keys, words, ()))
    noisy = metrics.filter(pl.col("sigma_requested") > 0).filter((num_steps - pl.col("step")) % stride == 0)
    if not noisy.is_empty():
        panels.append(_sigma_panel(noisy, keys, words))
    return panels


def smoothed_by_arm(metrics: pl.DataFrame, column: str, window: int, stride: int) -> pl.DataFrame:
    """Return the mean over seeds of the running means (medians of KL and loss), with lowest and highest seed.

    Columns: arm, step, mean, low, high. Thinned by `stride` from the end, so that the last step stays.
    """
    last = int(metrics["step"].max())  # type: ignore[arg-type]
    rows = metrics.select("arm", "seed", "step", value=pl.col(column).cast(pl.Float64)).drop_nulls("value")
    value = pl.col("value")
    # A running mean would make a plateau of a leap, which the dots and triangles show.
    smoothed = value.rolling_median if column in METRICS else value.rolling_mean
    smooth = rows.sort("arm", "seed", "step").with_columns(smoothed(window, min_samples=1).over("arm", "seed"))
    thin = smooth.filter((last - pl.col("step")) % stride == 0)
    return (
        thin.group_by("arm", "step")
        .agg(value.mean().alias("mean"), value.min().alias("low"), value.max().alias("high"))
        .sort("arm", "step")
    )


def _curves(
    metrics: pl.DataFrame,
    column: str,
    title: str,
    thinning: tuple[int, int, int],
    keys: Sequence[SeriesKey],
    words: Words,
    found: Sequence[Leap],
) -> Panel:
    means = smoothed_by_arm(metrics, column, *thinning[:2])
    dots = _dots(metrics, column, MAX_DOTS // thinning[2])
    y = alt.Y("mean:Q").title(words(f"axis.{column}")).scale(zero=False)
    raw = pl.concat([dots["value"], means["mean"]])
    if column == "kl" and _needs_decades(raw):
        means, dots = means.filter(pl.col("low") > 0), dots.filter(pl.col("value") > 0)
        raw = raw.filter(raw > 0)
        y = y.scale(type="log").axis(values=_decades(raw))
    axes = _axes_of_steps(keys, words)

    def over_steps(rows: pl.DataFrame, field: str = "mean") -> alt.Chart:
        return base_chart(rows).encode(y=_same(y, field), **axes)

    layers: list[alt.Chart] = []
    if not dots.is_empty():
        layers.append(over_steps(dots, "value").mark_point(filled=True, size=5))
    if (means["high"] > means["low"]).any():
        layers.append(over_steps(switched(means), "low").mark_area(opacity=0.16).encode(alt.Y2("high:Q")))
    lines = over_steps(switched(means)).mark_line(strokeWidth=1.9)
    layers.append(lines.encode(strokeDash=dash_scale("arm", keys)))
    values = _values(means, words, title, VALUES_PER_LINE // thinning[2])
    layers.append(over_steps(values).mark_point(filled=True, size=90, opacity=0))
    marked = _leap_marks(found, metrics, column, words)
    if marked is not None:
        base = over_steps(marked)
        layers.append(
            base.mark_point(shape="triangle-down", size=70, filled=True, opacity=1, stroke=INK, strokeWidth=1)
        )
    return panel(title, alt.layer(*layers), words("alt.training", what=title))


def _dots(metrics: pl.DataFrame, column: str, most: int) -> pl.DataFrame:
    """Return every value of every run, thinned to what one picture can show; empty if that is too little."""
    rows = metrics.select("arm", "seed", "step", value=pl.col(column).cast(pl.Float64)).drop_nulls("value")
    runs = max(rows.select("arm", "seed").n_unique(), 1)
    per_run = most // runs
    if per_run < MIN_DOTS_PER_RUN:
        return rows.clear().with_columns(about=pl.lit(""))
    last = int(metrics["step"].max())  # type: ignore[arg-type]
    stride = max(-(-(len(rows) // runs) // per_run), 1)
    thin = rows.filter((last - pl.col("step")) % stride == 0) if stride > 1 else rows
    thin = thin.sort("arm", "seed", "step")
    return thin.with_columns(about=pl.Series([small_dot(arm) for arm in thin["arm"]], dtype=pl.String))


def _values(means: pl.DataFrame, words: Words, title: str, most: int) -> pl.DataFrame:
    """Return some points of every line with a text of their values; the last one is always among them."""
    parts = []
    for _, line in means.group_by("arm", maintain_order=True):
        stride = max(-(-len(line) // most), 1)
        parts.append(line[::-1][::stride])

    return told(pl.concat(parts), "mark.curve", words, what=title)


def _leap_marks(found: Sequence[Leap], metrics: pl.DataFrame, column: str, words: Words) -> pl.DataFrame | None:
    arms = set(metrics["arm"])
    own = [leap for leap in found if leap.metric == column and leap.arm in arms][:100]
    if not own:
        return None
    texts = [described(leap.arm, leap_sentence(leap, words)) for leap in own]
    return pl.DataFrame(own).select("arm", "step", pl.col("value").alias("mean"), pl.Series("about", texts))


def _sigma_panel(table: pl.DataFrame, keys: Sequence[SeriesKey], words: Words) -> Panel:
    first_seed = table.filter(pl.col("seed") == pl.col("seed").min().over("arm")).sort("arm", "step")
    axes = _axes_of_steps(keys, words)
    logarithmic = alt.Scale(type="log")
    y = alt.Y("sigma_requested:Q").title(words("axis.sigma_requested")).scale(logarithmic)
    y = y.axis(values=_decades(table["sigma_requested"]))
    requested = base_chart(switched(first_seed)).mark_line(strokeWidth=1.6, interpolate="step-after")
    measured = base_chart(told(first_seed, "mark.sigma", words).filter(pl.col("sigma_measured") > 0))
    points = measured.mark_point(filled=True, size=14, opacity=1)
    chart = alt.layer(
        requested.encode(y=y, strokeDash=dash_scale("arm", keys), **axes),
        points.encode(y=alt.Y("sigma_measured:Q").scale(logarithmic), **axes),
    )
    title = words("training.sigma")
    return panel(title, chart, words("alt.training", what=title))


def _axes_of_steps(keys: Sequence[SeriesKey], words: Words) -> dict[str, Any]:
    """Return what all marks over the steps have in common."""
    step = number_axis("step", words("axis.step"))
    return {"x": step, "color": colour_scale("arm", keys), "description": "about:N"}


def _same(y: alt.Y, field: str) -> alt.Y:
    """Return the axis `y` for another field."""
    twin = y.copy()
    twin.shorthand = f"{field}:Q"
    return twin


def _needs_decades(values: pl.Series) -> bool:
    """Return whether a few values are so far above the rest that a linear axis would show nothing else."""
    positive = values.filter(values > 0)
    return not positive.is_empty() and float(positive.max()) > _FAR * float(positive.median())  # type: ignore[arg-type]


def _decades(values: pl.Series) -> list[float]:
    """Powers of ten from below the lowest to above the highest of `values`, all above 0."""
    lowest, highest = float(values.min()), float(values.max())  # type: ignore[arg-type]
    return [10.0**power for power in range(math.floor(math.log10(lowest)), math.ceil(math.log10(highest)) + 1)]
