"""Evaluate checkpoints at every noise level.

Input: a checkpoint (for arm `pretrained` the prepared model) and the test questions; with examples in the prompt
also the training questions. Output: a table of responses, their receipt and a record per checkpoint.
"""


rule evaluate:
    """Answer every test question at every noise level and noise seed, greedily or by sampling; with receipts."""
    input:
        model=lambda wildcards: PLAN.checkpoint_input(**wildcards),
        test_problems=f"{RESULTS}/data/test.parquet",
        train_problems=PLAN.examples_input(),
        parity=lambda wildcards: PLAN.evaluation_parity_input(**wildcards),
    output:
        table=f"{RESULTS}/eval/{{model}}/{{arm}}/seed{{seed}}/step{{step}}.parquet",
        receipt=f"{RESULTS}/eval/{{model}}/{{arm}}/seed{{seed}}/step{{step}}.receipt.json",
        record=f"{RESULTS}/eval/{{model}}/{{arm}}/seed{{seed}}/step{{step}}.run.json",
    log:
        f"{RESULTS}/logs/evaluate/{{model}}_{{arm}}_seed{{seed}}_step{{step}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/evaluate/{{model}}_{{arm}}_seed{{seed}}_step{{step}}.tsv"
    conda:
        "../envs/aqnpipe.yaml"
    threads: STUDY.config.evaluation.threads * workers("evaluate")
    # Where weights are removed, before further training, which needs the space.
    priority: 0 if STUDY.config.keep == "all" else 1
    resources:
        mem_mb=4000,
    params:
        spec=lambda wildcards: PLAN.evaluation_spec(**wildcards),
        code=code_digest("aqnpipe.evaluation.stage"),
    message:
        f"evaluate: {{wildcards.model}}/{{wildcards.arm}} seed {{wildcards.seed}} step {{wildcards.step}}{given('evaluate')}"
    script:
        "../scripts/evaluate.py"
