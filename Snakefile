"""aqnpipe: from a study file to results/report.html.

The default study is config/config.yaml; choose another one with `snakemake --configfile config/smoke.yaml`.
"""

from snakemake.utils import min_version

min_version("9.0")

# A study file on the command line stands instead of the default one; Snakemake would merge the two.
if not workflow.overwrite_configfiles:

    configfile: "config/config.yaml"


include: "workflow/rules/common.smk"
include: "workflow/rules/prepare.smk"
include: "workflow/rules/diagnose.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/evaluate.smk"
include: "workflow/rules/loss_study.smk"
include: "workflow/rules/report.smk"


# They take seconds, and prepare may fetch from the hub, which compute nodes often cannot reach.
localrules:
    all,
    prepare_data,
    prepare_model,
    generate_layer_sigmas,
    compare_losses,
    check_published,


rule all:
    default_target: True
    input:
        f"{RESULTS}/report.html",
