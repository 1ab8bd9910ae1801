"""Prepare data and models.

Input: the study file, and files of the user that it names. Output: data/ and models/. Hub models and data sets are downloaded only here.
"""


rule prepare_data:
    """Generate or read one split of the questions of the study."""
    input:
        # Of the user, perhaps with a wrong clock: Snakemake would fail a job whose output is older.
        lambda wildcards: ancient(PLAN.dataset_files(wildcards.split)),
    output:
        f"{RESULTS}/data/{{split}}.parquet",
    log:
        f"{RESULTS}/logs/prepare_data/{{split}}.log",
    conda:
        "../envs/aqnpipe.yaml"
    params:
        dataset=STUDY.config.dataset.model_dump(mode="json"),
        code=code_digest("aqnpipe.data.stage"),
    message:
        "prepare data: {wildcards.split} split"
    script:
        "../scripts/prepare_data.py"


rule prepare_model:
    """Write a model as a folder with safetensors, config and tokenizer."""
    input:
        lambda wildcards: ancient(PLAN.model_files(wildcards.model)),
    output:
        config=f"{RESULTS}/models/{{model}}/config.json",
        record=f"{RESULTS}/models/{{model}}/aqnpipe_model.json",
    log:
        f"{RESULTS}/logs/prepare_model/{{model}}.log",
    conda:
        "../envs/aqnpipe.yaml"
    params:
        model=lambda wildcards: STUDY.config.models[wildcards.model].model_dump(mode="json"),
        recipe=lambda wildcards: PLAN.model_recipe(wildcards.model),
        code=code_digest("aqnpipe.models.loading"),
    message:
        "prepare model: role {wildcards.model}"
    script:
        "../scripts/prepare_model.py"
