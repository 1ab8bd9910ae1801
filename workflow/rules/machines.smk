"""Evaluate every checkpoint on further machines too, and compare the accuracies (`evaluation.machines`).

Input: as of rule `evaluate`. Output: eval_on/ and machines.parquet. Without that key there are no such jobs.
"""

ON_MACHINE = {machine: PLAN.on(machine) for machine in STUDY.config.evaluation.machines}

# A rule for each kind of device that machines name: a profile gives it the resources of that device.
for KIND, MACHINES in PLAN.evaluated_by_kind().items():

    rule:
        """Evaluate a checkpoint on a machine: its device, its faults, and the number format of its counterpart."""
        name:
            rule_on("evaluate_on_machine", KIND)
        input:
            model=lambda wildcards: PLAN.checkpoint_input(**of_checkpoint(wildcards)),
            trained=lambda wildcards: PLAN.checkpoint_record(**of_checkpoint(wildcards)),
            test_problems=f"{RESULTS}/data/test.parquet",
            train_problems=PLAN.examples_input(),
            parity=lambda wildcards: PLAN.evaluation_parity_input(**of_checkpoint(wildcards)),
        output:
            table=f"{RESULTS}/eval_on/{{machine}}/{{model}}/{{arm}}/seed{{seed}}/step{{step}}.parquet",
            receipt=f"{RESULTS}/eval_on/{{machine}}/{{model}}/{{arm}}/seed{{seed}}/step{{step}}.receipt.json",
            record=f"{RESULTS}/eval_on/{{machine}}/{{model}}/{{arm}}/seed{{seed}}/step{{step}}.run.json",
        log:
            f"{RESULTS}/logs/evaluate_on_machine/{{machine}}_{{model}}_{{arm}}_seed{{seed}}_step{{step}}.log",
        wildcard_constraints:
            machine=any_of(MACHINES),
        # Where weights are removed, before further training, which needs the space.
        priority: 0 if STUDY.config.keep == "all" else 1
        conda:
            "../envs/aqnpipe.yaml"
        threads: lambda wildcards: threads_on(wildcards.machine)
        resources:
            mem_mb=memory_mb("evaluate_on_machine"),
        params:
            spec=lambda wildcards: ON_MACHINE[wildcards.machine].evaluation_spec(**of_checkpoint(wildcards)),
            code=code_digest("aqnpipe.evaluation.stage"),
        message:
            f"evaluate: {{wildcards.model}}/{{wildcards.arm}} seed {{wildcards.seed}} step {{wildcards.step}} on {{wildcards.machine}}{given(rule_on('evaluate_on_machine', KIND))}"
        script:
            "../scripts/evaluate.py"


if STUDY.config.evaluation.machines:

    rule compare_machines:
        """Compare the accuracy of the same checkpoints on the machines, paired over questions."""
        input:
            evaluations=after_looks(lambda plan: plan.evaluation_files("run.json")),
            on_machines=after_looks(lambda plan: plan.machine_evaluation_files("run.json")),
            runs=after_looks(lambda plan: plan.run_files("run.json")),
            sigmas=PLAN.all_sigmas_files(),
            problems=PLAN.data_files(),
            models=PLAN.prepared_model_files(),
        output:
            table=f"{RESULTS}/machines.parquet",
            csv=report(f"{RESULTS}/machines.csv", caption="../report/machines.rst", category="Tables"),
        log:
            f"{RESULTS}/logs/compare_machines.log",
        conda:
            "../envs/aqnpipe.yaml"
        params:
            study=params_after_looks(),
            code=code_digest("aqnpipe.comparison.machines"),
        message:
            f"compare the machines {', '.join(STUDY.config.evaluation.machines)}"
        script:
            "../scripts/compare_machines.py"
