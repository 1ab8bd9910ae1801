"""A report on an unfinished study: both stages at the end of the pipeline, run on whatever exists."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.study import load_study_file


def report(study: Annotated[Path, typer.Argument(help="study file, described in config/README.md")]) -> None:
    """Compare and report on whatever results of a study exist, as after `snakemake --keep-going`."""
    for line in report_on_what_exists(StudyPlan(load_study_file(study))):
        typer.echo(line)


def report_on_what_exists(plan: StudyPlan) -> Iterator[str]:
    """Write what rules compare, audit and report write, from the evaluations that exist; yield what was done.

    Comparisons that miss an evaluation are invalid and say so. Snakemake redoes all of it once the study is complete.
    """
    # Slow to import, so only here: every command imports this module.
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
