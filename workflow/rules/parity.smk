"""Compare the operators of the device in the configuration of a counterpart with those of the study.

Input: the prepared model and questions. Output: parity/.
"""


rule measure_parity:
    """Capture a model on the device and in the configuration of its counterpart, and compare the operators."""
    input:
        model=f"{RESULTS}/models/{{model}}/aqnpipe_model.json",
        problems=PLAN.data_files()[0],
    output:
        f"{RESULTS}/parity/{{model}}/{{machine}}.json",
    log:
        f"{RESULTS}/logs/measure_parity/{{model}}_{{machine}}.log",
    benchmark:
        f"{RESULTS}/benchmarks/measure_parity/{{model}}_{{machine}}.tsv"
    conda:
        "../envs/aqnpipe.yaml"
    resources:
        mem_mb=4000,
    params:
        spec=lambda wildcards: PLAN.parity_spec(**wildcards),
        code=code_digest("aqnpipe.parity.stage"),
    message:
        f"parity: model {{wildcards.model}} on machine {{wildcards.machine}}{given('measure_parity')}"
    script:
        "../scripts/measure_parity.py"
