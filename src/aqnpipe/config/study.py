"""A study: the configuration of one workflow, validated as a whole before any job starts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from aqnpipe.config.analysis import Comparison, ReportConfig, StatisticsConfig
from aqnpipe.config.arm import Arm, ArmsFile
from aqnpipe.config.base import FrozenModel, describe_validation_error
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
from aqnpipe.device import RequestedDevice
from aqnpipe.errors import ConfigError

Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
"""A name that is used as a folder name and as a wildcard of the workflow."""


class StudyConfig(FrozenModel):
    """Content of a study file such as `config/config.yaml`."""

    study: Identifier
    description: str = ""
    results_dir: str = Field(
        default="results", pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]*$", description="folder of the results"
    )
    arms_file: str = Field(
        default="config/arms.yaml", description="file of the arms, relative to the working directory"
    )
    models: dict[Identifier, ModelConfig] = Field(min_length=1, description="model per role (base, large)")
    machines: dict[Identifier, Machine] = Field(min_length=1, description="machines to diagnose, by name")
    dataset: DatasetConfig
    prompt: PromptFormat = PromptFormat()
    arms: tuple[str, ...] = Field(min_length=1)
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
            raise ValueError(f"results_dir {self.results_dir!r} leaves the working directory, expected a folder in it")
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

    Raises ConfigError with the first problem: file, key, what was found and what is expected.
    """
    study = _validate(StudyConfig, config, source)
    arms = read_arms(Path(study.arms_file))
    for problem in cross_reference_problems(study, arms, source):
        raise ConfigError(problem)
    return Study(config=study, arms={name: arms[name] for name in study.arms})


def load_study_file(path: Path) -> Study:
    """Read and validate the study file at `path`; ConfigError if it is missing or invalid."""
    return load_study(_read_yaml(path), str(path))


def read_arms(path: Path) -> dict[str, Arm]:
    """Return the arms of an arms file by id; ConfigError if it is missing or invalid."""
    arms: dict[str, Arm] = _validate(ArmsFile, _read_yaml(path), str(path)).arms
    return arms


class _StrictLoader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys; plain YAML would silently drop the first one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.composer.ComposerError(None, None, f"duplicate key {key.value!r}", key.start_mark)
                seen.add(key.value)
        return node


def _read_yaml(path: Path) -> Any:
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error


def _validate(model: type[Any], content: Any, source: str) -> Any:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"{source}: {describe_validation_error(error)}") from error
