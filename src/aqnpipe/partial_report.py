"""A report on an unfinished study: both stages at the end of the pipeline, run on whatever exists."""

from collections.abc import Iterator
from pathlib import Path

from aqnpipe.artifacts.files import write_json
from aqnpipe.config.plan import StudyPlan
from aqnpipe.report.inputs import inputs_of
from aqnpipe.report.stage import ReportOutputs, build_report
from aqnpipe.statistics.audit import audit_file
from aqnpipe.statistics.losses import compare_losses, existing_losses
from aqnpipe.statistics.stage import ComparisonOutputs, compare, existing_evaluations


def report_on_what_exists(plan: StudyPlan) -> Iterator[str]:
    """Write what rules compare, audit and report write, from the evaluations that exist; yield what was done.

    Comparisons that miss an evaluation are invalid and say so. Snakemake redoes all of it once the study is complete.
    """
    results = Path(plan.results)
    evaluations = existing_evaluations(plan)
    yield f"compare: {len(evaluations)} of {plan.num_evaluations} evaluations exist"
    compare(plan.study, evaluations, ComparisonOutputs.in_folder(results))
    published = plan.study.config.statistics.published
    if published is not None:
        write_json(results / "audit.json", audit_file(Path(published)))
    for inputs, claims in existing_losses(plan):
        compare_losses(inputs, plan.study.config.statistics, claims)
    outputs = ReportOutputs.in_folder(results)
    build_report(plan.study, inputs_of(plan), outputs)
    yield f"report: {outputs.html}"
