"""Compare arms and noise levels, check published figures, and write the report.

Input: every evaluation of the study, its runs and its diagnoses. For an unfinished study use
`aqnpipe report STUDY.yaml`.
"""


rule compare:
    """Test every comparison of the study; writes accuracies, comparisons, robustness, and claims with verdicts."""
    input:
        # Records alone: they have the digests of tables and receipts, and each of these files is checked with its job.
        evaluations=after_looks(lambda plan: plan.evaluation_files("run.json")),
        runs=after_looks(lambda plan: plan.run_files("run.json")),
        sigmas=PLAN.all_sigmas_files(),
        problems=PLAN.data_files(),
        models=PLAN.prepared_model_files(),
        looks=lambda wildcards: look_files(finished_looks()),
    output:
        accuracy=f"{RESULTS}/accuracy.parquet",
        accuracy_csv=report(f"{RESULTS}/accuracy.csv", caption="../report/accuracy.rst", category="Tables"),
        comparisons=f"{RESULTS}/comparisons.parquet",
        comparisons_csv=report(f"{RESULTS}/comparisons.csv", caption="../report/comparisons.rst", category="Tables"),
        robustness=f"{RESULTS}/robustness.parquet",
        robustness_csv=report(f"{RESULTS}/robustness.csv", caption="../report/robustness.rst", category="Tables"),
        differences=f"{RESULTS}/differences.parquet",
        differences_csv=report(f"{RESULTS}/differences.csv", caption="../report/differences.rst", category="Tables"),
        claims=f"{RESULTS}/claims.json",
    log:
        f"{RESULTS}/logs/compare.log",
    conda:
        "../envs/aqnpipe.yaml"
    params:
        study=params_after_looks(),
        code=code_digest("aqnpipe.comparison.stage"),
    message:
        f"compare {'the' if STUDY.adaptive_seeds else PLAN.num_evaluations} evaluations"
    script:
        "../scripts/compare.py"


rule check_published:
    """Check the published figures named by the study: which are possible, and which claims they support."""
    input:
        STUDY.config.statistics.published or [],
    output:
        f"{RESULTS}/published.json",
    log:
        f"{RESULTS}/logs/check_published.log",
    conda:
        "../envs/aqnpipe.yaml"
    params:
        code=code_digest("aqnpipe.published.check"),
    message:
        "check published figures: {input}"
    script:
        "../scripts/check_published.py"


rule report:
    """Write one self-contained page (verdicts, figures, receipts, provenance), a summary, and their tables."""
    input:
        accuracy=f"{RESULTS}/accuracy.parquet",
        comparisons=f"{RESULTS}/comparisons.parquet",
        robustness=f"{RESULTS}/robustness.parquet",
        differences=f"{RESULTS}/differences.parquet",
        claims=f"{RESULTS}/claims.json",
        published=[f"{RESULTS}/published.json"] if STUDY.config.statistics.published else [],
        test_problems=f"{RESULTS}/data/test.parquet",
        records=after_looks(lambda plan: plan.run_files("run.json")),
        evaluation_records=after_looks(lambda plan: plan.evaluation_files("run.json")),
        layers=PLAN.diagnosis_files("layers.parquet"),
        verdicts=PLAN.diagnosis_files("verdict.json"),
        sigmas=PLAN.all_sigmas_files(),
        loss_studies=PLAN.loss_study_files("claims.json"),
        parities=PLAN.all_parity_files(),
        machines=[f"{RESULTS}/machines.parquet"] if STUDY.config.evaluation.machines else [],
    output:
        html=report(f"{RESULTS}/report.html", caption="../report/page.rst", category="Answer"),
        summary=report(f"{RESULTS}/summary.md", caption="../report/summary.rst", category="Answer"),
        readme=f"{RESULTS}/README.md",
        training=f"{RESULTS}/training.parquet",
        training_csv=report(f"{RESULTS}/training.csv", caption="../report/training.rst", category="Tables"),
        layers=f"{RESULTS}/layers.parquet",
        layers_csv=report(f"{RESULTS}/layers.csv", caption="../report/layers.rst", category="Tables"),
        flips=f"{RESULTS}/flips.parquet",
        flips_csv=report(f"{RESULTS}/flips.csv", caption="../report/flips.rst", category="Tables"),
    log:
        f"{RESULTS}/logs/report.log",
    conda:
        "../envs/aqnpipe.yaml"
    params:
        study=params_after_looks(),
        code=code_digest("aqnpipe.report.stage"),
    message:
        "report: {output.html}"
    script:
        "../scripts/report.py"
