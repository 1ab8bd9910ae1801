"""A study: everything one `snakemake` call does, validated as a whole before any job starts."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from aqnpipe.config.analysis import PRETRAINED, Comparison, ReportConfig, StatisticsConfig
from aqnpipe.config.arm import Arm, ArmsFile
from aqnpipe.config.base import FrozenModel, describe_validation_error
from aqnpipe.config.dataset import DatasetConfig, PromptFormat
from aqnpipe.config.default_comparisons import default_comparisons
from aqnpipe.config.diagnosis import DiagnosisConfig, SigmaRule
from aqnpipe.config.evaluation import EvaluationConfig
from aqnpipe.config.generation import GenerationConfig
from aqnpipe.config.loss_study import LossStudyConfig
from aqnpipe.config.model import ModelConfig, num_layers_of
from aqnpipe.config.noise import EpochAwareRanges, FakeQuantization, Machine
from aqnpipe.config.training import TrainingConfig
from aqnpipe.config.vllm_support import why_vllm_cannot_roll_out
from aqnpipe.device import RequestedDevice
from aqnpipe.errors import ConfigError, ModelError

Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
"""Names that become folder names and wildcards."""


class StudyConfig(FrozenModel):
    """The content of a study file such as `config/config.yaml`."""

    study: Identifier
    description: str = ""
    results_dir: str = Field(
        default="results", pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]*$", description="where results go"
    )
    arms_file: str = Field(default="config/arms.yaml", description="path relative to the working directory")
    models: dict[Identifier, ModelConfig] = Field(min_length=1, description="model per role (base, large)")
    machines: dict[Identifier, Machine] = Field(min_length=1, description="what is diagnosed, by name")
    dataset: DatasetConfig
    prompt: PromptFormat = PromptFormat()
    arms: tuple[str, ...] = Field(min_length=1)
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    device: RequestedDevice = Field(
        default="auto",
        description="what jobs compute on: auto (NPUs, else GPUs, else the CPU), cpu, cuda or npu; a job that does not "
        "find what was requested ends with an error",
    )
    training: TrainingConfig
    diagnosis: DiagnosisConfig = DiagnosisConfig()
    sigma_rule: SigmaRule = SigmaRule()
    generation: GenerationConfig = GenerationConfig()
    evaluation: EvaluationConfig
    loss_studies: tuple[LossStudyConfig, ...] = Field(
        default=(), description="loss studies of machines with simulated faults, without training"
    )
    statistics: StatisticsConfig = StatisticsConfig()
    comparisons: tuple[Comparison, ...] = Field(
        default=(), description="claims to test; empty: the usual ones for the arms at hand"
    )
    report: ReportConfig

    @model_validator(mode="after")
    def _no_repeats(self) -> Self:
        for name in ("arms", "seeds"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise ValueError(f"{name} must not repeat a value")
        names = [(one.model, one.name) for one in self.loss_studies]
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
            raise ValueError("dataset.num_train must state how many training questions are used: it decides the steps")
        if self.num_steps < 1:
            raise ValueError(
                f"dataset.num_train {self.dataset.num_train} gives no step of {self.training.prompts_per_step} prompts"
            )
        return self

    @property
    def num_steps(self) -> int:
        """Optimiser steps of every run."""
        return self.training.num_steps(self.dataset.num_train or 0)


class Study(FrozenModel):
    """A study together with the definitions of its arms; cross-references are checked."""

    config: StudyConfig
    arms: dict[str, Arm]

    def model_roles(self) -> list[str]:
        """Model roles that at least one arm trains, in the order of the study."""
        used = {arm.model for arm in self.arms.values()}
        return [role for role in self.config.models if role in used]

    @property
    def num_steps(self) -> int:
        """Optimiser steps of every run."""
        return self.config.num_steps

    def comparisons(self) -> tuple[Comparison, ...]:
        """The comparisons that the study declares, or the usual ones for its arms where it declares none."""
        return self.config.comparisons or default_comparisons(self.arms, self.config.evaluation.noise_levels)


def load_study(config: Mapping[str, Any], source: str = "config") -> Study:
    """Validate the merged configuration `config` (read from `source`) and the arms that it names.

    Raises ConfigError, one line: file, key, what is wrong, what was found.
    """
    study = _validate(StudyConfig, config, source)
    arms = read_arms(Path(study.arms_file))
    for problem in _cross_reference_problems(study, arms, source):
        raise ConfigError(problem)
    return Study(config=study, arms={name: arms[name] for name in study.arms})


def load_study_file(path: Path) -> Study:
    """Read and validate the study file at `path`; ConfigError in one line."""
    return load_study(_read_yaml(path), str(path))


def read_arms(path: Path) -> dict[str, Arm]:
    """Return the arms of an arms file by id; ConfigError in one line."""
    arms: dict[str, Arm] = _validate(ArmsFile, _read_yaml(path), str(path)).arms
    return arms


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping: the first one would be dropped silently."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.composer.ComposerError(None, None, f"key {key.value!r} stands twice", key.start_mark)
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


def _cross_reference_problems(study: StudyConfig, arms: Mapping[str, Arm], source: str) -> Iterator[str]:
    yield from _unknown_names(study, arms, source)
    yield from _machine_problems(study, source)
    yield from _layers_out_of_range(study, arms, source)
    yield from _attention_that_escapes(study, arms, source)
    yield from _what_vllm_cannot_compute(study, arms, source)
    yield from _schedules_that_do_not_fit(study, arms)
    yield from _comparison_problems(study, source)
    yield from _explore_problems(study, arms, source)
    yield from _aa_control_problems(study, arms)


def _unknown_names(study: StudyConfig, arms: Mapping[str, Arm], source: str) -> Iterator[str]:
    for name in study.arms:
        if name not in arms:
            yield f"{source}: arms: unknown arm {name!r}, {study.arms_file} defines {', '.join(sorted(arms))}"
            return
        arm = arms[name]
        if arm.task not in (None, study.dataset.task):
            yield (
                f"{study.arms_file}: arms.{name}.task: the arm is meant for {arm.task}, "
                f"the data set of {source} has the task {study.dataset.task}"
            )
        if arm.model not in study.models:
            yield f"{source}: models: arm {name} needs the role {arm.model!r}, found {', '.join(study.models)}"
        for machine in (arm.machine, arm.aqn.layer_sigmas_from if arm.aqn else None):
            if machine is not None and machine not in study.machines:
                yield f"{source}: machines: arm {name} needs the machine {machine!r}, found {', '.join(study.machines)}"
    if PRETRAINED in arms:
        yield f"{study.arms_file}: arms.{PRETRAINED}: this name stands for the model before training, choose another"


def _machine_problems(study: StudyConfig, source: str) -> Iterator[str]:
    known = ", ".join(study.machines)
    machine = study.evaluation.pretrained_machine
    if machine is not None and machine not in study.machines:
        yield f"{source}: evaluation.pretrained_machine: unknown machine {machine!r}, the study has {known}"
    for index, losses in enumerate(study.loss_studies):
        where = f"{source}: loss_studies.{index}"
        if losses.model not in study.models:
            yield f"{where}.model: unknown role {losses.model!r}, the study has {', '.join(study.models)}"
        if losses.machine not in study.machines:
            yield f"{where}.machine: unknown machine {losses.machine!r}, the study has {known}"
        elif not study.machines[losses.machine].faults:
            yield f"{where}.machine: {losses.machine} has no faults, expected a machine with some"
        elif set(losses.orders) != {"after_noise"} and any(
            fault.site != "layer_output" for fault in study.machines[losses.machine].faults
        ):
            yield (
                f"{where}.orders: {losses.machine} has faults at other sites than layer_output, where noise on hidden "
                "states never is; expected orders: [after_noise]"
            )


def _layers_out_of_range(study: StudyConfig, arms: Mapping[str, Arm], source: str) -> Iterator[str]:
    for role, model in study.models.items():
        try:
            num_layers = num_layers_of(model.source)
        except ModelError as error:
            yield f"{source}: models.{role}.source: {error}"
            continue
        if num_layers is None:
            continue
        for name, machine in study.machines.items():
            for index, fault in enumerate(machine.faults):
                if fault.layer >= num_layers:
                    yield (
                        f"{source}: machines.{name}.faults.{index}.layer: found {fault.layer}, "
                        f"model {role} ({model.source}) has layers 0 to {num_layers - 1}"
                    )
        for arm_name in study.arms:
            noise = arms[arm_name].operator_noise
            if noise is None or arms[arm_name].model != role:
                continue
            for key, layers in (("layers", noise.layers or ()), ("layer_scales", noise.layer_scales)):
                if max(layers, default=-1) >= num_layers:
                    yield (
                        f"{study.arms_file}: arms.{arm_name}.operator_noise.{key}: found {max(layers)}, "
                        f"model {role} ({model.source}) has layers 0 to {num_layers - 1}"
                    )


def _attention_that_escapes(study: StudyConfig, arms: Mapping[str, Arm], source: str) -> Iterator[str]:
    """Noise on the products of attention needs a model that computes them one by one, and the other way round."""
    needed = {"decomposed": "eager", "fused": "sdpa"}
    for name in study.arms:
        noise, model = arms[name].operator_noise, study.models.get(arms[name].model)
        if noise is None or model is None or not noise.is_active or isinstance(noise.error, FakeQuantization):
            continue
        if model.attention != needed[noise.attention]:
            yield (
                f"{source}: models.{arms[name].model}.attention: found {model.attention}, arm {name} has "
                f"operator_noise.attention {noise.attention} and needs {needed[noise.attention]}"
            )


def _what_vllm_cannot_compute(study: StudyConfig, arms: Mapping[str, Arm], source: str) -> Iterator[str]:
    """vLLM computes attention as one operator, so that noise at evaluation has to mean that one, and so on."""
    on_vllm = study.generation.backend == "vllm" and any(study.evaluation.noise_levels)
    for role in dict.fromkeys(arms[name].model for name in study.arms):
        if on_vllm and study.models[role].attention != "sdpa":
            yield (
                f"{source}: models.{role}.attention: found {study.models[role].attention}, generation.backend vllm "
                "needs sdpa: noise on attention as one operator"
            )
    for name in study.arms if study.generation.requested_for_rollouts == "vllm" else ():
        reason = why_vllm_cannot_roll_out(arms[name])
        if reason is not None:
            yield (
                f"{source}: arm {name}: vLLM cannot draw its rollouts: {reason}; generation.rollout_backend: "
                "transformers trains without"
            )


def _schedules_that_do_not_fit(study: StudyConfig, arms: Mapping[str, Arm]) -> Iterator[str]:
    for name in study.arms:
        aqn = arms[name].aqn
        if aqn and isinstance(aqn.schedule, EpochAwareRanges) and len(aqn.schedule.ranges) != study.training.epochs:
            yield (
                f"{study.arms_file}: arms.{name}.aqn.schedule.ranges: found {len(aqn.schedule.ranges)} ranges, "
                f"the study trains {study.training.epochs} epochs"
            )


def _comparison_problems(study: StudyConfig, source: str) -> Iterator[str]:
    known = {*study.arms, PRETRAINED}
    for index, comparison in enumerate(study.comparisons):
        where = f"{source}: comparisons.{index}"
        names = [comparison.arm] if comparison.kind == "levels" else [comparison.treatment, comparison.control]
        for name in names:
            if name not in known:
                yield f"{where}: unknown arm {name!r}, the study has {', '.join(study.arms)} and {PRETRAINED}"
        if comparison.kind != "arms" and 0.0 not in study.evaluation.noise_levels:
            yield f"{where}: compares with no noise, but evaluation.noise_levels does not hold 0.0"
        if comparison.noise_level not in study.evaluation.noise_levels:
            yield (
                f"{where}.noise_level: found {comparison.noise_level}, "
                f"the study evaluates {', '.join(map(str, study.evaluation.noise_levels))}"
            )


def _explore_problems(study: StudyConfig, arms: Mapping[str, Arm], source: str) -> Iterator[str]:
    pair, where = study.report.explore, f"{source}: report.explore"
    if pair is None:
        return
    known = {*study.arms, PRETRAINED}
    names = (pair.treatment, pair.control)
    for name in names:
        if name not in known:
            yield f"{where}: unknown arm {name!r}, the study has {', '.join(study.arms)} and {PRETRAINED}"
            return
    if pair.treatment == pair.control:
        yield f"{where}: treatment and control are both {pair.control!r}, expected two arms"
    roles = {arms[name].model for name in names if name != PRETRAINED}
    if len(roles) > 1:
        yield f"{where}: {' and '.join(names)} train different models ({', '.join(sorted(roles))})"
    if pair.noise_level not in study.evaluation.noise_levels:
        yield (
            f"{where}.noise_level: found {pair.noise_level}, "
            f"the study evaluates {', '.join(map(str, study.evaluation.noise_levels))}"
        )


def _aa_control_problems(study: StudyConfig, arms: Mapping[str, Arm]) -> Iterator[str]:
    for name in study.arms:
        target = arms[name].aa_control_of
        if target is None:
            continue
        where = f"{study.arms_file}: arms.{name}.aa_control_of"
        if target not in arms:
            yield f"{where}: unknown arm {target!r}, the file defines {', '.join(sorted(arms))}"
        elif target == name:
            yield f"{where}: an arm is no sham of itself"
        elif arms[target].model != arms[name].model:
            yield f"{where}: {target} trains the model {arms[target].model}, {name} the model {arms[name].model}"
