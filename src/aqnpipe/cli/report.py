"""`aqnpipe report`: compare and report on the results of an unfinished study."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.study import load_study_file


def report(study: Annotated[Path, typer.Argument(help="study file, described in config/README.md")]) -> None:
    """Compare and report on the existing results of a study, for example after `snakemake --keep-going`."""
    for line in report_on_existing_results(StudyPlan(load_study_file(study))):
        typer.echo(line)


def report_on_existing_results(plan: StudyPlan) -> Iterator[str]:
    """Write the outputs of the rules compare, check_published and report from existing evaluations; yield a log.

    Comparisons without one of their evaluations are invalid. Snakemake repeats these rules once the study is complete.
    """
    from aqnpipe.artifacts.files import write_json
    from aqnpipe.comparison.stage import ComparisonOutputs, compare, existing_evaluations
    from aqnpipe.loss_study.comparison import compare_losses, existing_losses
    from aqnpipe.published.check import check_published_file
    from aqnpipe.report.inputs import inputs_of
    from aqnpipe.report.stage import ReportOutputs, build_report

    results = Path(plan.results)
    evaluations = existing_evaluations(plan)
    yield f"compare: {len(evaluations)} of {plan.num_evaluations} evaluations exist"
    compare(plan.study, evaluations, ComparisonOutputs.in_folder(results))
    published = plan.study.config.statistics.published
    if published is not None:
        write_json(results / "published.json", check_published_file(Path(published)))
    for inputs, claims in existing_losses(plan):
        compare_losses(inputs, plan.study.config.statistics, claims)
    outputs = ReportOutputs.in_folder(results)
    build_report(plan.study, inputs_of(plan), outputs)
    yield f"report: {outputs.html}"
