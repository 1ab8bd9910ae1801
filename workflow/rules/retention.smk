"""Remove weights of checkpoints that the study does not keep (`keep`). Without that key there is no such job.

Input: a run and all its evaluations. Output: weights.json of the run. Everything else of a checkpoint stays, so nothing is
trained or evaluated again.
"""


rule remove_weights:
    """Remove the weights of one run that are not kept, if its evaluations are those that comparisons would use."""
    input:
        evaluations=[
            f"{RESULTS}/eval/{{model}}/{{arm}}/seed{{seed}}/step{step}.run.json" for step in PLAN.checkpoint_steps
        ],
        on_machines=[
            f"{RESULTS}/eval_on/{machine}/{{model}}/{{arm}}/seed{{seed}}/step{step}.run.json"
            for machine in STUDY.config.evaluation.machines
            for step in PLAN.checkpoint_steps
        ],
        record=f"{RESULTS}/runs/{{model}}/{{arm}}/seed{{seed}}/run.json",
        sigmas=lambda wildcards: PLAN.sigmas_input(wildcards.model, wildcards.arm),
        problems=PLAN.data_files(),
        models=f"{RESULTS}/models/{{model}}/aqnpipe_model.json",
    output:
        f"{RESULTS}/runs/{{model}}/{{arm}}/seed{{seed}}/weights.json",
    log:
        f"{RESULTS}/logs/remove_weights/{{model}}_{{arm}}_seed{{seed}}.log",
    # Before further training, which needs the space.
    priority: 2
    conda:
        "../envs/aqnpipe.yaml"
    params:
        keep=STUDY.config.keep,
        study=lambda wildcards: PLAN.of_run(wildcards.arm, int(wildcards.seed)).study_params(),
    message:
        "remove weights: {wildcards.model}/{wildcards.arm} seed {wildcards.seed}, keep {params.keep}"
    script:
        "../scripts/remove_weights.py"
