"""Adapter: checkpoint look."""

from pathlib import Path

from aqnpipe.artifacts.comparisons import LookDesign
from aqnpipe.comparison.look_states import plan_after, read_looks
from aqnpipe.comparison.looks import take_look
from aqnpipe.comparison.stage import existing_evaluations
from aqnpipe.config.plan import plan_of
from aqnpipe.runtime.jobs import logged_job

with logged_job(Path(snakemake.log[0])) as say:
    study = plan_of(snakemake.params.study).study
    earlier = read_looks(study.config.results_dir, int(snakemake.wildcards.look) - 1)
    plan = plan_after(study, earlier)
    design = LookDesign.model_validate(snakemake.params.design)
    record = take_look(plan.study, design, earlier, existing_evaluations(plan))
    now = [claim for claim in record.claims if claim.look == record.look]
    ended = [f"{claim.comparison_id} {claim.state}" for claim in now if claim.state != "open"]
    num_open = len(now) - len(ended)
    say(f"look {record.look}, {record.seeds} seeds: {', '.join(ended) or 'no claim'} ended, {num_open} open")
