"""Loss studies: the loss of texts on machines with simulated faults, without training.

Input: the prepared model and the test questions. Output: loss_study/.
"""


rule loss_study:
    """Compute the loss of every text at every magnitude of the faults, with and without noise, and the receipts."""
    input:
        model=f"{RESULTS}/models/{{model}}/aqnpipe_model.json",
        test_problems=f"{RESULTS}/data/test.parquet",
        train_problems=PLAN.examples_input(),
    output:
        table=f"{RESULTS}/loss_study/{{model}}/{{name}}.parquet",
        receipt=f"{RESULTS}/loss_study/{{model}}/{{name}}.receipt.json",
        record=f"{RESULTS}/loss_study/{{model}}/{{name}}.run.json",
    log:
        f"{RESULTS}/logs/loss_study/{{model}}_{{name}}.log",
    conda:
        "../envs/aqnpipe.yaml"
    threads: lambda wildcards: PLAN.loss_study_threads(wildcards.model, wildcards.name)
    resources:
        mem_mb=memory_mb("loss_study"),
    params:
        spec=lambda wildcards: PLAN.loss_study_spec(wildcards.model, wildcards.name),
        code=code_digest("aqnpipe.loss_study.stage"),
    message:
        f"loss study: {{wildcards.name}} on model {{wildcards.model}}{given('loss_study')}"
    script:
        "../scripts/loss_study.py"


rule compare_losses:
    """Compare the conditions of a loss study, paired over texts and noise seeds."""
    input:
        table=f"{RESULTS}/loss_study/{{model}}/{{name}}.parquet",
        receipt=f"{RESULTS}/loss_study/{{model}}/{{name}}.receipt.json",
        record=f"{RESULTS}/loss_study/{{model}}/{{name}}.run.json",
    output:
        f"{RESULTS}/loss_study/{{model}}/{{name}}.claims.json",
    log:
        f"{RESULTS}/logs/compare_losses/{{model}}_{{name}}.log",
    conda:
        "../envs/aqnpipe.yaml"
    params:
        settings=STUDY.config.statistics.model_dump(mode="json"),
        code=code_digest("aqnpipe.loss_study.comparison"),
    message:
        "compare losses: {wildcards.name} on model {wildcards.model}"
    script:
        "../scripts/compare_losses.py"
