"""Shared by all rules: the validated study, wildcard constraints, paths, job parameters and the lock of the study."""

import sys

from snakemake.utils import validate

from aqnpipe.cli.check import announcement
from aqnpipe.config.analysis import PRETRAINED
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.study import load_study
from aqnpipe.errors import EXIT_USER_ERROR, AqnpipeError
from aqnpipe.artifacts.provenance import code_digest
from aqnpipe.runtime.study_lock import hold_study, recover_study

STUDY_FILE = ", ".join(map(str, workflow.overwrite_configfiles)) or "config/config.yaml"

try:
    STUDY = load_study(config, source=STUDY_FILE)
except AqnpipeError as error:
    print(f"ERROR: {error}", file=sys.stderr)
    sys.exit(EXIT_USER_ERROR)

validate(config, "../../config/schema.json", set_default=False)

PLAN = StudyPlan(STUDY)
RESULTS = PLAN.results

# This must run before Snakemake reads its locks and file times, because a killed Snakemake leaves its locks behind.
if workflow.is_main_process and not workflow.output_settings.dryrun:
    try:
        WORKING = recover_study(RESULTS)
    except AqnpipeError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    if WORKING:
        print(WORKING, file=sys.stderr)


# Snakemake does not acquire its locks atomically, so two processes that start together may both get here.
onstart:
    if workflow.is_main_process:
        try:
            hold_study(RESULTS)
        except AqnpipeError as error:
            print(f"ERROR: {error}", file=sys.stderr)
            sys.exit(EXIT_USER_ERROR)


# Printed once, before a large study and in its dry run. Every job reads this file again and must print nothing.
if workflow.is_main_process and (COST := announcement(PLAN)):
    print(f"{STUDY_FILE}: {COST}", file=sys.stderr)


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
    model="|".join(STUDY.config.models),
    machine="|".join(STUDY.config.machines),
    arm="|".join([*STUDY.arms, PRETRAINED]),
    seed=r"\d+",
    step=r"\d+",
    split="train|test",
    strategy="[a-z_]+",
