"""Compare arms and noise levels, and write the report.

Needs every evaluation of the study; the report also needs the runs and the diagnoses.
"""


rule compare:
    """Test every declared comparison; accuracies, comparisons and claims of the study."""
    input:
        evaluations=PLAN.evaluation_files("parquet"),
        receipts=PLAN.evaluation_files("receipt.json"),
        records=PLAN.evaluation_files("run.json"),
    output:
        accuracy=f"{RESULTS}/accuracy.parquet",
        comparisons=f"{RESULTS}/comparisons.parquet",
        claims=f"{RESULTS}/claims.json",
    log:
        f"{RESULTS}/logs/compare.log",
    benchmark:
        f"{RESULTS}/benchmarks/compare.tsv"
    conda:
        "../envs/aqnpipe.yaml"
    params:
        study=PLAN.study_params(),
        code=code_digest("aqnpipe.statistics.stage"),
    message:
        "compare {PLAN.num_evaluations} evaluations"
    script:
        "../scripts/compare.py"


rule report:
    """One self-contained page: verdicts, figures, receipts, provenance."""
    input:
        accuracy=f"{RESULTS}/accuracy.parquet",
        comparisons=f"{RESULTS}/comparisons.parquet",
        claims=f"{RESULTS}/claims.json",
        metrics=PLAN.run_files("metrics.parquet"),
        receipts=PLAN.run_files("receipt.json"),
        records=PLAN.run_files("run.json"),
        evaluation_receipts=PLAN.evaluation_files("receipt.json"),
        layers=PLAN.diagnosis_files("layers.parquet"),
        verdicts=PLAN.diagnosis_files("verdict.json"),
        sigmas=PLAN.diagnosis_files("sigmas.yaml"),
    output:
        f"{RESULTS}/report.html",
    log:
        f"{RESULTS}/logs/report.log",
    benchmark:
        f"{RESULTS}/benchmarks/report.tsv"
    conda:
        "../envs/aqnpipe.yaml"
    params:
        study=PLAN.study_params(),
        code=code_digest("aqnpipe.report.stage"),
    message:
        "report: {output}"
    script:
        "../scripts/report.py"
