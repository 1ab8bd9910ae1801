"""A made-up study of four arms, its artifacts and receipts that pass: numbers drawn from seeded generators."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import made_up as made_up_files
import numpy as np
import polars as pl
from made_up import NUM_LAYERS

from aqnpipe.artifacts.diagnoses import LayerTable, SigmaFile, Verdict
from aqnpipe.artifacts.evaluations import evaluation_files
from aqnpipe.artifacts.files import write_json, write_table, write_yaml
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.artifacts.runs import TrainingMetrics
from aqnpipe.comparison.stage import EvaluationInput
from aqnpipe.config.arm import Arm
from aqnpipe.config.noise import TRAINING_PHASES, LayerSigmas
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.study import Study
from aqnpipe.noise.receipts.receipt import Receipt
from aqnpipe.report.inputs import ReportData, read_study
from aqnpipe.seeding import derive_seed

AQN = {
    "schedule": {
        "kind": "epoch_ranges",
        "ranges": [{"sigma_start": 0.05, "sigma_end": 0.01}, {"sigma_start": 0.01, "sigma_end": 0.0005}],
    }
}
ARMS: dict[str, dict[str, Any]] = {
    "baseline": {"description": "no noise in training"},
    "E5": {
        "description": "5 % relative noise on matmul operators, no AQN",
        "operator_noise": {"error": {"kind": "relative_gaussian", "scale": 0.05}},
    },
    "E5b": {
        "description": "E5 plus epoch-aware AQN",
        "operator_noise": {"error": {"kind": "relative_gaussian", "scale": 0.05}},
        "aqn": AQN,
    },
    "srdd_guided": {
        "description": "E5b with per-layer sigmas from the diagnosis of the machine `target`",
        "operator_noise": {"error": {"kind": "relative_gaussian", "scale": 0.05}},
        "aqn": AQN,
    },
}
LOGITS = {"pretrained": -1.0, "baseline": 1.6, "E5": 1.45, "E5b": 1.48, "srdd_guided": 1.5}


def study(**changes: Any) -> Study:
    """The made-up study; `changes` replace top-level keys of its file."""
    content: dict[str, Any] = {
        "study": "synthetic",
        "models": {"base": {"source": "some/model"}},
        "machines": {"device": {}, "target": {"faults": [{"type": "dead_zone", "layer": 3, "magnitude": 0.05}]}},
        "dataset": {"source": "generated", "num_train": 480, "num_test": 400},
        "arms": list(ARMS),
        "seeds": [0, 1],
        "training": {
            "epochs": 2,
            "prompts_per_step": 16,
            "rollouts_per_prompt": 8,
            "micro_batch_size": 64,
            "learning_rate": 2e-4,
            "max_response_tokens": 40,
        },
        "evaluation": {"noise_seeds": [0, 1], "max_response_tokens": 40, "batch_size": 250},
        "comparisons": [
            _arms("baseline", "pretrained", "higher", "Training without noise improves accuracy"),
            _levels("baseline", "10 % operator noise at evaluation hurts the baseline"),
            _levels("E5b", "10 % operator noise at evaluation hurts E5b"),
            _arms("E5", "baseline", "lower", "5 % operator noise in training costs accuracy"),
            _arms("E5b", "E5", "higher", "Epoch-aware AQN raises accuracy under noisy training"),
            _arms("srdd_guided", "E5b", "higher", "Per-layer sigmas beat uniform AQN at 10 % noise", 0.1),
        ],
        "report": {
            "title": "Synthetic study",
            "question": "Does training with simulated hardware noise, with or without AQN, make the model robust?",
        },
    }
    content |= changes
    names = content["arms"]
    return Study.model_validate({"config": content, "arms": {name: Arm.model_validate(ARMS[name]) for name in names}})


@dataclass(frozen=True)
class MadeRun:
    """The files of a run."""

    arm: str
    metrics: Path
    receipt: Path
    record: Path


@dataclass(frozen=True)
class Artifacts:
    """Everything that the stages before `compare` and `report` would have written; `verdicts`: of the diagnoses."""

    study: Study
    root: Path
    evaluations: list[EvaluationInput]
    test_problems: Path
    runs: tuple[MadeRun, ...]
    verdicts: tuple[Path, ...]

    def report_data(self, compared: Path, study: Study | None = None) -> ReportData:
        """The content of all files, with those of `compare` in `compared`; `study`: another one with the same files."""
        return read_study(StudyPlan(study or self.study), self.root, compared)


def write_study(folder: Path, made_up: Study, num_questions: int = 300) -> Artifacts:
    """Write the artifacts of every run of `made_up` below `folder`, where the workflow puts them."""
    root, folder, steps = folder, folder / made_up.config.results_dir, made_up.num_steps
    runs = [(arm, seed) for arm in made_up.config.arms for seed in made_up.seeds]
    evaluations = [write_evaluation(folder, made_up, "pretrained", 0, 0, num_questions)]
    evaluations += [write_evaluation(folder, made_up, arm, seed, steps, num_questions) for arm, seed in runs]
    return Artifacts(
        study=made_up,
        root=root,
        evaluations=evaluations,
        test_problems=_write_problems(folder, num_questions),
        runs=tuple(_write_run(folder, made_up, arm, seed) for arm, seed in runs),
        verdicts=tuple(_write_diagnosis(folder, made_up, machine) for machine in made_up.config.machines),
    )


def write_evaluation(
    folder: Path, made_up: Study, arm: str, seed: int, step: int, num_questions: int = 300
) -> EvaluationInput:
    """Write one evaluation and what it cost."""
    source = EvaluationInput(**vars(evaluation_files(folder, "base", arm, seed, step)))
    settings = {"evaluation": {"max_response_tokens": 40}}
    made_up_files.write_evaluation(source, made_up, LOGITS.get(arm, 1.0), num_questions, settings)
    _write_benchmark(folder / "benchmarks" / "evaluate" / f"base_{arm}_seed{seed}_step{step}.tsv", 12.5)
    return source


def training_receipt(arm: Arm, num_steps: int = 0) -> Receipt:
    """A receipt of a run of `arm` that passes its check."""
    return made_up_files.receipt(arm.operator_noise, arm.aqn, TRAINING_PHASES, num_steps)


def _arms(treatment: str, control: str, expected: str, claim: str, level: float = 0.0) -> dict[str, Any]:
    names = {"treatment": treatment, "control": control, "noise_level": level}
    return {"kind": "arms", **names, "expected": expected, "claim": claim}


def _levels(arm: str, claim: str) -> dict[str, Any]:
    return {"kind": "levels", "arm": arm, "noise_level": 0.1, "claim": claim}


def _write_run(folder: Path, made_up: Study, arm: str, seed: int) -> MadeRun:
    base = folder / "runs" / "base" / arm / f"seed{seed}"
    run = MadeRun(arm, *(base / name for name in ("metrics.parquet", "receipt.json", "run.json")))
    receipt = training_receipt(made_up.arms[arm], made_up.num_steps)
    write_table(run.metrics, _metrics(arm, seed, made_up.num_steps, receipt), TrainingMetrics)
    write_json(run.receipt, receipt)
    write_json(run.record, made_up_files.record("train", arm, seed, made_up.num_steps, {}))
    costs = folder / "benchmarks" / "train" / f"base_{arm}_seed{seed}.tsv"
    _write_benchmark(costs, 60.0 + 30 * (arm != "baseline") + seed)
    return run


def _write_benchmark(path: Path, seconds: float) -> None:
    """A file as Snakemake's benchmark directive writes it."""
    names = ("s", "h:m:s", "max_rss", "max_vms", "max_uss", "max_pss", "io_in", "io_out", "mean_load", "cpu_time")
    values = (seconds, "0:01:00", 812.5, 2000.0, 600.0, 700.0, "-", "-", 95.0, 0.9 * seconds)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\t".join(names) + "\n" + "\t".join(map(str, values)) + "\n", encoding="utf-8")


def _write_problems(folder: Path, num_questions: int) -> Path:
    """Questions that the made-up evaluations answer."""
    ids = [f"q{number:05d}" for number in range(num_questions)]
    table = pl.DataFrame(
        {
            "question_id": ids,
            "question": [f"What is {number} plus 0? Show your steps." for number in range(num_questions)],
            "answer": [f"{number} + 0 = {number} #### {number}" for number in range(num_questions)],
            "gold_answer": [str(number) for number in range(num_questions)],
        }
    )
    write_table(folder / "data" / "test.parquet", table, ProblemTable)
    return folder / "data" / "test.parquet"


def _metrics(arm: str, seed: int, num_steps: int, receipt: Receipt) -> pl.DataFrame:
    draws = np.random.default_rng(derive_seed(seed, f"metrics {arm}"))
    step = np.arange(1, num_steps + 1)
    rise = 1 - np.exp(-step / 20)
    syncs = receipt.weight_syncs
    validation = [0.6 + 0.15 * rise[n - 1] + draws.normal(0, 0.02) if n % 10 == 0 else None for n in step]
    return pl.DataFrame(
        {
            "step": step,
            "epoch": 2 * step / num_steps,
            "reward_mean": np.clip(0.45 + 0.2 * rise + draws.normal(0, 0.05, num_steps), 0, 1),
            "reward_std": np.full(num_steps, 0.4),
            "kl": 0.05 * rise + draws.normal(0, 0.002, num_steps),
            "entropy": np.full(num_steps, 0.3),
            "loss": draws.normal(0, 0.01, num_steps),
            "grad_norm": np.full(num_steps, 0.5),
            "clip_fraction": np.zeros(num_steps),
            "response_tokens_mean": np.full(num_steps, 18.0),
            "truncated_fraction": np.full(num_steps, 0.01),
            "logp_difference_mean": np.full(num_steps, 1e-3),
            "logp_difference_max": np.full(num_steps, 1e-2),
            "sampler_kl": np.full(num_steps, 1e-6),
            **dict.fromkeys(
                ("importance_ratio_mean", "router_agreement", "tokens_routed_differently"),
                pl.Series([None] * num_steps, dtype=pl.Float64),
            ),
            "sigma_requested": [sync.sigma_requested for sync in syncs] or np.zeros(num_steps),
            "sigma_measured": [sync.sigma_measured for sync in syncs] or np.zeros(num_steps),
            "validation_accuracy": pl.Series(validation, dtype=pl.Float64),
        }
    )


def _write_diagnosis(folder: Path, made_up: Study, machine: str) -> Path:
    base = folder / "srdd" / "base" / machine
    fault = next(iter(made_up.config.machines[machine].faults), None)
    layer = np.arange(NUM_LAYERS)
    faulty = (layer == fault.layer) if fault else np.zeros(NUM_LAYERS, dtype=bool)
    table = pl.DataFrame(
        {
            "layer": layer,
            "instability": np.zeros(NUM_LAYERS),
            "instability_jump_z": pl.Series([None] + [0.0] * (NUM_LAYERS - 1), dtype=pl.Float64),
            "gain": 1.3 * np.exp(-layer / 4) + 0.8 - 0.3 * faulty,
            "gain_z": np.where(faulty, -2.6, 0.3),
            "kurtosis": 4.0 + 1.5 * layer,
            "log_kurtosis_drop_z": pl.Series([None] + [0.2] * (NUM_LAYERS - 1), dtype=pl.Float64),
            "sensitivity": 0.1 * np.exp(-layer),
            "role": ["healthy"] * NUM_LAYERS,
        }
    )
    write_table(base / "layers.parquet", table, LayerTable)
    verdict = Verdict(
        verdict="fault" if fault else "healthy",
        reason="21 % of the outputs of layer 3 are exactly 0" if fault else "no scan passed its threshold",
        layer=fault.layer if fault else None,
        type=fault.type if fault else None,
        findings=(),
        forward_equivalents=66.0,
        num_layers=NUM_LAYERS,
        simulated_faults=(fault.model_dump(mode="json"),) if fault else (),
    )
    write_json(base / "verdict.json", verdict)
    sigmas = {number: 0.075 if faulty[number] else 0.05 for number in range(NUM_LAYERS)}
    aqn = LayerSigmas(
        enabled=True,
        layer_specific=True,
        base_sigma=0.05,
        layer_sigmas=sigmas,
        schedule="epoch_ranges",
        high_priority_layers=[number for number, sigma in sigmas.items() if sigma > 0.06],
    )
    reasons = {number: "low gain" for number, sigma in sigmas.items() if sigma > 0.06}
    write_yaml(
        base / "sigmas-published.yaml", SigmaFile(aqn=aqn, reasons=reasons, srdd_metadata={"num_layers": NUM_LAYERS})
    )
    return base / "verdict.json"
