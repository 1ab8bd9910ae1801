"""aqnpipe: from a study file to results/report.html.

The default study is config/config.yaml; choose another one with `snakemake --configfile config/smoke.yaml`.
"""

from snakemake.utils import min_version

min_version("9.0")


# Only for `--software-deployment-method apptainer`: docs/how-to/containers.md
container: "aqnpipe.sif"


include: "workflow/rules/common.smk"
include: "workflow/rules/prepare.smk"
include: "workflow/rules/diagnose.smk"
include: "workflow/rules/parity.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/evaluate.smk"
include: "workflow/rules/retention.smk"
include: "workflow/rules/loss_study.smk"
include: "workflow/rules/looks.smk"
include: "workflow/rules/machines.smk"
include: "workflow/rules/report.smk"


# After the rules, whose patterns find the arm in the name of a file.
if workflow.is_main_process and (problem := unknown_arm()):
    refuse(ConfigError(problem))


# They take seconds, and prepare may fetch from the hub, which compute nodes often cannot reach.
localrules:
    all,
    prepare_data,
    prepare_model,
    generate_layer_sigmas,
    compare_losses,
    check_published,
    remove_weights,


rule all:
    default_target: True
    input:
        rules.compare.output,
        rules.report.output,
        rules.compare_machines.output if STUDY.config.evaluation.machines else [],
        after_looks(lambda plan: plan.removal_files()),
    message:
        "all results are complete"


# Not in the jobs themselves: Snakemake may delete their outputs until it has recorded that they are done.
onsuccess:
    if workflow.is_main_process:
        finish()
