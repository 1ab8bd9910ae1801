"""Made-up evaluations of made-up studies, as the evaluate stage would have written them."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import made_up as made_up_files

from aqnpipe.comparison.evaluations import EvaluationInput
from aqnpipe.config.arm import Arm
from aqnpipe.config.study import Study

AQN = {"schedule": {"kind": "global", "sigma_start": 0.05, "sigma_end": 0.0005, "num_stages": 10}}
NOISE = {"error": {"kind": "relative_gaussian", "scale": 0.05}}
ARMS: dict[str, dict[str, Any]] = {
    "baseline": {"description": "no noise in training"},
    "E5": {"description": "5 % noise", "operator_noise": NOISE},
    "E5b": {"description": "E5 plus AQN", "operator_noise": NOISE, "aqn": AQN},
    "srdd_guided": {
        "description": "E5b with sigmas from a diagnosis",
        "operator_noise": NOISE,
        "aqn": AQN | {"layer_sigmas_from": "target"},
    },
    "E5b_sham": {"description": "E5b without its noise on the norms", "operator_noise": NOISE, "aa_control_of": "E5b"},
}
LOGITS = {"pretrained": -0.5, "baseline": 1.6, "E5": 1.45, "E5b": 1.48, "srdd_guided": 1.5, "E5b_sham": 1.48}


def arms(treatment: str, control: str, level: float = 0.0, expected: str | None = "higher", **more: Any) -> dict:
    names = {"kind": "arms", "treatment": treatment, "control": control, "noise_level": level}
    return names | {"claim": f"{treatment} against {control}", "expected": expected} | more


def levels(arm: str, level: float = 0.1, **more: Any) -> dict:
    return {"kind": "levels", "arm": arm, "noise_level": level, "claim": f"noise hurts {arm}"} | more


def degradation(treatment: str, control: str, level: float = 0.1, expected: str | None = "higher", **more: Any) -> dict:
    return arms(treatment, control, level, expected, **more) | {"kind": "degradation"}


COMPARISONS = [
    arms("baseline", "pretrained"),
    levels("baseline"),
    levels("E5b"),
    arms("E5", "baseline", expected="lower"),
    arms("E5b", "E5"),
    arms("srdd_guided", "E5b", 0.1),
]


def study(**changes: Any) -> Study:
    """A study of 60 steps; `changes` replace top-level keys of its file."""
    content: dict[str, Any] = {
        "study": "synthetic",
        "models": {"base": {"source": "some/model"}},
        "machines": {"device": {}, "target": {}},
        "dataset": {"source": "generated", "num_train": 480, "num_test": 400},
        "arms": ["baseline", "E5", "E5b", "srdd_guided"],
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
        "comparisons": COMPARISONS,
        "report": {"title": "Synthetic", "question": "Does it?"},
    }
    content |= changes
    return Study.model_validate(
        {"config": content, "arms": {name: Arm.model_validate(ARMS[name]) for name in content["arms"]}}
    )


@dataclass(frozen=True)
class MadeUp:
    """A study and its evaluations."""

    study: Study
    evaluations: list[EvaluationInput]

    def copied(self, source: Path, target: Path) -> "MadeUp":
        """The same evaluations below `target`, free to be changed."""
        shutil.copytree(source, target, dirs_exist_ok=True)
        moved = [
            replace(
                one,
                **{name: target / getattr(one, name).relative_to(source) for name in ("table", "receipt", "record")},
            )
            for one in self.evaluations
        ]
        return MadeUp(self.study, moved)

    def find(self, arm: str, seed: int = 0) -> EvaluationInput:
        return next(one for one in self.evaluations if (one.arm, one.seed) == (arm, seed))


def write_evaluations(folder: Path, made_up: Study, num_questions: int = 200) -> MadeUp:
    """Write every evaluation of the last steps below `folder`."""
    runs = [(arm, seed, made_up.num_steps) for arm in made_up.config.arms for seed in made_up.seeds]
    wanted = [("pretrained", 0, 0), *runs]
    return MadeUp(made_up, [write_evaluation(folder, made_up, *one, num_questions) for one in wanted])


def write_evaluation(
    folder: Path, made_up: Study, arm: str, seed: int, step: int, num_questions: int = 200
) -> EvaluationInput:
    """Write one evaluation where the study's plan has it."""
    base = folder / made_up.config.results_dir / "eval" / "base" / arm / f"seed{seed}"
    paths = [base / f"step{step}.{suffix}" for suffix in ("parquet", "receipt.json", "run.json")]
    source = EvaluationInput(*paths, "base", arm, seed, step)
    settings = {"dtype": "float32", "evaluation": {"max_response_tokens": 40, "primary_scorer": "strict"}}
    made_up_files.write_evaluation(source, made_up, LOGITS[arm], num_questions, settings)
    return source
