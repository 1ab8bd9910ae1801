"""`aqnpipe check`: validate a study, list its jobs and estimate their cost before anything runs.

`aqnpipe plan`: which differences it can find, what it costs, and the cheapest split for a wanted difference.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import Field

from aqnpipe.cli.cost_estimate import (
    A100,
    Assumptions,
    Estimate,
    Rates,
    default_rates,
    estimate_study,
    mean_prompt_tokens,
)
from aqnpipe.cli.memory_estimate import DEVICE_GIGABYTES, evaluation_memory, training_memory
from aqnpipe.cli.options import StudyArgument, TrustCode
from aqnpipe.cli.profile_file import device_problem, shards_problem
from aqnpipe.cli.study import open_study
from aqnpipe.config.base import FrozenModel, key_values
from aqnpipe.config.dataset import GeneratedDataset, LocalDataset
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.study import StudyConfig
from aqnpipe.config.yaml_file import typed_scalars, validated
from aqnpipe.errors import ConfigError, DataError

if TYPE_CHECKING:
    from aqnpipe.statistics.arrays import FloatArray
    from aqnpipe.statistics.clusters import Clusters
    from aqnpipe.statistics.planning import Pilot


_SHOWN_NAMES = 20
LARGE_STUDY_HOURS = 4.0
"""Device hours from which the workflow prints the estimated cost of a study before it starts."""


def check(
    study: StudyArgument,
    tflops: Annotated[
        float | None,
        typer.Option(min=0.001, help="peak rate of one device in TFLOP/s; default: that of an A100 or a CPU core"),
    ] = None,
    training_utilization: Annotated[
        float | None, typer.Option(min=0.001, max=1, help="share of the peak rate reached in training")
    ] = None,
    generation_utilization: Annotated[
        float | None, typer.Option(min=0.001, max=1, help="share of the peak rate reached in generation")
    ] = None,
    prompt_tokens: Annotated[float | None, typer.Option(min=1, help="mean length of a prompt in tokens")] = None,
    response_tokens: Annotated[
        float | None, typer.Option(min=1, help="mean length of a response in tokens; default: the limit")
    ] = None,
    parameters: Annotated[
        list[str] | None, typer.Option(help="number of parameters of a hub model, for example base=3.1e9")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(min=0.1, help="memory of one device in GB; default: 80 for cuda, 64 for npu")
    ] = None,
    trust_code: TrustCode = False,
) -> None:
    """Validate a study file and its arms, list its jobs and estimate the cost. If it does not fit, exit with 2."""
    plan = open_study([study], trust_code=trust_code)
    sizes: dict[str, float] = {}
    if parameters:
        named = key_values("--parameters", ",".join(parameters), plan.study.config.models)
        sizes = validated(Assumptions, {"parameters": typed_scalars(named)}, "--parameters").parameters
    rates = _rates(plan, tflops, training_utilization, generation_utilization)
    given = Assumptions(prompt_tokens=prompt_tokens, response_tokens=response_tokens, parameters=sizes, rates=rates)
    # A model that does not fit is refused before anything is printed.
    lines = [f"{study}: valid. {_summary(plan)}", *_costs(plan, given), *_memory(plan, memory, given)]
    for line in (*lines, *_devices(plan)):
        typer.echo(line)


def _devices(plan: StudyPlan) -> Iterator[str]:
    """Yield why this machine cannot run the jobs, and a line per further kind of device with its machines and rules."""
    requested, shards = plan.study.config.device, plan.study.config.generation.tensor_parallel
    if problem := device_problem(requested) or shards_problem(requested, shards):
        yield f"this machine cannot run its jobs: {problem}"
    for kind, rules in plan.rules_by_kind().items():
        if kind is None:
            continue
        here, sharing = "", shards_problem(kind, shards) if kind in plan.evaluated_by_kind() else None
        if problem := device_problem(kind):
            here = f"; not on this machine: {problem.removeprefix('device: ')}"
        elif sharing:
            here = f"; its evaluations not on this machine: {sharing}"
        yield f"on {kind}: {', '.join(rules)} of {', '.join(plan.machines_on(kind))}{here}"


def costs_of(plan: StudyPlan, assumptions: Assumptions) -> tuple[Estimate, Estimate | None]:
    """Return the estimated cost of a study, and of all seeds that it may add; ConfigError as of `estimate_study`.

    Where seeds are added, the first cost is of those that start.
    """
    rule = plan.study.adaptive_seeds
    whole = None if rule is None else estimate_study(StudyPlan(plan.study.with_seeds(rule.max)), assumptions)
    return estimate_study(plan, assumptions), whole


def _memory(plan: StudyPlan, gigabytes: float | None, assumptions: Assumptions) -> list[str]:
    """Return a line on the memory of a device, none for a CPU; ConfigError if a model does not fit."""
    requested = plan.study.config.device
    available = gigabytes or DEVICE_GIGABYTES.get(requested)
    if available is None:
        return []
    named = {"cuda": "an A100 80 GB", "npu": "an Ascend 910C"}
    device = named[requested] if gigabytes is None else "the given device"
    prompt, source = mean_prompt_tokens(plan, assumptions)
    parts = [
        *training_memory(plan, device, available, prompt, assumptions.parameters),
        *evaluation_memory(plan, device, available, prompt, assumptions.parameters),
    ]
    return [f"memory of a device: {'; '.join(parts)}; assumed: {source}, responses at their limit"] if parts else []


def announcement(plan: StudyPlan) -> str | None:
    """Return a line on the cost of a large study, which the workflow prints before it starts; None for a small one."""
    try:
        estimate, most = costs_of(plan, Assumptions())
    except ConfigError as error:
        return f"estimated cost: unknown, {error}"
    shown = most or estimate
    if shown.device_hours < LARGE_STUDY_HOURS:
        return None
    return (
        f"estimated cost: {'at most ' if most else ''}{shown.device_hours:,.3g} {shown.rates.device} hours "
        f"and {shown.disk_gigabytes:,.3g} GB of disk (`aqnpipe check` prints what this assumes)"
    )


def _rates(plan: StudyPlan, tflops: float | None, training: float | None, generation: float | None) -> Rates | None:
    """Return the default rates with the given changes; None if there are none. A given peak replaces a CPU core's."""
    given = {"training_utilization": training, "generation_utilization": generation}
    changes = {key: value for key, value in given.items() if value is not None}
    if tflops is not None:
        return A100.model_copy(update={"device": f"{tflops:g}-TFLOP/s device", "tflops": tflops, **changes})
    return default_rates(plan).model_copy(update=changes) if changes else None


def _some(names: Sequence[object]) -> str:
    """Return names on one line, of very many the first ones and the number of the others."""
    shown = ", ".join(map(str, names[:_SHOWN_NAMES]))
    return shown if len(names) <= _SHOWN_NAMES else f"{shown} and {len(names) - _SHOWN_NAMES:,} more"


def _summary(plan: StudyPlan) -> str:
    config, comparisons = plan.study.config, len(plan.study.comparisons())
    if not plan.study.has_training:
        levels = ", ".join(f"{level:g}" for level in config.evaluation.noise_levels)
        return (
            f"{plan.num_evaluations} checkpoints ({_some(config.arms)}), each at noise levels {levels}, {comparisons} "
            f"comparisons; report in {plan.results}/report.html"
        )
    rule, seeds, runs = plan.study.adaptive_seeds, _some(plan.study.seeds), f"{len(plan.runs())} runs"
    if rule is not None:
        runs += f" before the first interim analysis, at most {rule.max * len(config.arms)} in all"
        seeds += f", then {rule.step} more at a time up to {rule.max} for arms of open claims"
    return (
        f"{runs} ({_some(config.arms)}; seeds {seeds}) of {plan.num_steps} steps, {plan.num_evaluations} evaluations, "
        f"{len(plan.diagnoses())} diagnoses, {len(config.loss_studies)} loss studies, {comparisons} comparisons; "
        f"report in {plan.results}/report.html"
    )


def _costs(plan: StudyPlan, given: Assumptions) -> Iterator[str]:
    """Yield the jobs, and a line each on time, device hours and disk, with what it assumes."""
    counts, shards = plan.jobs(), plan.study.config.generation.tensor_parallel
    jobs = ", ".join(f"{rule} {count}" for rule, count in counts.items())
    yield f"jobs: {jobs}; {sum(counts.values())} in all"
    if shards > 1:
        yield f"each evaluation: {shards} devices per worker, which share every layer"
    try:
        estimate, most = costs_of(plan, given)
    except ConfigError as error:
        yield f"no estimate of the cost: {error}"
        return
    rates = estimate.rates
    start = f", {rates.seconds_per_job:g} s to start each job" if rates.seconds_per_job else ""
    more = "" if most is None else f", at most {most.device_hours:,.3g} if all seeds are added"
    space = "" if most is None else f", at most {most.disk_gigabytes:,.3g} GB if all seeds are added"
    yield (
        f"time: {estimate.device_hours / estimate.num_devices:,.3g} h on {estimate.num_devices} {rates.device}s, all "
        "of them busy; on others in proportion"
    )
    yield (
        f"device hours: {estimate.device_hours:,.3g} of {rates.device}{more}; assumed: {estimate.assumed}, training "
        f"at {rates.training_utilization:.0%} and generation at {rates.generation_utilization:.0%} of "
        f"{rates.tflops:g} TFLOP/s{start}; not counted: {', '.join(estimate.not_counted)}"
    )
    yield (
        f"disk: {estimate.disk_gigabytes:,.4g} GB{space}, of which {estimate.run_gigabytes:,.3g} GB for each active "
        f"run (resume points, and checkpoints that are not kept); assumed: keep {plan.study.config.keep}, one run at a "
        "time; not counted: responses, receipts and logs"
    )


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
    study: StudyArgument,
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
    clusters = _clusters(config, num_questions)
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

        most_questions = config.dataset.num_test or num_questions
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


def _clusters(config: StudyConfig, num_questions: int) -> "Clusters | None":
    """Return the clusters of a study's test questions; None if they have none, or must be downloaded first."""
    from aqnpipe.data.loader import load_problems
    from aqnpipe.statistics.clusters import Clusters

    if config.statistics.unit == "batch":
        return Clusters.of([number // config.evaluation.batch_size for number in range(num_questions)])
    if not isinstance(config.dataset, GeneratedDataset | LocalDataset):
        return None
    problems = load_problems(config.dataset, "test").head(num_questions)
    return Clusters.of(problems["cluster"].to_list()) if "cluster" in problems.columns else None


def _variances(results: Path, scorer: str, alpha: float) -> "dict[float, Pilot]":
    """Return the variances of pairs of arms by noise level, after the last step, from a results folder."""
    from aqnpipe.artifacts.evaluations import last_evaluations
    from aqnpipe.comparison.evaluations import EvaluationInput, load_evaluations
    from aqnpipe.statistics.planning import pilot_of

    loaded = load_evaluations((EvaluationInput(**vars(one)) for one in last_evaluations(results)), scorer, alpha)
    scores: defaultdict[float, defaultdict[tuple[str, str], dict[int, FloatArray]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for (model, arm, seed, _), one in loaded.items():
        for level, found in one.levels.items():
            scores[level][model, arm][seed] = found.correct
    clusters = next((found.clusters for one in loaded.values() for found in one.levels.values()), None)
    pilots = {}
    for level, arms in sorted(scores.items()):
        pairs = [(arms[one], arms[other]) for one, other in combinations(arms, 2) if one[0] == other[0]]
        tables = [_on_common_seeds(*pair) for pair in pairs]
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
    clusters = "" if found.num_clusters is None else f" in {found.num_clusters} clusters"
    engines = found.devices_per_engine
    yield (
        f"{found.study}: {found.num_arms} arms, {found.num_seeds} seeds, {found.num_questions:,} questions{clusters}, "
        f"{found.num_draws} noise seeds; about {found.device_hours:.3g} device hours"
        + (f", evaluations on {engines} devices per worker" if engines > 1 else "")
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
    width = max(7, *(len(level.noise_name or "") for level in found.levels))
    wanted = f"cheapest for {100 * found.wanted:g} points {claim}"
    yield f"{'noise':>{width}}{'alone':>8}{'group':>8}  {'SD of seeds':<27}{wanted}"
    yield from (_level_line(level, width) for level in found.levels)
    if any(level.seed_sd_range for level in found.levels):
        yield "In brackets: 80 % intervals of what the results say about seeds, and the numbers of seeds at their ends."
    if found.num_seeds < 2:
        yield "With one seed per arm no difference of arms can be shown."


def _level_line(level: PlannedLevel, width: int) -> str:
    found_limits = (level.detectable_alone, level.detectable_in_family)
    limits = "".join(f"{'none' if one is None else format(100 * one, '.1f'):>8}" for one in found_limits)
    between = "" if level.seed_sd_range is None else " to ".join(f"{100 * end:.1f}" for end in level.seed_sd_range)
    scatter = f"{100 * level.seed_sd:.1f} ({between or level.variances_from})"
    split, seeds = "none of those tried (up to 64 seeds on these questions)", ""
    if level.seeds_range is not None:
        seeds = f" ({level.seeds_range[0]} to {level.seeds_range[1] or 'more than 64'})"
    if found := level.cheapest:
        split = (
            f"{found['num_seeds']:.0f} seeds{seeds}, {found['num_questions']:,.0f} questions, "
            f"{found['num_draws']:.0f} noise seeds: {found['device_hours']:.3g} h"
        )
    return f"{level.noise_name or f'{level.noise_level:.0%}':>{width}}{limits}  {scatter:<27}{split}"
