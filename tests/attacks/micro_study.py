"""Small studies, run by the stages themselves, once per session."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import worker_processes
import yaml
from random_models import random_mixture_of
from study_variants import VARIANTS
from tiny_tokenizer import build_tokenizer

from aqnpipe.artifacts.comparisons import ClaimsFile
from aqnpipe.artifacts.files import read_json
from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.comparison.stage import compare, existing_evaluations
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.run import EvaluationSpec, TrainingSpec
from aqnpipe.config.study import Study, load_study_file
from aqnpipe.data.stage import prepare_data
from aqnpipe.diagnosis import stage as diagnosis
from aqnpipe.errors import RunInterruptedError
from aqnpipe.evaluation import stage as evaluation
from aqnpipe.models.loading import prepare_model
from aqnpipe.report.inputs import read_study
from aqnpipe.report.stage import build_report
from aqnpipe.runtime import training as runtime
from aqnpipe.runtime.evaluation_workers import evaluation_runner
from aqnpipe.runtime.training import run_training_job
from aqnpipe.training.resume import ResumePoints
from aqnpipe.training.run import TrainingInputs


@dataclass(frozen=True)
class MicroStudy:
    """A study in a folder, the working directory while its jobs run. Jobs do what the workflow's rules do."""

    folder: Path
    variant: str = "attacked"

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration of the study, and its arms."""
        return VARIANTS[self.variant]

    @property
    def plan(self) -> StudyPlan:
        """The jobs of the study."""
        with contextlib.chdir(self.folder):
            return StudyPlan(Study.model_validate(self.settings))

    @property
    def last_step(self) -> int:
        """The last optimiser step of every run."""
        return self.plan.num_steps

    @property
    def results(self) -> Path:
        """Where the artifacts are."""
        return self.folder / "results"

    def run_folder(self, arm: str, seed: int) -> Path:
        """The files of one training run."""
        return self.results / "runs" / "base" / arm / f"seed{seed}"

    def evaluation_file(self, arm: str, seed: int, suffix: str, step: int | None = None) -> Path:
        """One file of one evaluation, of the last step if `step` is None."""
        step = self.last_step if step is None else step
        return self.results / "eval" / "base" / arm / f"seed{seed}" / f"step{step}.{suffix}"

    def copied(self, folder: Path) -> "MicroStudy":
        """The same study elsewhere. Its files are links: replace them, do not write into them."""
        shutil.copytree(self.folder, folder, copy_function=os.link)
        return MicroStudy(folder, self.variant)

    def jobs(self) -> Iterator[Callable[[], None]]:
        """Every job of the study in an order that works; of a variant, those that its sabotages need."""
        is_whole = self.variant == "attacked"
        yield self.prepare
        for machine in self.plan.study.config.machines if is_whole else ():
            yield partial(self.diagnose, machine)
            yield partial(self.sigmas, machine)
        for _, arm, seed in self.plan.runs():
            yield partial(self.train, arm, seed)
        for _, arm, seed, step in self.plan.evaluations():
            yield partial(self.evaluate, arm, seed, step)
        yield self.compare
        if is_whole:
            yield self.report

    def load(self) -> None:
        """Read the study from files, as every command does first; files that are there already are taken."""
        if not Path("study.yaml").exists():
            self.write(self.settings["arms"])
        load_study_file(Path("study.yaml"))

    def prepare(self) -> None:
        """Data and model."""
        for split in ("train", "test"):
            prepare_data(self.settings["config"]["dataset"], split, Path(f"results/data/{split}.parquet"))
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

    def train_with_a_stop(self, arm: str, seed: int) -> None:
        """Train one run, stop it when its half is done, and train on from the resume point."""
        half, on_step_end = self.last_step // 2, ResumePoints.on_step_end

        def stop(callback: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == half:
                callback._workspace.stop_file.touch()
            on_step_end(callback, args, state, control, **kwargs)

        with mock.patch.object(ResumePoints, "on_step_end", stop), pytest.raises(RunInterruptedError):
            self.train(arm, seed)
        self.train(arm, seed)

    def train_in_two_processes(self, arm: str, seed: int) -> None:
        """Train one run on two workers, each a process that knows of the sabotage."""
        with mock.patch.object(runtime, "launch_workers", worker_processes.launch):
            self.train_by_two(arm, seed)

    def train_by_two(self, arm: str, seed: int) -> None:
        """Train one run on two workers, each a process of its own."""
        settings = self.plan.training_spec(arm, seed)
        settings["training"] |= {"num_workers": 2, "micro_batch_size": 8}
        self.train(arm, seed, TrainingSpec.model_validate(settings))

    def evaluate_by_two(self, arm: str, seed: int) -> None:
        """Evaluate the last checkpoint by two workers, each a process of its own."""
        self.evaluate(arm, seed, workers=2)

    def evaluate(
        self, arm: str, seed: int, step: int | None = None, spec: EvaluationSpec | None = None, workers: int = 1
    ) -> None:
        """Evaluate one checkpoint (the last if `step` is None), by the study's settings or by others."""
        step = self.last_step if step is None else step
        names = {"model": "base", "arm": arm, "seed": str(seed), "step": str(step)}
        folder = Path(f"results/eval/base/{arm}/seed{seed}")
        evaluation.evaluate(
            spec or EvaluationSpec.model_validate(self.plan.evaluation_spec(**names)),
            Path(self.plan.checkpoint_input(**names)).parent,
            Path("results/data/test.parquet"),
            evaluation.StageFiles(
                folder / f"step{step}.parquet", folder / f"step{step}.receipt.json", folder / f"step{step}.run.json"
            ),
            lambda _: None,
            Path(*self.plan.examples_input()) if self.plan.examples_input() else None,
            open_runner=evaluation_runner(workers, Path("scratch/evaluation")),
        )

    def compare(self) -> None:
        """Claims."""
        compare(self.plan.study, existing_evaluations(self.plan), Path("results"))

    def report(self) -> None:
        """The page."""
        build_report(self.plan.study, read_study(self.plan), Path("results"))

    def write(self, arms: dict[str, Any]) -> None:
        """Write the study as files, with these arms."""
        Path("arms.yaml").write_text(yaml.safe_dump({"arms": arms}), encoding="utf-8")
        study = yaml.safe_dump({**self.settings["config"], "arms_file": "arms.yaml"})
        Path("study.yaml").write_text(study, encoding="utf-8")

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of all files of the study, by their paths in it."""
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        return {str(path.relative_to(self.folder)): sha256_of_file(path) for path in files}

    def invalid(self) -> list[str]:
        """Return why claims are invalid."""
        claims = read_json(self.results / "claims.json", ClaimsFile).claims
        return [f"{claim.invalid_kind}: {claim.invalid_reason}" for claim in claims if claim.invalid_kind]


def finished_study(folder: Path, variant: str = "attacked") -> MicroStudy:
    """Run a whole study in `folder`."""
    study = MicroStudy(folder, variant)
    folder.mkdir(parents=True, exist_ok=True)
    if variant == "mixture":
        write_mixture(folder / "mixture")
    with contextlib.chdir(folder):
        for job in study.jobs():
            job()
    return study


def write_mixture(folder: Path) -> None:
    """Write a small mixture of experts with random weights and the built-in tokenizer."""
    tokenizer = build_tokenizer()
    model = random_mixture_of(
        "qwen3_moe",
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        max_position_embeddings=256,
        router_aux_loss_coef=0.0,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
