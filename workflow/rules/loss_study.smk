"""The loss of texts on machines with simulated faults, without training.

Needs the prepared model and the test questions.
"""


rule fault_loss:
    """Loss of every text at every magnitude of the faults, with and without noise; with receipts."""
    input:
        model=f"{RESULTS}/models/{{model}}/config.json",
        test_problems=f"{RESULTS}/data/test.parquet",
        train_problems=PLAN.examples_input(),
    output:
        table=f"{RESULTS}/fault_loss/{{model}}/{{name}}.parquet",
        receipt=f"{RESULTS}/fault_loss/{{model}}/{{name}}.receipt.json",
        record=f"{RESULTS}/fault_loss/{{model}}/{{name}}.run.json",
    log:
        f"{RESULTS}/logs/fault_loss/{{model}}_{{name}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/fault_loss/{{model}}_{{name}}.tsv"
    conda:
        "../envs/aqnpipe.yaml"
    threads: lambda wildcards: PLAN.fault_loss_threads(wildcards.model, wildcards.name)
    resources:
        mem_mb=4000,
    params:
        spec=lambda wildcards: PLAN.fault_loss_spec(wildcards.model, wildcards.name),
        code=code_digest("aqnpipe.loss_study.stage"),
    message:
        f"fault loss: {{wildcards.name}} on model {{wildcards.model}}{given('fault_loss')}"
    script:
        "../scripts/loss_study.py"


rule compare_losses:
    """What a loss study shows, paired over texts and noise seeds."""
    input:
        table=f"{RESULTS}/fault_loss/{{model}}/{{name}}.parquet",
        receipt=f"{RESULTS}/fault_loss/{{model}}/{{name}}.receipt.json",
        record=f"{RESULTS}/fault_loss/{{model}}/{{name}}.run.json",
    output:
        f"{RESULTS}/fault_loss/{{model}}/{{name}}.claims.json",
    log:
        f"{RESULTS}/logs/compare_losses/{{model}}_{{name}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/compare_losses/{{model}}_{{name}}.tsv"
    conda:
        "../envs/aqnpipe.yaml"
    params:
        settings=STUDY.config.statistics.model_dump(mode="json"),
        code=code_digest("aqnpipe.loss_study.comparison"),
    message:
        "compare losses: {wildcards.name} on model {wildcards.model}"
    script:
        "../scripts/compare_losses.py"
