"""Compare the operators of the device in the configuration of a counterpart with those of the study.

Input: the prepared model and questions. Output: parity/.
"""

# A rule for each kind of device that machines name: a profile gives it the resources of that device.
for KIND, MACHINES in PLAN.measured_by_kind().items():

    rule:
        """Capture a model on the device and in the configuration of its counterpart, and compare the operators."""
        name:
            rule_on("measure_parity", KIND)
        input:
            model=f"{RESULTS}/models/{{model}}/aqnpipe_model.json",
            problems=PLAN.data_files()[0],
        output:
            f"{RESULTS}/parity/{{model}}/{{machine}}.json",
        log:
            f"{RESULTS}/logs/measure_parity/{{model}}_{{machine}}.log",
        wildcard_constraints:
            machine=any_of(MACHINES),
        conda:
            "../envs/aqnpipe.yaml"
        resources:
            mem_mb=memory_mb("measure_parity"),
        params:
            spec=lambda wildcards: PLAN.parity_spec(**wildcards),
            code=code_digest("aqnpipe.parity.stage"),
        message:
            f"parity: model {{wildcards.model}} on machine {{wildcards.machine}}{given(rule_on('measure_parity', KIND))}"
        script:
            "../scripts/measure_parity.py"
