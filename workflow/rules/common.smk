"""Shared by all rules: the validated study, wildcard constraints, paths, job parameters and the lock of the study."""

import atexit
import gc
import os
import shlex
import shutil
import sys
from functools import cache, partial
from pathlib import Path

import snakemake.workflow as snakemake_workflow
from snakemake import sourcecache

from aqnpipe.artifacts.files import remove_staged
from aqnpipe.artifacts.provenance import code_digest
from aqnpipe.artifacts.runs import why_weights_are_gone
from aqnpipe.cli.check import announcement
from aqnpipe.cli.profile_file import device_problem, shards_problem, shards_without_devices, workers_problem
from aqnpipe.cli.memory_estimate import declared_megabytes
from aqnpipe.cli.results import PARTIAL
from aqnpipe.cli.study import open_study
from aqnpipe.comparison.look_states import progress, register_design, registered_design
from aqnpipe.config.analysis import PRETRAINED
from aqnpipe.config.base import rule_on
from aqnpipe.config.study import shown_path
from aqnpipe.config.validation_messages import one_of
from aqnpipe.errors import EXIT_USER_ERROR, AqnpipeError, ConfigError, DeviceError, ModelError
from aqnpipe.runtime.device_allocation import computes_on_cpu
from aqnpipe.runtime.job_records import JobRecords
from aqnpipe.runtime.locks import remove_scratch
from aqnpipe.runtime.locks import hold_study, recover_study
from aqnpipe.runtime.warm_start import warm_interpreter

# Snakemake keeps its jobs until it ends. Searching them for garbage again and again took a sixth of the processor time of a
# plan of 2,000 runs (benchmarks/README.md).
gc.freeze()
gc.set_threshold(500_000, 50, 100)

# Snakemake parses the path of a rule's script three times for each job, and makes a class each time.
sourcecache.parse_uri = cache(sourcecache.parse_uri)

EVALUATION_RULES = ("evaluate", "evaluate_run")
MANY_EVALUATIONS = 5000  # with more jobs than these a line names the faster way
MANY_ARMS = 100


def say(line):
    """Write a line at once: `print` writes its end separately, and Snakemake's logger is a thread of its own."""
    sys.stderr.write(f"{line}\n")


def refuse(error: AqnpipeError):
    """End Snakemake with the one line of a user-correctable error."""
    say(f"ERROR: {error}")
    sys.exit(EXIT_USER_ERROR)


# Not `configfile:`, because Snakemake's reader drops duplicate keys and reads 1e-6 as text. A study file on the command
# line stands instead of the default one, `--config` changes single keys.
STUDY_FILES = list(workflow.overwrite_configfiles) or [Path("config/config.yaml")]
STUDY_FILE = ", ".join(str(shown_path(path)) for path in STUDY_FILES)

try:
    # The main process has refused code that is not trusted, before any job starts.
    IS_MAIN = workflow.is_main_process
    PLAN = open_study(STUDY_FILES, workflow.config_settings.config, look_outside=IS_MAIN, trust_code=not IS_MAIN)
except AqnpipeError as error:
    refuse(error)

STUDY = PLAN.study
RESULTS = PLAN.results
memory_mb = cache(partial(declared_megabytes, PLAN))
HAS_PARITIES = bool(PLAN.all_parities())  # without them no job of thousands needs a function that finds its file

# Snakemake opens its records after it has read this file, and has no setting for others.
if workflow.is_main_process:
    snakemake_workflow.FilePersistence = partial(JobRecords, results=RESULTS)

# Of a study that adds seeds: what was fixed before its first look.
try:
    DESIGN = None if STUDY.adaptive_seeds is None else registered_design(STUDY)
    PROGRESS = None if DESIGN is None or not workflow.is_main_process else progress(STUDY)
except AqnpipeError as error:
    refuse(error)


def interpreter():
    """Return the command that runs the scripts of jobs; where all compute on this machine's CPU, it starts them warm."""
    is_run = workflow.is_main_process and not workflow.output_settings.dryrun
    if is_run and sys.platform == "linux" and workflow.local_exec and computes_on_cpu(STUDY.config.device):
        return warm_interpreter(max(PLAN.training_threads(), PLAN.evaluation_threads()))
    # Snakemake puts it into shell commands without quotes; in a folder with a space every job would fail.
    return shlex.quote(sys.executable)


sys.executable = interpreter()

# This must run before Snakemake reads its locks and file times, because a killed Snakemake leaves its locks behind.
if workflow.is_main_process and not workflow.output_settings.dryrun:
    try:
        WORKING = recover_study(RESULTS)
    except AqnpipeError as error:
        refuse(error)
    if WORKING:
        say(WORKING)


# Snakemake does not acquire its locks atomically, so two processes that start together may both get here.
onstart:
    if workflow.is_main_process:
        try:
            hold_study(RESULTS)
        except AqnpipeError as error:
            refuse(error)
        if problem := device_not_in_profile() or device_not_here() or workers_without_devices():
            refuse(DeviceError(problem))
        if gone := removed_weights_needed():
            refuse(ModelError(gone))
        if DESIGN is not None:
            register_design(RESULTS, DESIGN)


def removed_weights_needed():
    """Return why checkpoints cannot be evaluated again: their weights were removed. None if no planned job needs them.

    Asked before anything runs, because Snakemake deletes the outputs of a job, here the earlier evaluation, when it starts.
    """
    dag = workflow.dag
    needed = [job for job in dag.needrun_jobs(exclude_finished=False) if job.rule.name.startswith("evaluate")]
    gone = []
    for job in needed if STUDY.has_training else ():
        if not any(dag.needrun(other) for other in dag.dependencies[job] if other.rule.name == "train"):
            run = Path(job.input.get("model") or job.input.trained)
            folders = [run.parent / "checkpoints" / f"step{step}" for step in PLAN.checkpoint_steps]
            gone += filter(None, map(why_weights_are_gone, [run.parent] if job.input.get("model") else folders))
    return f"{gone[0]}{f' (and {len(gone) - 1} more)' if len(gone) > 1 else ''}" if gone else None


def planned_device_jobs():
    """Yield the kinds of device of the study with the start of a message about it, and the planned rules that need it.

    Only of planned jobs: of a study with several devices, each place makes what it can. None is the study's own device.
    """
    needed = {job.rule.name for job in workflow.dag.needrun_jobs(exclude_finished=False)}
    for kind, rules in PLAN.rules_by_kind().items():
        planned = {rule: base for rule, base in rules.items() if rule in needed}
        if planned:
            key = "" if kind is None else f"machines.{'/'.join(PLAN.machines_on(kind))}.device: "
            yield kind, f"{STUDY_FILE}: {key}", planned


def device_not_in_profile():
    """Return which planned jobs get no device from the profile, though other jobs do; None if all get theirs."""
    for kind, where, planned in planned_device_jobs():
        missing = [rule for rule, base in planned.items() if gives_device(base) and not gives_device(rule)]
        if missing and kind is None:
            return f"{where}the profile has no device for {missing[0]}, expected in set-resources what evaluate has"
        if missing and kind != "cpu":
            return (
                f"{where}the profile has no {kind} for {missing[0]}, expected its resources in set-resources; where "
                f"there are such devices, `--until {' '.join(planned)}` runs these jobs alone"
            )
    return None


def device_not_here():
    """Return why this machine has no device for planned jobs; None if it has, or if a cluster runs them."""
    for kind, where, planned in planned_device_jobs() if workflow.local_exec else ():
        if problem := device_problem(STUDY.config.device if kind is None else kind):
            return where + (problem if kind is None else problem.removeprefix("device: "))
        # Those of the study's own device are checked before anything is planned.
        if kind is not None and "evaluate_on_machine" in planned.values():
            if problem := shards_problem(kind, STUDY.config.generation.tensor_parallel):
                return f"{STUDY_FILE}: {problem}"
    return None


def workers_without_devices():
    """Return why planned training runs have too few devices for their workers; None if they have enough."""
    if "train" not in {job.rule.name for job in workflow.dag.needrun_jobs(exclude_finished=False)}:
        return None
    of_job = {key: value.raw for key, value in workflow.resource_settings.overwrite_resources.get("train", {}).items()}
    here = workflow.local_exec
    problem = workers_problem(STUDY.config.device, STUDY.config.training.num_workers, of_job, here=here)
    return problem and f"{STUDY_FILE}: {problem}"


def gives_device(rule):
    """Return whether the profile gives jobs of a rule devices."""
    return not {"gres", "devices"}.isdisjoint(workflow.resource_settings.overwrite_resources.get(rule, {}))


def announce_refusal():
    """Print at the end of a dry run that the run itself would be refused, and why."""
    if workflow.scheduler is None:
        return
    for problem in filter(None, (device_not_in_profile(), workers_without_devices(), removed_weights_needed())):
        say(f"ERROR: {problem}")


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
        # Imports torch and SciPy, and every start of Snakemake, of each job too, reads this file.
        from aqnpipe.report.summary import closing_lines

        for line in closing_lines(Path(RESULTS), STUDY.config.report.language, STUDY.config.evaluation.noise_names()):
            say(line)
        say(f"report: {RESULTS}/report.html")


if workflow.is_main_process:
    atexit.register(announce_refusal if workflow.output_settings.dryrun else name_report)


# Printed once, before a large study and in its dry run. Every job reads this file again and must print nothing.
if workflow.is_main_process:
    try:
        COST = announcement(PLAN)
    except AqnpipeError as error:
        refuse(error)
    if COST:
        say(f"{STUDY_FILE}: {COST}")
if PROGRESS:
    say(f"{STUDY_FILE}: {PROGRESS}")


def given(rule: str) -> str:
    """Return the resources that the profile assigns to the jobs of a rule, for their messages in a dry run."""
    requested = workflow.resource_settings.overwrite_resources.get(rule, {})
    shown = [
        name for name in ("slurm_partition", "nodes", "gres", "devices", "workers", "runtime") if name in requested
    ]
    return f" ({', '.join(f'{name} {{resources.{name}}}' for name in shown)})" if shown else ""


def workers(rule: str) -> int:
    """Return the workers per job of a rule: the resource `workers` of the profile (no result depends on it), else 1."""
    return resource(rule, "workers", 1)


def evaluation_threads(rule: str, plan=PLAN) -> int:
    """Return the threads of an evaluating job: those of the plan's evaluations for each process that computes."""
    return plan.evaluation_threads() * STUDY.config.generation.tensor_parallel * workers(rule)


def threads_on(machine):
    """Return the threads of an evaluation on a machine of `evaluation.machines`."""
    return evaluation_threads(rule_on("evaluate_on_machine", STUDY.config.other_kind(machine)), ON_MACHINE[machine])


def resource(rule, name, default):
    """Return a whole number that the profile gives as a resource of a rule, needed while the rules are read."""
    requested = workflow.resource_settings.overwrite_resources.get(rule, {})
    if name not in requested:
        return default
    found = str(requested[name].raw)
    if not found.isdecimal():
        refuse(ConfigError(f"set-resources: {rule}: {name}: found {found!r}, expected a whole number"))
    return int(found)


# Whether one job evaluates all checkpoints of a run. No result depends on it.
EVALUATES_RUNS = STUDY.has_training and bool(resource("evaluate", "whole_runs", 0))


def sharing_problem():
    """Return why no evaluating job gets the devices whose workers share every layer; None if all get theirs."""
    shards = STUDY.config.generation.tensor_parallel
    on_machines = [rule_on("evaluate_on_machine", kind) for kind in PLAN.evaluated_by_kind()]
    for name in [*EVALUATION_RULES, *on_machines] if shards > 1 else ():
        requested = workflow.resource_settings.overwrite_resources.get(name, {})
        given_to_job = {key: value.raw for key, value in requested.items()}
        # Snakemake gives a job no more of a resource than all jobs may have at once.
        if "devices" in given_to_job and "devices" in workflow.global_resources:
            given_to_job["devices"] = min(resource(name, "devices", 0), int(workflow.global_resources["devices"].raw))
        if problem := shards_without_devices(name, given_to_job, shards):
            return problem
    return shards_problem(STUDY.config.device, shards) if workflow.local_exec else None


# After hours of training the evaluations would fail.
if workflow.is_main_process and (problem := sharing_problem()):
    refuse(ConfigError(f"{STUDY_FILE}: {problem}"))

# A profile of an older version has no entry for rule evaluate_run, whose jobs would get no device.
if workflow.is_main_process and EVALUATES_RUNS:
    SINGLE, WHOLE = (set(workflow.resource_settings.overwrite_resources.get(rule, {})) for rule in EVALUATION_RULES)
    if missing := sorted(SINGLE - WHOLE - {"whole_runs"}):
        refuse(
            ConfigError(
                f"set-resources: evaluate_run: found no {', '.join(missing)}, expected the resources of evaluate"
            )
        )

if workflow.is_main_process and STUDY.has_training and not EVALUATES_RUNS and PLAN.num_evaluations > MANY_EVALUATIONS:
    say(
        f"{STUDY_FILE}: {PLAN.num_evaluations} evaluation jobs; planning takes less time with one job per run "
        "(docs/how-to/thousands-of-runs.md)"
    )


def any_of(names):
    """Return the pattern of a wildcard that is one of `names`; of none it matches nothing."""
    return "|".join(names) or "(?!)"


def arm_pattern(*, with_pretrained=True):
    """Return the pattern of the wildcard `arm`: the names, or of very many arms what all names look like.

    Snakemake searches the pattern for every file of every job, 27 microseconds each with 1,000 names.
    """
    if len(STUDY.arms) > MANY_ARMS:
        return r"[\w.-]+" if with_pretrained else rf"(?!{PRETRAINED}/)[\w.-]+"
    return "|".join([*STUDY.arms, *([PRETRAINED] if with_pretrained else [])])


def of_checkpoint(wildcards):
    """Return the wildcards of an evaluation without the machine."""
    return {name: value for name, value in wildcards.items() if name != "machine"}


def unknown_arm():
    """Return which file named on the command line is of an arm that the study does not have; None if none is.

    The pattern of very many arms matches such a file, and the input functions of its job would end in a KeyError.
    """
    known = [*STUDY.arms, PRETRAINED]
    for path in sys.argv[1:] if len(STUDY.arms) > MANY_ARMS else ():
        file = path if os.path.isabs(path) else os.path.relpath(path)
        for producer in filter(lambda each: each.is_producer(file), workflow.rules):
            arm = producer.get_wildcards(file).get("arm", PRETRAINED)
            if expected := one_of(arm, known):
                return f"{path}: found arm {arm}, expected {expected}"
    return None


wildcard_constraints:
    model="|".join(dict.fromkeys([*STUDY.config.models, *STUDY.model_roles()])),
    machine="|".join(STUDY.config.machines) or "none",
    arm=arm_pattern(),
    seed=r"\d+",
    step=r"\d+",
    look=r"\d+",
    split="train|test",
    strategy="[a-z_]+",
