"""`aqnpipe check`: validate a study, list its jobs and estimate their cost before anything runs."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

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
from aqnpipe.cli.options import TrustCode
from aqnpipe.cli.profile_file import device_problem, shards_problem
from aqnpipe.cli.study import open_study
from aqnpipe.config.base import key_values
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.training import Keep
from aqnpipe.config.yaml_file import typed_scalars, validated
from aqnpipe.errors import ConfigError

_SHOWN_NAMES = 20
LARGE_STUDY_HOURS = 4.0
"""Device hours from which the workflow prints the estimated cost of a study before it starts."""


class Costs(NamedTuple):
    """The estimated cost of a study, or the information that an estimate needs as `missing`.

    at_most: that of all seeds that may be added; `estimate` is then of the seeds that start.
    """

    estimate: Estimate | None
    at_most: Estimate | None
    missing: str | None


def check(
    study: Annotated[Path, typer.Argument(help="study file, described in config/README.md")],
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
    given = Assumptions(
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        parameters=_sizes(parameters or [], plan),
        rates=_rates(plan, tflops, training_utilization, generation_utilization),
    )
    lines = [_summary_of_jobs(study, plan), *_lines(plan, costs_of(plan, given)), *_memory(plan, memory, given)]
    typer.echo("\n".join(lines))
    requested, shards = plan.study.config.device, plan.study.config.generation.tensor_parallel
    if problem := device_problem(requested) or shards_problem(requested, shards):
        typer.echo(f"this machine cannot run its jobs: {problem}")
    for line in _other_devices(plan):
        typer.echo(line)


def _other_devices(plan: StudyPlan) -> Iterator[str]:
    """Yield a line per further kind of device: its machines and rules, and why this machine cannot run them."""
    for kind, rules in plan.rules_by_kind().items():
        if kind is None:
            continue
        problem = device_problem(kind)
        here = "" if problem is None else f"; not on this machine: {problem.removeprefix('device: ')}"
        if problem is None and kind in plan.evaluated_by_kind():
            sharing = shards_problem(kind, plan.study.config.generation.tensor_parallel)
            here = "" if sharing is None else f"; its evaluations not on this machine: {sharing}"
        yield f"on {kind}: {', '.join(rules)} of {', '.join(plan.machines_on(kind))}{here}"


def costs_of(plan: StudyPlan, assumptions: Assumptions) -> Costs:
    """Return the estimated cost of a study, or the information that an estimate needs."""
    rule = plan.study.adaptive_seeds
    # Of a study that has added all seeds that it may add, in all arms.
    whole = None if rule is None else StudyPlan(plan.study.with_seeds(rule.max))
    try:
        at_most = None if whole is None else estimate_study(whole, assumptions)
        return Costs(estimate_study(plan, assumptions), at_most, None)
    except ConfigError as error:
        return Costs(None, None, str(error))


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
    costs = costs_of(plan, Assumptions())
    shown = costs.at_most or costs.estimate
    if shown is None:
        return f"estimated cost: unknown, {costs.missing}"
    if shown.device_hours < LARGE_STUDY_HOURS:
        return None
    return (
        f"estimated cost: {'at most ' if costs.at_most else ''}{shown.device_hours:,.3g} {shown.rates.device} hours "
        f"and {shown.disk_gigabytes:,.3g} GB of disk (`aqnpipe check` prints what this assumes)"
    )


def _sizes(parameters: list[str], plan: StudyPlan) -> dict[str, float]:
    """Return the sizes of models by role; ConfigError for an unknown role, and for what is no number above 0."""
    given = key_values("--parameters", ",".join(parameters), plan.study.config.models) if parameters else {}
    return validated(Assumptions, {"parameters": typed_scalars(given)}, "--parameters").parameters


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


def _summary_of_jobs(study: Path, plan: StudyPlan) -> str:
    config = plan.study.config
    seeds = _some(plan.study.seeds)
    if not plan.study.has_training:
        return (
            f"{study}: valid. {plan.num_evaluations} checkpoints ({_some(config.arms)}), each at noise levels "
            f"{', '.join(f'{level:g}' for level in config.evaluation.noise_levels)}, "
            f"{len(plan.study.comparisons())} comparisons; report in {plan.results}/report.html"
        )
    rule = plan.study.adaptive_seeds
    runs = f"{len(plan.runs())} runs"
    if rule is not None:
        runs += f" before the first interim analysis, at most {rule.max * len(config.arms)} in all"
        seeds += f", then {rule.step} more at a time up to {rule.max} for arms of open claims"
    return (
        f"{study}: valid. {runs} ({_some(config.arms)}; seeds {seeds}) of {plan.num_steps} steps, "
        f"{plan.num_evaluations} evaluations, {len(plan.diagnoses())} diagnoses, "
        f"{len(config.loss_studies)} loss studies, {len(plan.study.comparisons())} comparisons; "
        f"report in {plan.results}/report.html"
    )


def _lines(plan: StudyPlan, costs: Costs) -> list[str]:
    counts, shards = plan.jobs(), plan.study.config.generation.tensor_parallel
    jobs = ", ".join(f"{rule} {count}" for rule, count in counts.items())
    lines = [f"jobs: {jobs}; {sum(counts.values())} in all"]
    if shards > 1:
        lines.append(f"each evaluation: {shards} devices per worker, which share every layer")
    if costs.estimate is None:
        return [*lines, f"no estimate of the cost: {costs.missing}"]
    return [*lines, *_estimate_lines(costs.estimate, costs.at_most, plan.study.config.keep)]


def _estimate_lines(estimate: Estimate, at_most: Estimate | None, keep: Keep) -> list[str]:
    """Return a line each on time, device hours and disk, with what it assumes."""
    rates = estimate.rates
    start = f", {rates.seconds_per_job:g} s to start each job" if rates.seconds_per_job else ""
    more = "" if at_most is None else f", at most {at_most.device_hours:,.3g} if all seeds are added"
    space = "" if at_most is None else f", at most {at_most.disk_gigabytes:,.3g} GB if all seeds are added"
    return [
        f"time: {estimate.device_hours / estimate.num_devices:,.3g} h on {estimate.num_devices} {rates.device}s, all "
        "of them busy; on others in proportion",
        f"device hours: {estimate.device_hours:,.3g} of {rates.device}{more}; assumed: {estimate.assumed}, training "
        f"at {rates.training_utilization:.0%} and generation at {rates.generation_utilization:.0%} of "
        f"{rates.tflops:g} TFLOP/s{start}; not counted: {', '.join(estimate.not_counted)}",
        f"disk: {estimate.disk_gigabytes:,.4g} GB{space}, of which {estimate.run_gigabytes:,.3g} GB for each active "
        f"run (resume points, and checkpoints that are not kept); assumed: keep {keep}, one run at a time; not "
        "counted: responses, receipts and logs",
    ]
