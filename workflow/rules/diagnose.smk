"""Diagnose machines layer by layer, and derive layer sigmas.

Input: the prepared model and the training questions. Output: srdd/.
"""

# A rule for each kind of device that machines name: a profile gives it the resources of that device.
for KIND, MACHINES in PLAN.diagnosed_by_kind().items():

    rule:
        """Run exact probes and statistical scans of a model on a machine (the device, with or without simulated faults).

        Of a machine that was diagnosed elsewhere, take over its diagnosis.
        """
        name:
            rule_on("srdd_diagnose", KIND)
        input:
            model=f"{RESULTS}/models/{{model}}/aqnpipe_model.json",
            problems=f"{RESULTS}/data/train.parquet",
            elsewhere=lambda wildcards: PLAN.imported_diagnosis(wildcards.model, wildcards.machine),
        output:
            layers=f"{RESULTS}/srdd/{{model}}/{{machine}}/layers.parquet",
            verdict=f"{RESULTS}/srdd/{{model}}/{{machine}}/verdict.json",
        log:
            f"{RESULTS}/logs/srdd_diagnose/{{model}}_{{machine}}.log",
        wildcard_constraints:
            machine=any_of(MACHINES),
        conda:
            "../envs/aqnpipe.yaml"
        threads: STUDY.config.diagnosis.threads
        resources:
            mem_mb=memory_mb("srdd_diagnose"),
        params:
            machine=lambda wildcards: PLAN.diagnosed_machine(wildcards.machine),
            diagnosis=STUDY.config.diagnosis.model_dump(mode="json"),
            prompt=STUDY.config.prompt.model_dump(mode="json"),
            model=lambda wildcards: STUDY.config.models[wildcards.model].model_dump(mode="json"),
            device=lambda wildcards: STUDY.config.device_of(wildcards.machine),
            code=code_digest("aqnpipe.diagnosis.stage"),
        message:
            f"diagnose: model {{wildcards.model}} on machine {{wildcards.machine}}{given(rule_on('srdd_diagnose', KIND))}"
        script:
            "../scripts/srdd_diagnose.py"


rule generate_layer_sigmas:
    """Derive layer sigmas from a diagnosis by one strategy; some need the parity of the machine too."""
    input:
        layers=f"{RESULTS}/srdd/{{model}}/{{machine}}/layers.parquet",
        verdict=f"{RESULTS}/srdd/{{model}}/{{machine}}/verdict.json",
        parity=lambda wildcards: PLAN.sigmas_parity_input(**wildcards),
    output:
        f"{RESULTS}/srdd/{{model}}/{{machine}}/sigmas-{{strategy}}.yaml",
    log:
        f"{RESULTS}/logs/generate_layer_sigmas/{{model}}_{{machine}}_{{strategy}}.log",
    conda:
        "../envs/aqnpipe.yaml"
    params:
        rule=STUDY.config.sigma_rule.model_dump(mode="json"),
        code=code_digest("aqnpipe.diagnosis.sigmas"),
    message:
        "sigmas: model {wildcards.model}, machine {wildcards.machine}, {wildcards.strategy}"
    script:
        "../scripts/generate_layer_sigmas.py"
