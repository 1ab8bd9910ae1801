"""`aqnpipe check`: validate a study, say what it would run and what that would cost, before anything runs."""

from pathlib import Path
from typing import Annotated

import typer

from aqnpipe.cli.cost_estimate import A100, Assumptions, Estimate, Rates, default_rates, estimate_study
from aqnpipe.config.base import FrozenModel
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.study import load_study_file
from aqnpipe.errors import ConfigError

LARGE_STUDY_HOURS = 4.0
"""Device hours from which the workflow says what a study is estimated to cost before it starts."""


class CheckedStudy(FrozenModel):
    """What `aqnpipe check --json` prints; without an estimate `missing` says what has to be stated for one."""

    study: str
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    num_runs: int
    num_steps: int
    checkpoint_steps: tuple[int, ...]
    num_comparisons: int
    jobs: dict[str, int]
    estimate: Estimate | None
    missing: str | None


def check(
    study: Annotated[Path, typer.Argument(help="study file, described in config/README.md")],
    tflops: Annotated[
        float | None, typer.Option(min=0.001, help="peak of one device in TFLOP/s; default: an A100, or a CPU core")
    ] = None,
    training_utilization: Annotated[
        float | None, typer.Option(min=0.001, max=1, help="share of the peak that training passes reach")
    ] = None,
    generation_utilization: Annotated[
        float | None, typer.Option(min=0.001, max=1, help="share of the peak that generation reaches")
    ] = None,
    prompt_tokens: Annotated[float | None, typer.Option(min=1, help="mean length of a prompt")] = None,
    response_tokens: Annotated[
        float | None, typer.Option(min=1, help="mean length of a response; default: the longest allowed")
    ] = None,
    parameters: Annotated[
        list[str] | None, typer.Option(help="size of a hub model that is not known here, as base=3.1e9")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
) -> None:
    """Validate a study file and the arms it names; say what it would run and, as an estimate, what that costs."""
    plan = StudyPlan(load_study_file(study))
    given = Assumptions(
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        parameters=_sizes(parameters or [], plan),
        rates=_rates(plan, tflops, training_utilization, generation_utilization),
    )
    checked = check_study(plan, given)
    if json:
        typer.echo(checked.model_dump_json(indent=2))
        return
    typer.echo("\n".join([_what_runs(study, plan), *_lines(checked)]))


def check_study(plan: StudyPlan, assumptions: Assumptions) -> CheckedStudy:
    """Return what a study would run, and the estimate or what is missing for it."""
    try:
        estimate, missing = estimate_study(plan, assumptions), None
    except ConfigError as error:
        estimate, missing = None, str(error)
    return CheckedStudy(
        study=plan.study.config.study,
        arms=plan.study.config.arms,
        seeds=plan.study.config.seeds,
        num_runs=len(plan.runs()),
        num_steps=plan.num_steps,
        checkpoint_steps=tuple(plan.checkpoint_steps),
        num_comparisons=len(plan.study.comparisons()),
        jobs=plan.jobs(),
        estimate=estimate,
        missing=missing,
    )


def announcement(plan: StudyPlan) -> str | None:
    """Return one line on the cost of a large study, None for a small one; for the workflow to say before it starts."""
    checked = check_study(plan, Assumptions())
    if checked.estimate is None:
        return f"estimated cost: unknown, {checked.missing}"
    if checked.estimate.device_hours < LARGE_STUDY_HOURS:
        return None
    return f"{_summary(checked.estimate)} (aqnpipe check says from what)"


def _sizes(parameters: list[str], plan: StudyPlan) -> dict[str, float]:
    sizes = {}
    for one in parameters:
        role, _, text = one.partition("=")
        if role not in plan.study.config.models:
            raise ConfigError(f"--parameters {one}: expected ROLE=NUMBER, roles {', '.join(plan.study.config.models)}")
        try:
            sizes[role] = float(text)
        except ValueError as error:
            raise ConfigError(f"--parameters {one}: {text!r} is no number") from error
        if not 0 < sizes[role] < float("inf"):
            raise ConfigError(f"--parameters {one}: expected a number of parameters above 0")
    return sizes


def _rates(plan: StudyPlan, tflops: float | None, training: float | None, generation: float | None) -> Rates | None:
    """Return the default rates with what was given, None if nothing was. A peak of one's own is not of a CPU core."""
    given = {"training_utilization": training, "generation_utilization": generation}
    changes = {key: value for key, value in given.items() if value is not None}
    if tflops is not None:
        return A100.model_copy(update={"device": f"{tflops:g}-TFLOP/s device", "tflops": tflops, **changes})
    return default_rates(plan).model_copy(update=changes) if changes else None


def _what_runs(study: Path, plan: StudyPlan) -> str:
    config = plan.study.config
    seeds = ", ".join(map(str, config.seeds))
    return (
        f"{study}: valid. {len(plan.runs())} runs ({', '.join(config.arms)}; seeds {seeds}) of {plan.num_steps} steps, "
        f"{plan.num_evaluations} evaluations, {len(plan.diagnoses())} diagnoses, "
        f"{len(config.loss_studies)} loss studies, {len(plan.study.comparisons())} comparisons; "
        f"report in {plan.results}/report.html"
    )


def _lines(checked: CheckedStudy) -> list[str]:
    jobs = ", ".join(f"{rule} {count}" for rule, count in checked.jobs.items())
    lines = [f"jobs: {jobs}; {sum(checked.jobs.values())} in all"]
    if checked.estimate is None:
        return [*lines, f"no estimate of the cost: {checked.missing}"]
    estimate = checked.estimate
    return [
        *lines,
        _summary(estimate),
        *(
            f"  {cost.phase:<13} {cost.tokens:>9.3g} tokens  {cost.flops:>9.3g} FLOP  {cost.device_hours:>9.3g} h"
            for cost in estimate.phases
        ),
        f"  from: {_sources(estimate)}",
        f"  not counted: {', '.join(estimate.not_counted)}",
    ]


def _summary(estimate: Estimate) -> str:
    working = f", and {estimate.working_gigabytes:,.3g} GB for each run at work" if estimate.working_gigabytes else ""
    return (
        f"estimated cost: {estimate.device_hours:,.3g} {estimate.rates.device} hours, {estimate.flops:.3g} FLOP, "
        f"{estimate.generated_tokens:.3g} tokens generated; "
        f"checkpoints {estimate.checkpoint_gigabytes:,.3g} GB{working}"
    )


def _sources(estimate: Estimate) -> str:
    sizes = ", ".join(f"{role} {count / 1e6:,.4g} million parameters" for role, count in estimate.parameters.items())
    rates = estimate.rates
    start = f", {rates.seconds_per_job:g} s to start a job" if rates.seconds_per_job else ""
    return (
        f"{sizes}; {'; '.join(estimate.assumed)}; {rates.device} with a peak of {rates.tflops:g} TFLOP/s, of which "
        f"training passes are assumed to reach {rates.training_utilization:.0%} and generation "
        f"{rates.generation_utilization:.0%}{start}"
    )
