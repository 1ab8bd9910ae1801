"""Look at the claims of a study that adds seeds, and decide which of them need more seeds.

Input: the runs and evaluations of the arms whose claims are open. Output: looks/look<N>.json. With fixed seeds there is
no look. Every look is a checkpoint: it decides which jobs come after it.
"""

from aqnpipe.comparison.look_states import next_look, plan_after, read_looks


def finished_looks(before=None):
    """Return the records of the looks before a number, or of all that the study needs; wait for those to come."""
    found = []
    while (number := next_look(STUDY, found)) is not None and number != before:
        checkpoints.look.get(look=number)
        found = read_looks(RESULTS, number)
    return found


def after_looks(files):
    """Return an input function for the files of a plan; it waits for the looks of a study that adds seeds.

    A function with fixed seeds too: every job reads these rules again, and thousands of runs have 100,000 files.
    """
    if STUDY.adaptive_seeds is None:
        return lambda wildcards: files(PLAN)
    return lambda wildcards: files(plan_after(STUDY, finished_looks()))


def params_after_looks():
    """Return the study for the jobs after the looks: with the seeds that every arm has by then."""
    if STUDY.adaptive_seeds is None:
        return PLAN.study_params()
    return lambda wildcards: plan_after(STUDY, finished_looks()).study_params()


def before_look(files):
    """Return a function that returns the files of a plan for the look of its wildcards."""
    return lambda wildcards: files(plan_after(STUDY, finished_looks(before=int(wildcards.look))))


def look_files(looks):
    """Return the files of the records of looks."""
    return [f"{RESULTS}/looks/look{look.look}.json" for look in looks]


checkpoint look:
    """Test the open claims on the seeds so far, and record which of them end."""
    input:
        # Records alone: they have the digests of tables and receipts, and each of these files is checked with its job.
        evaluations=before_look(lambda plan: plan.evaluation_files("run.json")),
        runs=before_look(lambda plan: plan.run_files("run.json")),
        sigmas=PLAN.all_sigmas_files(),
        problems=PLAN.data_files(),
        models=PLAN.prepared_model_files(),
        looks=lambda wildcards: look_files(finished_looks(before=int(wildcards.look))),
    output:
        f"{RESULTS}/looks/look{{look}}.json",
    log:
        f"{RESULTS}/logs/look/look{{look}}.log",
    conda:
        "../envs/aqnpipe.yaml"
    params:
        # Not the maximum of the study: it may be raised, and the looks so far stay as they are.
        study=lambda wildcards: PLAN.params_at_look(int(wildcards.look)),
        design=None if DESIGN is None else DESIGN.model_dump(mode="json"),
        code=code_digest("aqnpipe.comparison.looks"),
    message:
        "look {wildcards.look} at the claims"
    script:
        "../scripts/look.py"
