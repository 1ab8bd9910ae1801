"""`aqnpipe compare-runs`: the same training on two machines, metric by metric and step by step."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aqnpipe.cli.options import aligned, check_writable
from aqnpipe.errors import ConfigError

if TYPE_CHECKING:
    from aqnpipe.comparison.training_runs import MetricDifference, RunComparison

EXIT_DIFFERENT = 3


def compare_runs(
    first: Annotated[Path, typer.Argument(help="runs of the first machine")],
    second: Annotated[Path, typer.Argument(help="runs of the second machine")],
    metric: Annotated[
        list[str] | None,
        typer.Option(help="metric or column to compare; may be repeated. Default: reward, loss, kl and others"),
    ] = None,
    alpha: Annotated[float, typer.Option(help="probability that equal machines are called different")] = 0.05,
    json: Annotated[Path | None, typer.Option(help="write the result to this file")] = None,
) -> None:
    """Compare the same training on two machines, engines or library versions, step by step.

    Each side is a run of a study, the folder of an arm with its seeds, a file of metrics (.parquet, .csv, .jsonl,
    trainer_state.json), or a folder of such files, one per seed.

    Exit code 0: no difference beyond that between seeds; 3: a difference beyond it; 2: the runs cannot be compared.
    """
    from aqnpipe.artifacts.files import write_json
    from aqnpipe.comparison import training_runs

    if not 0 < alpha < 1:
        raise ConfigError(f"--alpha: found {alpha:g}, expected above 0 and below 1")
    check_writable("--json", json)
    groups = training_runs.read_runs(first), training_runs.read_runs(second)
    found = training_runs.compare_runs(*groups, (str(first), str(second)), metric or (), alpha)
    typer.echo("\n".join(text_of(found)))
    if json is not None:
        write_json(json, found)
        typer.echo(f"written: {json}", err=True)
    raise typer.Exit(EXIT_DIFFERENT if found.differing else 0)


def text_of(found: "RunComparison") -> list[str]:
    """Return the lines that the command prints; the last one answers."""

    runs = " and ".join(f"{number} run{'s' if number > 1 else ''}" for number in found.runs)
    head = f"{found.first} and {found.second}: {runs}{', paired by name' if found.paired else ''}; "
    head += f"{found.num_steps} steps, {found.steps[0]} to {found.steps[1]}"
    head += f", {found.only_one_side} more on one side only" if found.only_one_side else ""
    header = [
        "metric",
        "first",
        "second",
        "difference",
        "of first",
        "interval",
        "p (adjusted)",
        "unequal",
        "beyond seeds",
    ]
    table = aligned([header, *(_cells(row) for row in found.metrics)])
    note = (
        "unequal: first step at which runs of one seed have other numbers; beyond seeds: first step whose difference "
        "is larger than seeds explain. Intervals of mean differences and p-values are adjusted for steps and metrics."
    )
    return [head, "", *table, "", note, "", answer_of(found)]


def _cells(row: "MetricDifference") -> list[str]:
    interval = "" if row.ci_low is None or row.ci_high is None else f"{row.ci_low:+.3g} to {row.ci_high:+.3g}"
    return [
        row.metric,
        f"{row.mean_first:.4g}",
        f"{row.mean_second:.4g}",
        f"{row.difference:+.3g}",
        "" if row.relative is None else _percent(row.relative, "+"),
        interval,
        "" if row.p_adjusted is None else f"{row.p_adjusted:.2g}",
        "" if row.first_unequal is None else f"step {row.first_unequal}",
        "" if row.first_beyond is None else f"step {row.first_beyond}",
    ]


def answer_of(found: "RunComparison") -> str:
    """Return one sentence: yes, no or not known, whether the two sides differ by more than seeds explain."""
    if found.differing:
        parts = [_difference(row) for row in found.differing]
        return f"Yes, they differ by more than seeds explain: {'; '.join(parts)}. Where it begins: {_PARITY}"
    if (found.paired or found.runs == (1, 1)) and all(row.first_unequal is None for row in found.metrics):
        return f"No: all numbers of all {found.num_steps} steps are equal."
    if not found.has_band:
        sizes = [f"{row.metric} {_percent(row.relative, '+')}" for row in found.metrics if row.relative is not None]
        return (
            "Not known whether seeds explain the difference: each side has one run, and one side needs two at least. "
            f"Mean differences: {', '.join(sizes)} (verl accepts an NPU whose mean loss differs by less than 2 %)."
        )
    widest = max((row for row in found.metrics if row.relative is not None), key=_reach, default=None)
    limit = "" if widest is None else f"; mean differences of up to {_percent(_reach(widest))} ({widest.metric}) remain"
    return f"No difference beyond that between seeds was found in {found.num_steps} steps{limit} possible."


_PARITY = (
    "compare the operators of both machines on the checkpoint before that step (`aqnpipe capture` on each, then "
    "`aqnpipe parity`)."
)


def _percent(fraction: float, sign: str = "") -> str:
    return f"{100 * fraction:{sign},.{0 if abs(fraction) >= 1 else 2}f} %"


def _reach(row: "MetricDifference") -> float:
    """Return the largest relative difference of means that the interval holds."""
    if row.ci_low is None or row.ci_high is None or not row.relative or not row.difference:
        return 0.0
    return max(abs(row.ci_low), abs(row.ci_high)) * abs(row.relative / row.difference)


def _difference(row: "MetricDifference") -> str:
    if row.first_beyond is None:
        return f"{row.metric} by {row.difference:+.3g} on average over the steps"
    if row.difference_beyond is None:
        return f"{row.metric} is no number on one side from step {row.first_beyond} on"
    return (
        f"{row.metric} from step {row.first_beyond} on, by {row.difference_beyond:+.3g} where seeds explain "
        f"{row.band_beyond:.3g}"
    )
