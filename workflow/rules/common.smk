"""Shared by all rules: the validated study, wildcard constraints, paths, job parameters and the lock of the study."""

import atexit
import shlex
import shutil
import sys
from pathlib import Path

from aqnpipe.artifacts.files import remove_staged
from aqnpipe.artifacts.provenance import code_digest
from aqnpipe.artifacts.retention import why_weights_are_gone
from aqnpipe.cli.check import announcement
from aqnpipe.cli.front_door import device_problem, open_study, shown_path
from aqnpipe.cli.report import PARTIAL
from aqnpipe.comparison.look_states import progress, register_design, registered_design
from aqnpipe.config.analysis import PRETRAINED
from aqnpipe.errors import EXIT_USER_ERROR, AqnpipeError, DeviceError, ModelError
from aqnpipe.report.closing import closing_lines
from aqnpipe.runtime.run_lock import remove_scratch
from aqnpipe.runtime.study_lock import hold_study, recover_study

# Snakemake puts the interpreter into shell commands without quotes; in a folder with a space every job would fail.
sys.executable = shlex.quote(sys.executable)


def refuse(error: AqnpipeError):
    """End Snakemake with the one line of a user-correctable error."""
    print(f"ERROR: {error}", file=sys.stderr)
    sys.exit(EXIT_USER_ERROR)


# Not `configfile:`, because Snakemake's reader drops duplicate keys and reads 1e-6 as text. A study file on the command
# line stands instead of the default one, `--config` changes single keys.
STUDY_FILES = list(workflow.overwrite_configfiles) or [Path("config/config.yaml")]
STUDY_FILE = ", ".join(str(shown_path(path)) for path in STUDY_FILES)

try:
    PLAN = open_study(STUDY_FILES, workflow.config_settings.config, look_outside=workflow.is_main_process)
except AqnpipeError as error:
    refuse(error)

STUDY = PLAN.study
RESULTS = PLAN.results

# Of a study that adds seeds: what was fixed before its first look.
try:
    DESIGN = None if STUDY.adaptive_seeds is None else registered_design(STUDY)
    PROGRESS = None if DESIGN is None or not workflow.is_main_process else progress(STUDY)
except AqnpipeError as error:
    refuse(error)

# This must run before Snakemake reads its locks and file times, because a killed Snakemake leaves its locks behind.
if workflow.is_main_process and not workflow.output_settings.dryrun:
    try:
        WORKING = recover_study(RESULTS)
    except AqnpipeError as error:
        refuse(error)
    if WORKING:
        print(WORKING, file=sys.stderr)


# Snakemake does not acquire its locks atomically, so two processes that start together may both get here.
onstart:
    if workflow.is_main_process:
        try:
            hold_study(RESULTS)
        except AqnpipeError as error:
            refuse(error)
        problem = device_problem(STUDY.config.device) if workflow.local_exec else None
        if problem:
            refuse(DeviceError(f"{STUDY_FILE}: {problem}"))
        if gone := removed_weights_needed():
            refuse(ModelError(gone))
        if DESIGN is not None:
            register_design(RESULTS, DESIGN)


def removed_weights_needed():
    """Return why checkpoints cannot be evaluated again: their weights were removed. None if no planned job needs them.

    Asked before anything runs, because Snakemake deletes the outputs of a job, here the earlier evaluation, when it starts.
    """
    dag = workflow.dag
    needed = [job for job in dag.needrun_jobs(exclude_finished=False) if job.rule.name == "evaluate"]
    gone = []
    for job in needed if STUDY.has_training else ():
        is_trained_again = any(dag.needrun(other) for other in dag.dependencies[job] if other.rule.name == "train")
        if not is_trained_again and (reason := why_weights_are_gone(Path(job.input.model).parent)):
            gone.append(reason)
    return f"{gone[0]}{f' (and {len(gone) - 1} more)' if len(gone) > 1 else ''}" if gone else None


def announce_refusal():
    """Print at the end of a dry run that the run itself would be refused, and why."""
    if workflow.scheduler is not None and (gone := removed_weights_needed()):
        print(f"ERROR: {gone}", file=sys.stderr)


def finish() -> None:
    """Remove what only unfinished studies need."""
    remove_scratch(Path(RESULTS, "scratch"))
    remove_staged(Path(RESULTS))
    if _is_reported():
        shutil.rmtree(Path(RESULTS, PARTIAL), ignore_errors=True)


def _is_reported() -> bool:
    """Return whether the report was asked for and every job is done."""
    dag = workflow.dag
    return "report" in {job.rule.name for job in dag.jobs} and not list(dag.needrun_jobs())


def name_report() -> None:
    """Print answer and verdicts of a finished study and name its report, behind what Snakemake prints after `onsuccess`."""
    if workflow.scheduler is not None and _is_reported():
        for line in closing_lines(Path(RESULTS), STUDY.config.report.language, STUDY.config.evaluation.noise_names()):
            print(line, file=sys.stderr)
        print(f"report: {RESULTS}/report.html", file=sys.stderr)


if workflow.is_main_process:
    atexit.register(announce_refusal if workflow.output_settings.dryrun else name_report)


# Printed once, before a large study and in its dry run. Every job reads this file again and must print nothing.
if workflow.is_main_process and (COST := announcement(PLAN)):
    print(f"{STUDY_FILE}: {COST}", file=sys.stderr)
if PROGRESS:
    print(f"{STUDY_FILE}: {PROGRESS}", file=sys.stderr)


def given(rule: str) -> str:
    """Return the resources that the profile assigns to the jobs of a rule, for their messages in a dry run."""
    requested = workflow.resource_settings.overwrite_resources.get(rule, {})
    shown = [
        name for name in ("slurm_partition", "nodes", "gres", "devices", "workers", "runtime") if name in requested
    ]
    return f" ({', '.join(f'{name} {{resources.{name}}}' for name in shown)})" if shown else ""


def workers(rule: str) -> int:
    """Return the workers per job of a rule: the resource `workers` of the profile (no result depends on it), else 1."""
    requested = workflow.resource_settings.overwrite_resources.get(rule, {})
    return int(requested["workers"].raw) if "workers" in requested else 1


wildcard_constraints:
    model="|".join(dict.fromkeys([*STUDY.config.models, *STUDY.model_roles()])),
    machine="|".join(STUDY.config.machines) or "none",
    arm="|".join([*STUDY.arms, PRETRAINED]),
    seed=r"\d+",
    step=r"\d+",
    look=r"\d+",
    split="train|test",
    strategy="[a-z_]+",
