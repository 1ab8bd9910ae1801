"""A study: the configuration of one workflow, validated as a whole before any job starts."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from aqnpipe.config.analysis import Comparison, ReportConfig, StatisticsConfig
from aqnpipe.config.arm import Arm, ArmsFile
from aqnpipe.config.base import FrozenModel, Identifier
from aqnpipe.config.cross_references import cross_reference_problems
from aqnpipe.config.dataset import DatasetConfig, PromptFormat
from aqnpipe.config.default_comparisons import default_comparisons
from aqnpipe.config.diagnosis import DiagnosisConfig, SigmaRule
from aqnpipe.config.evaluation import EvaluationConfig
from aqnpipe.config.generation import GenerationConfig
from aqnpipe.config.loss_study import LossStudyConfig
from aqnpipe.config.model import ModelConfig
from aqnpipe.config.noise import Machine
from aqnpipe.config.training import TrainingConfig
from aqnpipe.config.validation_messages import FOLDER_PATTERN
from aqnpipe.config.yaml_file import load_yaml, read_yaml_file, typed_scalars, validated
from aqnpipe.device import RequestedDevice
from aqnpipe.errors import ConfigError

_ARMS_FILE = "arms.yaml"
_MOST_STEPS = 10_000_000
_MOST_EVALUATIONS = 1_000_000


class StudyConfig(FrozenModel):
    """Content of a study file such as `config/config.yaml`."""

    study: Identifier
    description: str = ""
    results_dir: str = Field(
        default="results",
        pattern=FOLDER_PATTERN,
        description="folder of the results: below the working directory, or absolute",
    )
    arms_file: str = Field(default=_ARMS_FILE, description="file of the arms, relative to the folder of the study file")
    models: dict[Identifier, ModelConfig] = Field(min_length=1, description="model per role (base, large)")
    machines: dict[Identifier, Machine] = Field(min_length=1, description="machines to diagnose, by name")
    dataset: DatasetConfig
    prompt: PromptFormat = PromptFormat()
    arms: tuple[Identifier, ...] = Field(min_length=1)
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    device: RequestedDevice = Field(
        default="auto",
        description="device of all jobs: auto (NPUs, else GPUs, else the CPU), cpu, cuda or npu; a job that does not "
        "find the requested device fails",
    )
    training: TrainingConfig
    diagnosis: DiagnosisConfig = DiagnosisConfig()
    sigma_rule: SigmaRule = SigmaRule()
    generation: GenerationConfig = GenerationConfig()
    evaluation: EvaluationConfig
    loss_studies: tuple[LossStudyConfig, ...] = Field(
        default=(), description="loss studies of machines with simulated faults; they need no training"
    )
    statistics: StatisticsConfig = StatisticsConfig()
    comparisons: tuple[Comparison, ...] = Field(
        default=(), description="comparisons to test; empty: the usual ones for the arms"
    )
    report: ReportConfig

    @model_validator(mode="after")
    def _no_repeats(self) -> Self:
        for name in ("arms", "seeds"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise ValueError(f"{name} must not repeat a value")
        names = [(loss_study.model, loss_study.name) for loss_study in self.loss_studies]
        if len(set(names)) != len(names):
            raise ValueError("loss_studies must not repeat a name")
        return self

    @model_validator(mode="after")
    def _results_stay_here(self) -> Self:
        if ".." in self.results_dir.split("/"):
            raise ValueError(
                f"results_dir: found {self.results_dir!r}, expected a folder below this one or an absolute path"
            )
        return self

    @model_validator(mode="after")
    def _training_has_steps(self) -> Self:
        if self.dataset.num_train is None:
            raise ValueError("dataset.num_train is null, expected a number: it determines the number of steps")
        if self.num_steps < 1:
            raise ValueError(
                f"dataset.num_train is {self.dataset.num_train}, expected at least one step of "
                f"{self.training.prompts_per_step} prompts"
            )
        return self

    @model_validator(mode="after")
    def _can_be_planned(self) -> Self:
        if self.num_steps > _MOST_STEPS:
            raise ValueError(
                f"training.epochs: a run would have {self.num_steps:,} steps, expected at most {_MOST_STEPS:,}"
            )
        checkpoints = self.num_steps // (self.training.checkpoint_every or self.num_steps)
        evaluations = len(self.arms) * len(self.seeds) * checkpoints
        if evaluations > _MOST_EVALUATIONS:
            raise ValueError(
                f"training.checkpoint_every: {evaluations:,} checkpoints would be evaluated, expected at most "
                f"{_MOST_EVALUATIONS:,}"
            )
        return self

    @property
    def num_steps(self) -> int:
        """Optimiser steps of every run."""
        return self.training.num_steps(self.dataset.num_train or 0)


class Study(FrozenModel):
    """A study with the definitions of its arms; `load_study` checks its cross-references."""

    config: StudyConfig
    arms: dict[str, Arm]

    def model_roles(self) -> list[str]:
        """Return the model roles that at least one arm trains, in the order of the study."""
        used = {arm.model for arm in self.arms.values()}
        return [role for role in self.config.models if role in used]

    @property
    def num_steps(self) -> int:
        """Optimiser steps of every run."""
        return self.config.num_steps

    def comparisons(self) -> tuple[Comparison, ...]:
        """Return the declared comparisons or, if the study declares none, the usual ones for its arms."""
        return self.config.comparisons or default_comparisons(self.arms, self.config.evaluation.noise_levels)


def load_study(config: Mapping[str, Any], source: str = "config") -> Study:
    """Validate the merged configuration `config` (read from `source`) and its arms.

    Raises ConfigError with the mistakes on one line: file, key, what was found and what is expected.
    """
    study = validated(StudyConfig, config, source)
    arms = read_arms(Path(study.arms_file))
    for problem in cross_reference_problems(study, arms, source):
        raise ConfigError(problem)
    return Study(config=study, arms={name: arms[name] for name in study.arms})


def load_study_file(path: Path) -> Study:
    """Read and validate the study file at `path`; ConfigError if it is missing or invalid."""
    return load_study_files([path])


def load_study_files(paths: Sequence[Path], overrides: Mapping[str, Any] = MappingProxyType({})) -> Study:
    """Read and validate a study: later files extend earlier ones, and `overrides` both, key by key as in Snakemake.

    A relative `arms_file` is relative to the folder of the file that names it, and without one it is `arms.yaml` beside
    the first. Raises ConfigError if a file is missing or the study is invalid.
    """
    merged: Any = {}
    for path in paths:
        merged = _extended(merged, _with_own_arms(read_study_file(path), path))
    names = [*map(str, paths), *(["--config"] if overrides else [])]
    content = _extended(merged, typed_scalars(overrides))
    return load_study({"arms_file": _beside(paths[0], _ARMS_FILE), **content}, ", ".join(names))


def read_study_file(path: Path) -> Mapping[str, Any]:
    """Return the keys of a study file, not validated; ConfigError if it cannot be read or has none."""
    content = read_yaml_file(path)
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: found {'nothing' if content is None else 'no keys'}, expected the keys of a study")
    return content


def read_arms(path: Path) -> dict[str, Arm]:
    """Return the arms of an arms file by id; ConfigError if it is missing or invalid."""
    return load_yaml(path, ArmsFile).arms


def _with_own_arms(content: Mapping[str, Any], study_file: Path) -> Mapping[str, Any]:
    """Return the content of a study file with the path of its arms file, if it names one."""
    name = content.get("arms_file")
    return {**content, "arms_file": _beside(study_file, name)} if isinstance(name, str) else content


def _beside(study_file: Path, name: str) -> str:
    """Return the path of a file that a study file names, relative to the working directory or absolute."""
    return os.path.normpath(study_file.parent / name)


def _extended(base: Any, addition: Any) -> Any:
    """Return `base` with the keys of `addition`; mappings are merged, anything else is replaced."""
    if not isinstance(base, Mapping) or not isinstance(addition, Mapping):
        return addition
    return {**base, **{key: _extended(base.get(key), value) for key, value in addition.items()}}
