"""`aqnpipe report`: compare and report on the results of an unfinished study."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from aqnpipe.cli.options import TrustCode
from aqnpipe.cli.study import open_study
from aqnpipe.config.plan import StudyPlan
from aqnpipe.errors import ConfigError

PARTIAL = "partial"
"""Folder in the results for reports on what exists; in place of the final report they would stop the study."""


def report(
    study: Annotated[Path, typer.Argument(help="study file, described in config/README.md")],
    trust_code: TrustCode = False,
) -> None:
    """Compare and report on the existing results of a study, for example while it runs or after a failed job.

    Writes a separate folder in the results, which the study ignores.
    """
    for line in report_on_existing_results(open_study([study], look_outside=False, trust_code=trust_code)):
        typer.echo(line)


def report_on_existing_results(plan: StudyPlan) -> Iterator[str]:
    """Write the outputs of the rules compare, check_published and report from existing evaluations; yield a log.

    Comparisons without one of their evaluations are invalid. All files appear together, or none if an artifact is
    malformed (DataError).
    """
    from aqnpipe.artifacts.files import atomic_path, write_json
    from aqnpipe.comparison.look_states import plan_after, read_looks
    from aqnpipe.comparison.stage import ComparisonOutputs, compare, existing_evaluations
    from aqnpipe.loss_study.comparison import compare_losses, existing_losses
    from aqnpipe.published.check import check_published_file
    from aqnpipe.report.inputs import inputs_of
    from aqnpipe.report.stage import ReportOutputs, build_report

    looks = read_looks(plan.results) if plan.study.adaptive_seeds else []
    plan = plan_after(plan.study, looks)
    target = Path(plan.results) / PARTIAL
    evaluations = existing_evaluations(plan)
    published = plan.study.config.statistics.published
    inputs = inputs_of(plan)
    with atomic_path(target) as folder:
        folder.mkdir()
        outputs = ComparisonOutputs.in_folder(folder)
        compare(plan.study, evaluations, outputs, looks, inputs.test_problems)
        if published is not None:
            write_json(folder / "published.json", check_published_file(Path(published)))
        losses = {claims: folder / "loss_study" / claims.parent.name / claims.name for claims in inputs.loss_studies}
        for loss_inputs, claims in existing_losses(plan):
            compare_losses(loss_inputs, plan.study.config.statistics, losses[claims])
        found = replace(
            inputs,
            **vars(outputs),
            published=folder / inputs.published.name if inputs.published else None,
            loss_studies=tuple(made if made.exists() else path for path, made in losses.items()),
        )
        build_report(plan.study, found, ReportOutputs.in_folder(folder))
        _refuse_other_files(target, {path.name for path in folder.iterdir()})
    yield f"compare: {len(evaluations)} of {plan.num_evaluations} evaluations exist"
    yield f"report: {ReportOutputs.in_folder(target).html}"


def _refuse_other_files(target: Path, written: set[str]) -> None:
    """Raise ConfigError for what no such report wrote: the folder is replaced as a whole."""
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target}: found a file, expected nothing or an earlier report on what exists")
    found = {path.name for path in target.iterdir()} if target.is_dir() else set()
    for name in sorted(found - written - {"published.json", "loss_study"}):
        raise ConfigError(f"{target / name}: is of no report, and {target} is replaced; move it elsewhere")
