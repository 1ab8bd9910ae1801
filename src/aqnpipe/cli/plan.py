"""`aqnpipe plan`: which differences a study can find, what it costs, and the cheapest split for a wanted difference."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import Field

from aqnpipe.cli.cost_estimate import Assumptions, estimate_study
from aqnpipe.cli.options import TrustCode
from aqnpipe.cli.study import open_study
from aqnpipe.config.base import FrozenModel
from aqnpipe.config.dataset import DatasetConfig, GeneratedDataset, LocalDataset
from aqnpipe.config.plan import StudyPlan
from aqnpipe.errors import ConfigError, DataError

if TYPE_CHECKING:
    from aqnpipe.statistics.arrays import FloatArray
    from aqnpipe.statistics.clusters import Clusters
    from aqnpipe.statistics.planning import Pilot


class PlannedLevel(FrozenModel):
    """Finding of a study between two arms at a noise level; differences as fractions, null: one seed shows none."""

    noise_level: float
    noise_name: str | None = Field(description="of a named noise; its level numbers it")
    variances_from: str
    seed_sd: float = Field(description="standard deviation of the difference between seeds")
    seed_sd_range: tuple[float, float] | None = Field(
        description="80 % interval of it; null: the results say nothing about it, and seed_sd is the usual value"
    )
    detectable_alone: float | None = Field(description="as the only comparison")
    detectable_in_family: float | None = Field(description="as one of its group, before Holm has rejected any other")
    cheapest: dict[str, float] | None = Field(description="num_seeds, num_questions, num_draws and device_hours")
    seeds_range: tuple[int, int | None] | None = Field(
        description="seeds of the cheapest split at both ends of seed_sd_range; null at the upper end: more than tried"
    )


class StudyPrognosis(FrozenModel):
    """Output of `aqnpipe plan --json`.

    `adds_seeds`: whether the study adds seeds until its claims are decided; `num_seeds` is then its maximum, and
    everything is of a single test of all of them.
    """

    study: str
    num_arms: int
    num_seeds: int
    adds_seeds: bool
    num_questions: int
    num_clusters: int | None = Field(description="of the questions; null: none, or not known before a download")
    num_draws: int
    power: float
    alpha: float
    largest_family: int = Field(description="of secondary claims")
    has_primary: bool = Field(description="whether the split is for a primary claim, which is tested by itself")
    wanted: float
    device_hours: float
    devices_per_engine: int = Field(description="devices that share every layer in an evaluation")
    levels: tuple[PlannedLevel, ...]


def plan(
    study: Annotated[Path, typer.Argument(help="study file, described in config/README.md")],
    results: Annotated[
        Path | None,
        typer.Option(help="results folder of a finished study or a pilot, for its variances; default: usual ones"),
    ] = None,
    points: Annotated[
        float, typer.Option(min=0.1, max=50, help="wanted difference in points, for the cheapest split")
    ] = 2.0,
    prompt_tokens: Annotated[float | None, typer.Option(min=1, help="mean length of a prompt in tokens")] = None,
    trust_code: TrustCode = False,
    json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
) -> None:
    """Say which differences between arms a study can find, what it costs, and the cheapest split for a wanted one."""
    opened = open_study([study], trust_code=trust_code)
    if not opened.study.has_training:
        raise ConfigError(f"{study}: found checkpoints, expected training: plan is about the seeds of trained arms")
    found = prognosis(opened, results, points / 100, Assumptions(prompt_tokens=prompt_tokens))
    typer.echo(found.model_dump_json(indent=2) if json else "\n".join(_lines(found)))


def prognosis(opened: StudyPlan, results: Path | None, wanted: float, assumptions: Assumptions) -> StudyPrognosis:
    """Return what a study can find, with variances of `results`; DataError if no two arms with two seeds are there."""
    from aqnpipe.statistics.clusters import Clusters
    from aqnpipe.statistics.planning import SEEDS_TRIED, USUAL, PairVariances, Pilot, cheapest, detectable

    config, claims = opened.study.config, opened.study.comparisons()
    families = [claim.family for claim in claims if claim.role == "secondary"]
    has_primary = any(claim.role == "primary" for claim in claims)
    rule = opened.study.adaptive_seeds
    if rule is not None:
        opened = StudyPlan(opened.study.with_seeds(rule.max))
    measured = {} if results is None else _variances(results, config.evaluation.primary_scorer, config.statistics.alpha)
    estimate = estimate_study(opened, assumptions)
    evaluation = estimate.hours_by_phase.get("evaluation", 0.0)
    training = sum(estimate.hours_by_phase.values()) - evaluation
    largest = max((families.count(family) for family in families), default=1)
    # Without a number of questions there is no estimate.
    num_questions = config.evaluation.num_questions or config.dataset.num_test or 0
    sizes = (len(opened.study.seeds), num_questions, len(config.evaluation.noise_seeds))
    most_questions = config.dataset.num_test or num_questions
    clusters = _clusters(config.dataset, sizes[1])
    if config.statistics.unit == "batch":
        clusters = Clusters.of([number // config.evaluation.batch_size for number in range(sizes[1])])
    num_clusters = None if clusters is None else clusters.effective_number
    noise_names = config.evaluation.noise_names()
    is_random = {level: config.evaluation.is_random(level) for level in config.evaluation.all_levels()}

    def passes(num_draws: int) -> int:
        return sum(num_draws if drawn else 1 for drawn in is_random.values())

    def cost(num_seeds: int, num_questions: int, num_draws: int) -> float:
        """Return the device hours of other numbers, in proportion to the estimate."""
        answers = num_questions * passes(num_draws) / (sizes[1] * passes(sizes[2]))
        return num_seeds / sizes[0] * (training + answers * evaluation)

    def level_found(level: float) -> PlannedLevel:
        # In other results the level of a named noise may number another one.
        own = measured.get(level) if level not in noise_names else None
        pilot, num_arms = own or Pilot(USUAL, None), len(opened.study.arms)
        if not is_random[level]:
            # Its one pass has no draws to average over.
            pilot = replace(pilot, variances=replace(pilot.variances, draw=0.0))
        variances, tested_with = pilot.variances, 1 if has_primary else largest

        def limit(of: PairVariances, tried: tuple[int, int, int], comparisons: int) -> float | None:
            alpha = config.statistics.alpha / comparisons
            return detectable(of, tried, num_arms, alpha, config.statistics.power, num_clusters)

        def finds(of: PairVariances, *tried: int) -> bool:
            found = limit(of, (tried[0], tried[1], tried[2]), tested_with)
            return found is not None and found <= wanted

        def seeds_with(of: PairVariances, num_questions: int, num_draws: int) -> int | None:
            return next((number for number in SEEDS_TRIED if finds(of, number, num_questions, num_draws)), None)

        split = cheapest(partial(finds, variances), cost, most_questions, noisy=is_random[level])
        low, high = (None, None) if split is None else (
            seeds_with(end, split.num_questions, split.num_draws) for end in pilot.ends
        )  # fmt: skip
        return PlannedLevel(
            noise_level=level,
            noise_name=noise_names.get(level),
            variances_from="usual values" if own is None else "results" if own.seed_range else "results, usual seeds",
            seed_sd=variances.seed**0.5,
            seed_sd_range=pilot.seed_range and (pilot.seed_range[0] ** 0.5, pilot.seed_range[1] ** 0.5),
            detectable_alone=limit(variances, sizes, 1),
            detectable_in_family=limit(variances, sizes, largest),
            seeds_range=None if low is None or pilot.seed_range is None else (low, high),
            cheapest=None if split is None else {name: float(value) for name, value in vars(split).items()},
        )

    return StudyPrognosis(
        study=config.study,
        num_seeds=sizes[0],
        adds_seeds=rule is not None,
        num_questions=sizes[1],
        num_clusters=None if clusters is None else clusters.number,
        num_draws=sizes[2],
        largest_family=largest,
        has_primary=has_primary,
        wanted=wanted,
        device_hours=estimate.device_hours,
        devices_per_engine=config.generation.tensor_parallel,
        levels=tuple(level_found(level) for level in sorted(is_random)),
        num_arms=len(opened.study.arms),
        alpha=config.statistics.alpha,
        power=config.statistics.power,
    )


def _clusters(dataset: DatasetConfig, num_questions: int) -> "Clusters | None":
    """Return the clusters of a study's test questions; None if they have none, or must be downloaded first."""
    from aqnpipe.data.loader import load_problems
    from aqnpipe.statistics.clusters import Clusters

    if not isinstance(dataset, GeneratedDataset | LocalDataset):
        return None
    problems = load_problems(dataset, "test").head(num_questions)
    return Clusters.of(problems["cluster"].to_list()) if "cluster" in problems.columns else None


def _variances(results: Path, scorer: str, alpha: float) -> "dict[float, Pilot]":
    """Return the variances of pairs of arms by noise level, after the last step, from a results folder."""
    from aqnpipe.artifacts.evaluations import last_evaluations
    from aqnpipe.comparison.evaluations import EvaluationInput, load_evaluations
    from aqnpipe.statistics.planning import pilot_of

    loaded = load_evaluations((EvaluationInput(**vars(one)) for one in last_evaluations(results)), scorer, alpha)
    scores: dict[tuple[str, str, float], dict[int, FloatArray]] = {}
    for (model, arm, seed, _), one in loaded.items():
        for level, found in one.levels.items():
            scores.setdefault((model, arm, level), {})[seed] = found.correct
    clusters = next((found.clusters for one in loaded.values() for found in one.levels.values()), None)
    pilots = {}
    for level in sorted({key[2] for key in scores}):
        arms = [(role, arm) for role, arm, at_level in scores if at_level == level]
        pairs = [(first, second) for first, second in combinations(arms, 2) if first[0] == second[0]]
        tables = [_on_common_seeds(scores[*first, level], scores[*second, level]) for first, second in pairs]
        pilot = pilot_of([pair for pair in tables if pair is not None], len(arms), clusters)
        if pilot is not None:
            pilots[level] = pilot
    if not pilots:
        state = "found no two arms with two common seeds" if results.is_dir() else "no such folder"
        raise DataError(f"{results}: {state}, expected a finished study's results")
    return pilots


def _on_common_seeds(
    first: "Mapping[int, FloatArray]", second: "Mapping[int, FloatArray]"
) -> "tuple[FloatArray, FloatArray] | None":
    """Return scores[seed, noise draw, question] on the seeds that two arms share; None below two, or of unlike shape.

    In a study that adds seeds, arms have different numbers of them.
    """
    import numpy as np

    seeds = [seed for seed in first if seed in second]
    if len(seeds) < 2 or len({arm[seed].shape for arm in (first, second) for seed in seeds}) > 1:
        return None
    return np.stack([first[seed] for seed in seeds]), np.stack([second[seed] for seed in seeds])


def _lines(found: StudyPrognosis) -> Iterator[str]:
    yield (
        f"{found.study}: {found.num_arms} arms, {found.num_seeds} seeds, {found.num_questions:,} questions"
        f"{'' if found.num_clusters is None else f' in {found.num_clusters} clusters'}, "
        f"{found.num_draws} noise seeds; about {found.device_hours:.3g} device hours{_shared(found)}"
    )
    if found.adds_seeds:
        yield (
            f"The study adds seeds up to {found.num_seeds}: below is what all of them find in one test, at their full "
            "cost. Interim analyses detect slightly less and cost less."
        )
    yield (
        f"Differences of two arms found with {found.power:.0%} power at alpha {found.alpha:g}, in points: as the only "
        f"comparison, and as one of a group of {found.largest_family} secondary claims (Holm's strictest level). "
        "The report's differ from these: they use the variance measured between a claim's arms, and the error "
        "rate of that claim."
    )
    claim = "as the primary claim" if found.has_primary else "in the group"
    wanted = f"cheapest for {100 * found.wanted:g} points {claim}"
    width = max(7, *(len(level.noise_name or "") for level in found.levels))
    yield f"{'noise':>{width}}{'alone':>8}{'group':>8}  {'SD of seeds':<27}{wanted}"
    for level in found.levels:
        found_limits = (level.detectable_alone, level.detectable_in_family)
        limits = "".join(f"{'none' if one is None else format(100 * one, '.1f'):>8}" for one in found_limits)
        between = "" if level.seed_sd_range is None else " to ".join(f"{100 * end:.1f}" for end in level.seed_sd_range)
        scatter = f"{100 * level.seed_sd:.1f} ({between or level.variances_from})"
        noise = level.noise_name or f"{level.noise_level:.0%}"
        yield f"{noise:>{width}}{limits}  {scatter:<27}{_split(level)}"
    if any(level.seed_sd_range for level in found.levels):
        yield "In brackets: 80 % intervals of what the results say about seeds, and the numbers of seeds at their ends."
    if found.num_seeds < 2:
        yield "With one seed per arm no difference of arms can be shown."


def _shared(found: StudyPrognosis) -> str:
    number = found.devices_per_engine
    return f", evaluations on {number} devices per worker" if number > 1 else ""


def _seeds_range(level: PlannedLevel) -> str:
    if level.seeds_range is None:
        return ""
    low, high = level.seeds_range
    return f" ({low} to {'more than 64' if high is None else high})"


def _split(level: PlannedLevel) -> str:
    if level.cheapest is None:
        return "none of those tried (up to 64 seeds on these questions)"
    split = level.cheapest
    return (
        f"{split['num_seeds']:.0f} seeds{_seeds_range(level)}, {split['num_questions']:,.0f} questions, "
        f"{split['num_draws']:.0f} noise seeds: {split['device_hours']:.3g} h"
    )
