"""A study: the configuration of one workflow, validated as a whole before any job starts."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field

from aqnpipe.config.analysis import (
    PRETRAINED,
    AdaptiveSeeds,
    Comparison,
    ReportConfig,
    Seeds,
    StatisticsConfig,
    all_pairs,
    default_comparisons,
    seed_numbers,
)
from aqnpipe.config.arm import Arm, ArmsFile
from aqnpipe.config.base import EACH_ONCE, FrozenModel, Identifier
from aqnpipe.config.cross_references import cross_reference_problems
from aqnpipe.config.custom_code import located
from aqnpipe.config.dataset import DatasetConfig, LmEvalDataset, PromptFormat
from aqnpipe.config.diagnosis import DiagnosisConfig, SigmaRule
from aqnpipe.config.evaluation import StudyEvaluationConfig, with_numbered_noises
from aqnpipe.config.generation import GenerationConfig
from aqnpipe.config.model import CheckpointConfig, ModelConfig
from aqnpipe.config.noise import LayerSigmas, Machine
from aqnpipe.config.run import LossStudyConfig
from aqnpipe.config.training import Keep, TrainingConfig
from aqnpipe.config.validation_messages import FOLDER_PATTERN
from aqnpipe.config.yaml_file import read_yaml_file, typed_scalars, validated
from aqnpipe.device import DeviceKind, RequestedDevice
from aqnpipe.errors import ConfigError

_ARMS_FILE = "arms.yaml"

CHECKPOINTS: Literal["checkpoints"] = "checkpoints"
"""The role of given checkpoints: the folder of their evaluations, and the heading of their results."""

_MOST_STEPS = 10_000_000
_MOST_EVALUATIONS = 1_000_000

_PROJECT_FOLDERS = frozenset(("config", "profiles", "src", "workflow"))
_CLONE_FOLDERS = _PROJECT_FOLDERS | {"benchmarks", "containers", "docs", "examples", "tests"}
"""Folders of the project in a clone; in any other folder those that are not in `_PROJECT_FOLDERS` are the user's."""
_OF_VAR = tuple(f"var/{name}" for name in ("backups", "cache", "lib", "local", "lock", "log", "mail", "opt", "spool"))
_SYSTEM_FOLDERS = ("bin", "boot", "dev", "etc", "lib", "lib64", "proc", "run", "sbin", "sys", "usr", *_OF_VAR)
_SHARED_FOLDERS = ("home", "media", "mnt", "opt", "opt/*", "srv", "tmp", "var", "var/tmp")
"""Folders that others have theirs in: results may be in them, but they are no folder of results."""
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a disk in memory, where results may be


class _SharedSettings(FrozenModel):
    """Settings that every study has."""

    study: Identifier
    description: str = ""
    results_dir: str = Field(default="results", pattern=FOLDER_PATTERN)
    """folder of the results: below the working directory, or absolute"""
    dataset: DatasetConfig
    prompt: PromptFormat = PromptFormat()
    device: RequestedDevice = "auto"
    """device of all jobs: auto (NPUs, else GPUs, else the CPU), cpu, cuda or npu; a job that does not find the
    requested device fails"""
    generation: GenerationConfig = GenerationConfig()
    evaluation: StudyEvaluationConfig
    statistics: StatisticsConfig = StatisticsConfig()
    comparisons: tuple[Comparison, ...] = ()
    """comparisons to test; empty: the usual ones for the arms, or all pairs of checkpoints"""
    report: ReportConfig

    def _problems(self) -> Iterator[str]:
        primary = [f"comparisons.{index}" for index, claim in enumerate(self.comparisons) if claim.role == "primary"]
        if len(primary) > 1:
            yield f"{primary[1]}.role: found a second primary claim, expected one ({primary[0]} is primary)"
        # Holm's adjustment would count a claim twice.
        first: dict[str, int] = {}
        for index, claim in enumerate(self.comparisons):
            tested = claim.model_dump_json(exclude={"claim", "claim_zh", "role"})
            if first.setdefault(tested, index) != index:
                yield (
                    f"comparisons.{index}: found the comparison of comparisons.{first[tested]} again, expected another "
                    "one: a group would count it twice"
                )
        if self.statistics.compared_levels != "highest" and (self.comparisons or not isinstance(self, StudyConfig)):
            yield (
                "statistics.compared_levels: has no effect here, it is for the usual comparisons of arms; name the "
                "noise_level of each comparison"
            )
        if ".." in Path(self.results_dir).parts:
            yield f"results_dir: found {self.results_dir!r}, expected a folder below this one or an absolute path"
        # Jobs delete their outputs before they run.
        target, here = Path(self.results_dir).resolve(), Path.cwd().resolve()
        home = Path(os.path.expanduser("~")).resolve()
        # A working directory or a home may be in a folder of the system, as /usr/src/app in many containers.
        is_free = any(folder.name and folder in target.parents for folder in (here, home, _SHARED_MEMORY))
        is_of_system = not is_free and any(target.is_relative_to(f"/{folder}") for folder in _SYSTEM_FOLDERS)
        folders = _CLONE_FOLDERS if (here / "src" / "aqnpipe").is_dir() else _PROJECT_FOLDERS
        is_of_project = target == here or any(target.is_relative_to(here / folder) for folder in folders)
        is_shared = not is_free and any(target.match(f"/{folder}") for folder in _SHARED_FOLDERS)
        if is_of_project or is_of_system or is_shared or home.is_relative_to(target):
            owner = "project" if is_of_project else "system" if is_of_system else "machine or its user"
            yield f"results_dir: found {self.results_dir!r}, a folder of the {owner}, expected another one"


class StudyConfig(_SharedSettings):
    """Content of a study file such as `config/config.yaml`: arms are trained, evaluated and compared."""

    arms_file: str = _ARMS_FILE
    """file of the arms, relative to the folder of the study file"""
    models: dict[Identifier, ModelConfig] = Field(min_length=1)
    """the models by name (base, large)"""
    machines: dict[Identifier, Machine]
    """machines to diagnose, by name"""
    arms: Annotated[tuple[Identifier, ...], EACH_ONCE] = Field(min_length=1)
    seeds: Seeds
    """training seeds of every arm, or a rule by which seeds are added until the claims are decided"""
    training: TrainingConfig | None
    keep: Keep = "all"
    """weights of each run that stay once all its checkpoints are evaluated and their receipts accepted: after the last
    step, after the best one (most accurate at the lowest noise level), or all"""
    diagnosis: DiagnosisConfig = DiagnosisConfig()
    sigma_rule: SigmaRule = SigmaRule()
    loss_studies: tuple[LossStudyConfig, ...] = ()
    """loss studies of machines with simulated faults; they need no training"""

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        names = [(loss_study.model, loss_study.name) for loss_study in self.loss_studies]
        if len(set(names)) != len(names):
            yield "loss_studies must not repeat a name"
        for index, claim in enumerate(self.comparisons):
            if self.training and claim.equivalent_within is not None and not isinstance(self.seeds, AdaptiveSeeds):
                yield (
                    f"comparisons.{index}.equivalent_within: needs adaptive seeds (start, step, max); for fixed seeds "
                    "use test: equivalence with a margin"
                )
        if self.training is None:
            return
        if isinstance(self.dataset, LmEvalDataset):
            yield (
                "dataset.source: found lm_eval, expected generated, local or hub: nothing can be trained on a task of "
                "lm-evaluation-harness; a study with checkpoints can use it"
            )
        if self.dataset.num_train is None:
            yield "dataset.num_train is null, expected a number: it determines the number of steps"
        if self.num_steps < 1:
            yield (
                f"dataset.num_train is {self.dataset.num_train}, expected at least one step of "
                f"{self.training.prompts_per_step} prompts"
            )
        if self.num_steps > _MOST_STEPS:
            yield f"training.epochs: a run would have {self.num_steps:,} steps, expected at most {_MOST_STEPS:,}"
        every = self.training.checkpoint_every
        checkpoints = self.num_steps // every if every else 1
        evaluations = len(self.arms) * len(seed_numbers(self.seeds)) * checkpoints
        if evaluations > _MOST_EVALUATIONS:
            yield (
                f"training.checkpoint_every: {evaluations:,} checkpoints would be evaluated, expected at most "
                f"{_MOST_EVALUATIONS:,}"
            )

    @property
    def num_steps(self) -> int:
        """Optimiser steps of every run."""
        return self.training.num_steps(self.dataset.num_train or 0) if self.training else 0

    def device_of(self, machine: str) -> RequestedDevice:
        """Return the device of a machine: its own, else that of the study."""
        return self.machines[machine].device or self.device

    def other_kind(self, machine: str | None) -> DeviceKind | None:
        """Return the kind of device of a machine if it is another than the study's; None: it is the study's.

        The jobs of such a machine are rules of their own, one per kind of device, so that a profile gives each the
        resources of its device: a study may diagnose on an NPU and train on GPUs.
        """
        own = None if machine is None else self.machines[machine].device
        return None if own == self.device else own

    def by_kind(self, machines: Iterable[str]) -> dict[DeviceKind | None, tuple[str, ...]]:
        """Return the machines by `other_kind`, each once; the key None is always there."""
        found: dict[DeviceKind | None, tuple[str, ...]] = {None: ()}
        for machine in dict.fromkeys(machines):
            kind = self.other_kind(machine)
            found[kind] = (*found.get(kind, ()), machine)
        return found


class CheckpointStudyConfig(_SharedSettings):
    """Content of a study file with `checkpoints`: existing models are evaluated and compared, nothing is trained."""

    checkpoints: dict[Identifier, CheckpointConfig] = Field(min_length=1)
    """model per name: a folder, a hub id, a built-in model, or these with revision, dtype and attention"""
    machines: dict[Identifier, Machine] = Field(default={})
    """machines for evaluation.pretrained_machine, by name"""

    def as_study(self) -> StudyConfig:
        """Return the study of these checkpoints as its arms: each a model of its own, with one seed and no training."""
        shared = {name: getattr(self, name) for name in _SharedSettings.model_fields}
        models, arms = dict(self.checkpoints), tuple(self.checkpoints)
        return StudyConfig.model_construct(
            **shared, machines=self.machines, models=models, arms=arms, seeds=(0,), training=None
        )


class Study(FrozenModel):
    """A study with the definitions of its arms; `load_study` checks its cross-references.

    In a study of checkpoints, each checkpoint is an arm without settings, of the role `checkpoints`. `seeds_per_arm`:
    number of seeds of each arm so far, in a study that adds seeds; null: those before its first look.
    """

    config: StudyConfig
    arms: dict[str, Arm]
    seeds_per_arm: dict[str, int] | None = None

    @property
    def has_training(self) -> bool:
        """Return whether arms are trained; otherwise the study evaluates given checkpoints."""
        return self.config.training is not None

    def model_roles(self) -> list[str]:
        """Return the model roles of the arms, in the order of the study; `checkpoints` in a study of these."""
        if not self.has_training:
            return [CHECKPOINTS]
        used = {arm.model for arm in self.arms.values()}
        return [role for role in self.config.models if role in used]

    def models(self) -> dict[str, ModelConfig]:
        """Return the models that are prepared: those of the roles that arms train, or the checkpoints, by name."""
        return {name: self.config.models[name] for name in (self.model_roles() if self.has_training else self.arms)}

    def evaluated_arms(self, role: str) -> list[str]:
        """Return what is evaluated of a role: the model before training, if there is training, and the arms."""
        arms = [name for name, arm in self.arms.items() if arm.model == role]
        return [PRETRAINED, *arms] if self.has_training else arms

    @property
    def seeds(self) -> tuple[int, ...]:
        """The training seeds that at least one arm has."""
        return max((self.seeds_of(arm) for arm in self.arms), key=len)

    def seeds_of(self, arm: str) -> tuple[int, ...]:
        """Return the training seeds of an arm; in a study that adds seeds, those that it has so far."""
        rule = self.config.seeds
        if not isinstance(rule, AdaptiveSeeds):
            return rule
        return tuple(range(rule.start if self.seeds_per_arm is None else self.seeds_per_arm[arm]))

    @property
    def adaptive_seeds(self) -> AdaptiveSeeds | None:
        """The rule by which seeds are added; None if they are fixed."""
        return self.config.seeds if isinstance(self.config.seeds, AdaptiveSeeds) else None

    def with_seeds(self, number: int) -> "Study":
        """Return this study with the fixed seeds 0 to number - 1."""
        return self.model_copy(update={"config": self.config.model_copy(update={"seeds": tuple(range(number))})})

    def with_seeds_per_arm(self, seeds_per_arm: Mapping[str, int]) -> "Study":
        """Return this study, which adds seeds, with the number of seeds that each arm has so far."""
        return self.model_copy(update={"seeds_per_arm": dict(seeds_per_arm)})

    @property
    def num_steps(self) -> int:
        """Optimiser steps of every run."""
        return self.config.num_steps

    def comparisons(self) -> tuple[Comparison, ...]:
        """Return the declared comparisons or, if the study declares none, the usual ones."""
        if self.config.comparisons:
            return self.config.comparisons
        levels, names = self.config.evaluation.noise_levels, self.config.evaluation.noise_names()
        if self.has_training:
            every_level = self.config.statistics.compared_levels == "all"
            return default_comparisons(self.arms, levels, names, every_level=every_level)
        return all_pairs(tuple(self.arms), levels, names)


def load_study(config: Mapping[str, Any], source: str = "config") -> Study:
    """Validate the merged configuration `config` (read from `source`) and its arms.

    Raises ConfigError with the mistakes on one line: file, key, what was found and what is expected.
    """
    content = with_numbered_noises(config, source)
    study, arms = (_checkpoints_in if "checkpoints" in content else _arms_in)(content, source)
    for problem in cross_reference_problems(study, arms, source):
        raise ConfigError(problem)
    return Study(config=study, arms={name: arms[name] for name in study.arms})


def _arms_in(content: Mapping[str, Any], source: str) -> tuple[StudyConfig, dict[str, Arm]]:
    """Return a study that trains, and the arms of its file, with noise on attention as their models compute it."""
    study = validated(StudyConfig, content, source)
    for key, expected in (("training", "a mapping of keys"), ("machines", "at least 1 entries")):
        if not (found := getattr(study, key)):
            raise ConfigError(f"{source}: {key}: found {'null' if found is None else found}, expected {expected}")
    models, arms = study.models, read_arms(Path(study.arms_file))
    # Arms of other studies stay as they are.
    return study, {
        name: arm.on_attention(models[arm.model].attention) if arm.model in models else arm
        for name, arm in arms.items()
    }


def _checkpoints_in(content: Mapping[str, Any], source: str) -> tuple[StudyConfig, dict[str, Arm]]:
    """Return a study of checkpoints, and these as arms."""
    for key in content:
        if key in StudyConfig.model_fields and key not in CheckpointStudyConfig.model_fields:
            raise ConfigError(
                f"{source}: {key}: not in a study with checkpoints, which trains nothing (remove {key} or checkpoints)"
            )
    study = validated(CheckpointStudyConfig, _graded_by_task(content), source).as_study()
    return study, {name: Arm(description=model.source, model=CHECKPOINTS) for name, model in study.models.items()}


def _graded_by_task(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the content of a study with the scorer of a task of lm-evaluation-harness, unless it names one."""
    dataset, evaluation = config.get("dataset"), config.get("evaluation")
    if not isinstance(dataset, Mapping) or dataset.get("source") != "lm_eval" or not isinstance(evaluation, Mapping):
        return config
    return {**config, "evaluation": {"primary_scorer": "task", **evaluation}}


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
        merged = _extended(merged, _located(_with_arms_file(read_study_file(path), path), path.parent))
    names = [*map(str, paths), *(["--config"] if overrides else [])]
    content = _extended(merged, typed_scalars(overrides))
    usual = {} if "checkpoints" in content else {"arms_file": _beside(paths[0], _ARMS_FILE)}
    return load_study({**usual, **content}, ", ".join(names))


def shown_path(path: Path) -> Path:
    """Return the path relative to the working directory if it is below it; Snakemake makes every path absolute."""
    try:
        return path.absolute().relative_to(Path.cwd())
    except ValueError:
        return path


def read_study_file(path: Path) -> Mapping[str, Any]:
    """Return the keys of a study file, not validated; ConfigError if it cannot be read or has none."""
    content = read_yaml_file(path)
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: found {'nothing' if content is None else 'no keys'}, expected the keys of a study")
    return content


def read_arms(path: Path) -> dict[str, Arm]:
    """Return the arms of an arms file by id; ConfigError if it is missing or invalid."""
    return validated(ArmsFile, _located(read_yaml_file(path), path.parent), str(path)).arms


def _with_arms_file(content: Mapping[str, Any], study_file: Path) -> Mapping[str, Any]:
    """Return the content of a study file with the path of its arms file, if it names one."""
    name = content.get("arms_file")
    return {**content, "arms_file": _beside(study_file, name)} if isinstance(name, str) else content


def _located(content: Any, folder: Path) -> Any:
    """Return the content of a file in `folder` with the folder of each function whose module is beside it.

    Files of sigmas are read, and `attention: auto` of operator noise is left out, which is what it stands for.
    """
    if isinstance(content, list):
        return [_located(part, folder) for part in content]
    if not isinstance(content, Mapping):
        return content
    # Settings of a function are the user's, whatever their names.
    found = {key: part if key == "settings" else _located(part, folder) for key, part in content.items()}
    for key in ("function", "primary_scorer"):
        if isinstance(found.get(key), str):
            found[key] = located(found[key], folder)
    aqn, noise = found.get("aqn"), found.get("operator_noise")
    if isinstance(aqn, dict) and isinstance(aqn.get("sigmas"), str):
        aqn["sigmas"] = _aqn_section(folder / aqn["sigmas"])
    if isinstance(noise, dict) and noise.get("attention") == "auto":
        del noise["attention"]
    return found


def _aqn_section(path: Path) -> Any:
    """Return the section `aqn` of a file of sigmas, not validated; ConfigError if it has none."""
    content = read_yaml_file(path)
    if not isinstance(content, Mapping) or not isinstance(content.get("aqn"), Mapping):
        raise ConfigError(f"{path}: found no section aqn, expected aqn with base_sigma and layer_sigmas")
    validated(LayerSigmas, content["aqn"], f"{path}: aqn")
    return content["aqn"]


def _beside(study_file: Path, name: str) -> str:
    """Return the path of a file that a study file names, relative to the working directory or absolute."""
    return os.path.normpath(study_file.parent / name)


def _extended(base: Any, addition: Any) -> Any:
    """Return `base` with the keys of `addition`; mappings are merged, anything else is replaced."""
    if not isinstance(base, Mapping) or not isinstance(addition, Mapping):
        return addition
    return {**base, **{key: _extended(base.get(key), value) for key, value in addition.items()}}
