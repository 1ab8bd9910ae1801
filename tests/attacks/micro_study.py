"""A study of two arms, two seeds and two optimiser steps, run by the stages themselves, once per session."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from aqnpipe.artifacts.comparisons import ClaimsFile
from aqnpipe.artifacts.files import read_json
from aqnpipe.comparison.stage import ComparisonOutputs, compare, existing_evaluations
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.run import EvaluationSpec, TrainingSpec
from aqnpipe.config.study import Study, load_study_file
from aqnpipe.data.stage import prepare_data
from aqnpipe.diagnosis import stage as diagnosis
from aqnpipe.evaluation import stage as evaluation
from aqnpipe.models.loading import prepare_model
from aqnpipe.report.inputs import inputs_of
from aqnpipe.report.stage import ReportOutputs, build_report
from aqnpipe.runtime.evaluation_workers import evaluation_runner
from aqnpipe.runtime.training import run_training_job
from aqnpipe.training.run import TrainingInputs

NOISE = {"operators": "matmul", "error": {"kind": "relative_gaussian", "scale": 0.05}}
AQN = {
    "schedule": {
        "kind": "epoch_ranges",
        "ranges": [{"sigma_start": 0.05, "sigma_end": 0.02}, {"sigma_start": 0.01, "sigma_end": 0.005}],
    },
    "layer_sigmas_from": "target",
}
STUDY: dict[str, Any] = {
    "config": {
        "study": "attacked",
        "results_dir": "results",
        "models": {"base": {"source": "tiny"}},
        "machines": {"device": {}, "target": {"faults": [{"type": "dead_zone", "layer": 3, "magnitude": 0.05}]}},
        "dataset": {"source": "generated", "num_train": 4, "num_test": 12, "max_steps": 2},
        "arms": ["baseline", "guided"],
        "seeds": [0, 1],
        "training": {
            "epochs": 2,
            "prompts_per_step": 4,
            "rollouts_per_prompt": 4,
            "micro_batch_size": 16,
            "learning_rate": 2e-4,
            "max_response_tokens": 24,
            "checkpoint_every": 1,
            "validate_every": 1,
            "validation_questions": 2,
        },
        "diagnosis": {"num_prompts": 3},
        "evaluation": {
            "noise_levels": [0.0, 0.1],
            "noise_seeds": [0],
            "max_response_tokens": 24,
            "batch_size": 12,
        },
        "statistics": {"bootstrap_samples": 200},
        "comparisons": [
            {
                "kind": "arms",
                "treatment": "guided",
                "control": "baseline",
                "expected": "higher",
                "claim": "guided AQN helps",
            },
            {"kind": "levels", "arm": "guided", "noise_level": 0.1, "claim": "noise hurts"},
            {
                "kind": "arms",
                "treatment": "baseline",
                "control": "pretrained",
                "expected": "higher",
                "claim": "training helps",
            },
        ],
        "report": {"title": "Attacked", "question": "Is it noticed?"},
    },
    "arms": {
        "baseline": {"description": "no noise"},
        "guided": {"description": "noise, and AQN by the diagnosis", "operator_noise": NOISE, "aqn": AQN},
    },
}
LAST_STEP = 2


@dataclass(frozen=True)
class MicroStudy:
    """The study in a folder, the working directory while its jobs run. Jobs do what the workflow's rules do."""

    folder: Path

    @property
    def plan(self) -> StudyPlan:
        """The jobs of the study."""
        return StudyPlan(Study.model_validate(STUDY))

    @property
    def results(self) -> Path:
        """Where the artifacts are."""
        return self.folder / "results"

    def run_folder(self, arm: str, seed: int) -> Path:
        """The files of one training run."""
        return self.results / "runs" / "base" / arm / f"seed{seed}"

    def evaluation_file(self, arm: str, seed: int, suffix: str, step: int = LAST_STEP) -> Path:
        """One file of one evaluation."""
        return self.results / "eval" / "base" / arm / f"seed{seed}" / f"step{step}.{suffix}"

    def copied(self, folder: Path) -> "MicroStudy":
        """The same study elsewhere. Its files are links: replace them, do not write into them."""
        shutil.copytree(self.folder, folder, copy_function=os.link)
        return MicroStudy(folder)

    def jobs(self) -> Iterator[Callable[[], None]]:
        """Every job of the study in an order that works."""
        yield self.prepare
        for machine in ("device", "target"):
            yield partial(self.diagnose, machine)
            yield partial(self.sigmas, machine)
        for _, arm, seed in self.plan.runs():
            yield partial(self.train, arm, seed)
        for _, arm, seed, step in self.plan.evaluations():
            yield partial(self.evaluate, arm, seed, step)
        yield self.compare
        yield self.report

    def load(self) -> None:
        """Read the study from files, as every command does first; files that are there already are taken."""
        if not Path("study.yaml").exists():
            write_study(STUDY["arms"])
        load_study_file(Path("study.yaml"))

    def prepare(self) -> None:
        """Data and model."""
        for split in ("train", "test"):
            prepare_data(STUDY["config"]["dataset"], split, Path(f"results/data/{split}.parquet"))
        prepare_model(self.plan.study.config.models["base"], Path("results/models/base"))

    def diagnose(self, machine: str) -> None:
        """Diagnose a machine."""
        config = self.plan.study.config
        diagnosis.diagnose(
            Path("results/models/base"),
            Path("results/data/train.parquet"),
            config.prompt,
            config.machines[machine],
            config.diagnosis,
            Path(f"results/srdd/base/{machine}"),
            device="cpu",
            names=("base", machine),
        )

    def sigmas(self, machine: str) -> None:
        """Per-layer sigmas of a diagnosed machine."""
        folder = Path(f"results/srdd/base/{machine}")
        diagnosis.generate_layer_sigmas(
            folder / "layers.parquet",
            folder / "verdict.json",
            self.plan.study.config.sigma_rule,
            folder / "sigmas-published.yaml",
            model="base",
            machine=machine,
        )

    def train(self, arm: str, seed: int, spec: TrainingSpec | None = None) -> None:
        """Train one run, by the study's settings or by others."""
        sigmas = self.plan.sigmas_input("base", arm)
        run_training_job(
            spec or TrainingSpec.model_validate(self.plan.training_spec(arm, seed)),
            TrainingInputs(
                Path("results/models/base"),
                Path("results/data/train.parquet"),
                Path("results/data/test.parquet"),
                Path(sigmas[0]) if sigmas else None,
            ),
            Path(f"results/runs/base/{arm}/seed{seed}"),
            Path(f"scratch/{arm}{seed}"),
            lambda _: None,
        )
        shutil.rmtree("scratch")

    def train_by_two(self, arm: str, seed: int) -> None:
        """Train one run on two workers, each a process of its own."""
        settings = self.plan.training_spec(arm, seed)
        settings["training"] |= {"num_workers": 2, "micro_batch_size": 8}
        self.train(arm, seed, TrainingSpec.model_validate(settings))

    def evaluate_by_two(self, arm: str, seed: int) -> None:
        """Evaluate the last checkpoint by two workers, each a process of its own."""
        self.evaluate(arm, seed, workers=2)

    def evaluate(
        self, arm: str, seed: int, step: int = LAST_STEP, spec: EvaluationSpec | None = None, workers: int = 1
    ) -> None:
        """Evaluate one checkpoint, by the study's settings or by others."""
        names = {"model": "base", "arm": arm, "seed": str(seed), "step": str(step)}
        folder = Path(f"results/eval/base/{arm}/seed{seed}")
        evaluation.evaluate(
            spec or EvaluationSpec.model_validate(self.plan.evaluation_spec(**names)),
            Path(self.plan.checkpoint_input(**names)).parent,
            Path("results/data/test.parquet"),
            evaluation.EvaluationOutputs(
                folder / f"step{step}.parquet", folder / f"step{step}.receipt.json", folder / f"step{step}.run.json"
            ),
            lambda _: None,
            open_runner=evaluation_runner(workers, Path("scratch/evaluation")),
        )

    def compare(self) -> None:
        """Claims."""
        compare(self.plan.study, existing_evaluations(self.plan), ComparisonOutputs.in_folder(Path("results")))

    def report(self) -> None:
        """The page."""
        build_report(self.plan.study, inputs_of(self.plan), ReportOutputs.in_folder(Path("results")))

    def invalid(self) -> list[str]:
        """Return why claims are invalid."""
        claims = read_json(self.results / "claims.json", ClaimsFile).claims
        return [f"{claim.invalid_kind}: {claim.invalid_reason}" for claim in claims if claim.invalid_kind]


def write_study(arms: dict[str, Any]) -> None:
    """Write the study as files, with these arms."""
    Path("arms.yaml").write_text(yaml.safe_dump({"arms": arms}), encoding="utf-8")
    Path("study.yaml").write_text(yaml.safe_dump({**STUDY["config"], "arms_file": "arms.yaml"}), encoding="utf-8")


def finished_study(folder: Path) -> MicroStudy:
    """Run the whole study in `folder`."""
    study = MicroStudy(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(folder):
        for job in study.jobs():
            job()
    return study
