"""Evaluate checkpoints at every noise level, each in a job of its own or all of a run in one.

Input: a checkpoint (for arm `pretrained` the prepared model) and the test questions; with examples in the prompt
also the training questions. Output: a table of responses, their receipt and a record per checkpoint.
"""


rule evaluate:
    """Answer every test question at every noise level and noise seed, greedily or by sampling; with receipts."""
    input:
        model=lambda wildcards: PLAN.checkpoint_input(**wildcards),
        trained=lambda wildcards: PLAN.checkpoint_record(**wildcards),
        test_problems=f"{RESULTS}/data/test.parquet",
        train_problems=PLAN.examples_input(),
        parity=lambda wildcards: PLAN.evaluation_parity_input(**wildcards),
    output:
        table=f"{RESULTS}/eval/{{model}}/{{arm}}/seed{{seed}}/step{{step}}.parquet",
        receipt=f"{RESULTS}/eval/{{model}}/{{arm}}/seed{{seed}}/step{{step}}.receipt.json",
        record=f"{RESULTS}/eval/{{model}}/{{arm}}/seed{{seed}}/step{{step}}.run.json",
    log:
        f"{RESULTS}/logs/evaluate/{{model}}_{{arm}}_seed{{seed}}_step{{step}}.log",
    wildcard_constraints:
        arm=PRETRAINED if EVALUATES_RUNS else arm_pattern(),
    # Where weights are removed, before further training, which needs the space.
    priority: 0 if STUDY.config.keep == "all" else 1
    conda:
        "../envs/aqnpipe.yaml"
    threads: evaluation_threads("evaluate")
    resources:
        mem_mb=memory_mb("evaluate"),
    params:
        spec=lambda wildcards: PLAN.evaluation_spec(**wildcards),
        code=code_digest("aqnpipe.evaluation.stage"),
    message:
        f"evaluate: {{wildcards.model}}/{{wildcards.arm}} seed {{wildcards.seed}} step {{wildcards.step}}{given('evaluate')}"
    script:
        "../scripts/evaluate.py"


# One job for all checkpoints of a run, where the profile asks for it: docs/how-to/thousands-of-runs.md.
if EVALUATES_RUNS:

    rule evaluate_run:
        """Evaluate all checkpoints of one run, one after the other; the same files as of rule `evaluate`."""
        input:
            # For all checkpoints of the run, whose digests it has. Named as an output: Snakemake need not search for its rule.
            trained=rules.train.output.record,
            test_problems=f"{RESULTS}/data/test.parquet",
            train_problems=PLAN.examples_input(),
            parity=(lambda wildcards: PLAN.evaluation_parity_input(**wildcards)) if HAS_PARITIES else [],
        output:
            tables=[
                f"{RESULTS}/eval/{{model}}/{{arm}}/seed{{seed}}/step{step}.parquet" for step in PLAN.checkpoint_steps
            ],
            receipts=[
                f"{RESULTS}/eval/{{model}}/{{arm}}/seed{{seed}}/step{step}.receipt.json"
                for step in PLAN.checkpoint_steps
            ],
            records=[
                f"{RESULTS}/eval/{{model}}/{{arm}}/seed{{seed}}/step{step}.run.json" for step in PLAN.checkpoint_steps
            ],
        log:
            f"{RESULTS}/logs/evaluate/{{model}}_{{arm}}_seed{{seed}}.log",
        wildcard_constraints:
            arm=arm_pattern(with_pretrained=False),
        priority: 0 if STUDY.config.keep == "all" else 1
        conda:
            "../envs/aqnpipe.yaml"
        threads: evaluation_threads("evaluate_run")
        resources:
            mem_mb=memory_mb("evaluate"),
        params:
            specs=lambda wildcards: PLAN.evaluation_specs(**wildcards),
            code=code_digest("aqnpipe.evaluation.stage"),
        message:
            f"evaluate: {{wildcards.model}}/{{wildcards.arm}} seed {{wildcards.seed}}, {len(PLAN.checkpoint_steps)} checkpoints{given('evaluate_run')}"
        script:
            "../scripts/evaluate_run.py"
