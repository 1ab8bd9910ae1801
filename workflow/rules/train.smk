"""Train one arm with one seed.

Input: the prepared model and the questions; for arms with per-layer sigmas also the sigmas file of their machine.
Output: checkpoints, metrics.parquet, receipt.json and run.json.
"""


rule train:
    """Train one arm with one seed by GRPO, with the arm's noise; writes checkpoints, metrics, receipt and record."""
    input:
        model=f"{RESULTS}/models/{{model}}/aqnpipe_model.json",
        train_problems=f"{RESULTS}/data/train.parquet",
        test_problems=f"{RESULTS}/data/test.parquet",
        sigmas=lambda wildcards: PLAN.sigmas_input(wildcards.model, wildcards.arm),
        parity=(lambda wildcards: PLAN.training_parity_input(wildcards.model, wildcards.arm)) if HAS_PARITIES else [],
    output:
        metrics=f"{RESULTS}/runs/{{model}}/{{arm}}/seed{{seed}}/metrics.parquet",
        receipt=f"{RESULTS}/runs/{{model}}/{{arm}}/seed{{seed}}/receipt.json",
        record=f"{RESULTS}/runs/{{model}}/{{arm}}/seed{{seed}}/run.json",
        checkpoints=[
            f"{RESULTS}/runs/{{model}}/{{arm}}/seed{{seed}}/checkpoints/step{step}/config.json"
            for step in PLAN.checkpoint_steps
        ],
    log:
        f"{RESULTS}/logs/train/{{model}}_{{arm}}_seed{{seed}}.log",
    conda:
        "../envs/aqnpipe.yaml"
    threads: PLAN.training_threads()
    resources:
        mem_mb=memory_mb("train"),
    params:
        spec=lambda wildcards: PLAN.training_spec(wildcards.arm, int(wildcards.seed)),
        code=code_digest("aqnpipe.training.stage"),
    message:
        f"train: {{wildcards.model}}/{{wildcards.arm}} seed {{wildcards.seed}}{given('train')}"
    script:
        "../scripts/train.py"
