"""Opens a study: `aqnpipe check`, `aqnpipe report` and the Snakefile use this function, so they never disagree.

A study is refused for mistakes in its files, and if questions, chat templates or published figures that it needs are
missing. Otherwise a job would find out minutes later.
"""

import filecmp
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any

from aqnpipe.config.arm import Arm
from aqnpipe.config.cross_references import expected_validation_questions
from aqnpipe.config.custom_code import CustomError, CustomSchedule, refuse_foreign_code
from aqnpipe.config.dataset import LmEvalDataset, LocalDataset
from aqnpipe.config.diagnosis import NEED_SENSITIVITY
from aqnpipe.config.evaluation import EvaluationNoise, settings_of
from aqnpipe.config.model import (
    KNOWN_CONFIGS,
    ModelConfig,
    builtin_folder,
    read_model_config,
    settings_of_values,
    source_kind,
)
from aqnpipe.config.noise import ModuleNoise
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.published import PublishedFile
from aqnpipe.config.study import Study, load_study_files, shown_path
from aqnpipe.config.training import LoraConfig
from aqnpipe.config.yaml_file import load_yaml, typed_scalars
from aqnpipe.errors import ConfigError, DataError, ModelError

_REPLACED = ("README.md", "report.html", "summary.md")
"""Files of a report that a folder may have had before."""

_OF_STUDIES = ("eval", "jobs", "runs", "srdd")
"""Folders that results with a report have, also those without records."""

TRUST_CODE = "trust_code"
"""Key of Snakemake's `--config` that allows code from outside of the working directory; a study cannot have it."""

_LONGEST_NAME = 255
"""Bytes of a file name on Linux."""


def open_study(
    paths: Sequence[Path],
    overrides: Mapping[str, Any] = MappingProxyType({}),
    *,
    look_outside: bool = True,
    trust_code: bool = False,
) -> StudyPlan:
    """Return the plan of the study in `paths`, of which later files extend earlier ones, and `overrides` all of them.

    look_outside: also check data sets, chat templates and published figures. trust_code, also as a key of `overrides`:
    allow code from outside of the working directory. Raises AqnpipeError with one line.
    """
    shown, overrides = [shown_path(path) for path in paths], dict(overrides)
    if not isinstance(trusted := typed_scalars(overrides.pop(TRUST_CODE, trust_code)), bool):
        raise ConfigError(f"--config: {TRUST_CODE}: found {trusted!r}, expected true or false")
    study = load_study_files(shown, overrides)
    source = ", ".join(map(str, shown))
    if not trusted:
        with _about(source):
            refuse_foreign_code(study, [*shown, Path(study.config.arms_file)])
    for check in _CHECKS if look_outside else ():
        check(study, source)
    return StudyPlan(study)


@contextmanager
def _about(where: str) -> Iterator[None]:
    """Raise what the body refuses as a ConfigError that begins with the key that it is about."""
    try:
        yield
    except (ConfigError, DataError, ModelError) as error:
        raise ConfigError(f"{where}: {error}") from error


def check_results(study: Study, source: str) -> None:
    """Refuse a folder that is none and cannot be made, or has files of the user that a report would replace."""
    folder, where = Path(study.config.results_dir), f"{source}: results_dir"
    longest = max(len(os.fsencode(part)) for part in folder.parts)
    if longest > _LONGEST_NAME:
        raise ConfigError(f"{where}: a folder name has {longest} bytes, expected at most {_LONGEST_NAME}")
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not existing.is_dir():
        raise ConfigError(f"{where}: {existing} is no folder, expected a folder or a new path")
    if not any((folder / name).exists() for name in _OF_STUDIES):
        for path in (folder / name for name in _REPLACED if (folder / name).is_file()):
            raise ConfigError(f"{where}: {path} is of no study and would be replaced, expected another folder")


def _check_dataset(study: Study, source: str) -> None:
    """Refuse questions that cannot be read; of a task that is not the user's own, only the harness is looked for."""
    dataset = study.config.dataset
    own_task = isinstance(dataset, LmEvalDataset) and dataset.include_path is not None
    if isinstance(dataset, LmEvalDataset) and find_spec("lm_eval") is None:
        raise ConfigError(
            f"{source}: dataset.source: lm-evaluation-harness is not installed: pip install 'aqnpipe[lm-eval]'"
        )
    if not own_task and not isinstance(dataset, LocalDataset):
        return
    from aqnpipe.data.loader import load_problems

    if isinstance(dataset, LmEvalDataset):
        if not Path(dataset.include_path or "").is_dir():
            raise ConfigError(
                f"{source}: dataset.include_path: {dataset.include_path}: no such folder, expected one with tasks"
            )
        with _about(source):
            load_problems(dataset, "test")
        return
    with _about(f"{source}: dataset"):
        sizes = {split: len(load_problems(dataset, split)) for split in StudyPlan(study).splits()}
    if study.config.training and (expected := expected_validation_questions(study.config, sizes.get("test"))):
        asked = study.config.training.validation_questions
        raise ConfigError(f"{source}: training.validation_questions: found {asked}, expected {expected}")


def _check_imported(study: Study, source: str) -> None:
    """Refuse diagnoses and parities made elsewhere whose files are missing, or lack a sensitivity that sigmas need."""
    plan = StudyPlan(study)
    for model, machine in plan.diagnoses():
        where, paths = f"{source}: machines.{machine}.diagnosed_in", plan.imported_diagnosis(model, machine)
        for path in (path for path in paths if not Path(path).is_file()):
            raise ConfigError(f"{where}: found no {path}, expected a diagnosis of {model}")
        needing = [strategy for strategy in plan.strategies(model, machine) if strategy in NEED_SENSITIVITY]
        if paths and needing:
            from aqnpipe.artifacts.diagnoses import LayerTable
            from aqnpipe.artifacts.files import read_table

            with _about(where):
                table = read_table(Path(paths[0]), LayerTable)
            if table["sensitivity"].null_count():
                raise ConfigError(
                    f"{where}: {paths[0]} has no sensitivity of the layers, which the sigmas {needing[0]} need"
                )
    for model, name, path in plan.all_parities():
        measured = study.config.machines.get(name)
        if measured is not None and measured.measured_in is not None and not Path(path).is_file():
            raise ConfigError(
                f"{source}: machines.{name}.measured_in: no file {path}, expected one that `aqnpipe parity --json` "
                f"wrote of {model}"
            )


def _check_looks_and_trackers(study: Study, source: str) -> None:
    training = study.config.training
    if study.adaptive_seeds is not None:
        from aqnpipe.comparison.look_states import registered_design

        with _about(source):
            registered_design(study)
    if training is not None and training.report_to:
        from aqnpipe.training.reporting import refuse_missing

        with _about(source):
            refuse_missing(training.report_to)


def check_custom_code(study: Study, source: str) -> None:
    """Refuse rewards, a scorer, error models and schedules of the user's own that break their contract."""
    training, evaluation = study.config.training, study.config.evaluation
    for index, reward in enumerate(training.rewards if training is not None else ()):
        from aqnpipe.data.graders import refuse_unusable_reward

        with _about(f"{source}: training.rewards.{index}.function"):
            refuse_unusable_reward(reward)
    if ":" in evaluation.primary_scorer:
        from aqnpipe.data.graders import refuse_unusable_scorer

        with _about(f"{source}: evaluation.primary_scorer"):
            refuse_unusable_scorer(evaluation)
    for name, arm in study.arms.items():
        where = f"{study.config.arms_file}: arms.{name}"
        refuse_unusable_errors(where, arm)
        if arm.aqn is not None and isinstance(arm.aqn.schedule, CustomSchedule):
            _check_schedule(arm.aqn.schedule, study, f"{where}.aqn.schedule")
    for name, noise in evaluation.noises.items():
        refuse_unusable_errors(f"{source}: evaluation.noises.{name}", settings_of(noise))


def refuse_unusable_errors(where: str, part: Arm | EvaluationNoise) -> None:
    """Raise ConfigError if an error model of an arm or a noise breaks its contract; `where` begins the message."""
    for key, noise in (("operator_noise", part.operator_noise), ("module_noise", part.module_noise)):
        if noise is not None and isinstance(noise.error, CustomError):
            from aqnpipe.noise.kernels.custom import refuse_unusable

            with _about(f"{where}.{key}.error"):
                refuse_unusable(noise.error)


def _check_schedule(schedule: CustomSchedule, study: Study, where: str) -> None:
    from aqnpipe.noise.schedule import custom_sigmas

    training = study.config.training
    if schedule.sigmas is not None:
        raise ConfigError(f"{where}.sigmas: found sigmas, expected none: a job computes them with the function")
    if training is not None:
        with _about(where):
            custom_sigmas(schedule, study.num_steps, training.epochs, training.steps_per_rollout)


def _check_chat_template(study: Study, source: str) -> None:
    local = {role: model.source for role, model in study.models().items() if source_kind(model.source) != "hub"}
    for role, name in local.items() if study.config.prompt.style == "chat" else ():
        from aqnpipe.models.untrusted import refuse_endless_texts, templates_in

        folder = builtin_folder(name) if source_kind(name) == "builtin" else Path(name)
        with _about(f"{source}: prompt.style: found chat, which model {role} cannot be asked in"):
            has_template = bool(templates_in(folder))
            if has_template:
                refuse_endless_texts(folder, study.config.prompt)
        if not has_template:
            raise ConfigError(
                f"{source}: prompt.style: found chat, expected plain: the tokenizer of model {role} ({name}) has no "
                "chat template"
            )


def _check_files(study: Study, source: str) -> None:
    """Refuse local models that are unsafe, incomplete, or have truncated weights, and malformed published figures."""
    section = "models" if study.has_training else "checkpoints"
    for name, model in study.models().items():
        if source_kind(model.source) == "folder":
            from aqnpipe.models.loading import refuse_unusable

            with _about(f"{source}: {section}.{name}"):
                refuse_unusable(model)
    published = study.config.statistics.published
    if published is not None:
        with _about(f"{source}: statistics.published"):
            load_yaml(Path(published), PublishedFile)


def check_checkpoints(study: Study, source: str) -> None:
    """Refuse pairs of checkpoints with the same weights and settings, which cannot be compared."""
    if study.has_training:
        return
    from aqnpipe.models.loading import source_folder

    local = {name: model for name, model in study.models().items() if source_kind(model.source) != "hub"}
    for (first, model), (second, other) in combinations(local.items(), 2):
        if _is_same_model(source_folder(model), source_folder(other)):
            raise ConfigError(
                f"{source}: checkpoints.{second}: has the same weights as checkpoint {first} ({model.source}), "
                "expected another model"
            )


def _is_same_model(first: Path, second: Path) -> bool:
    """Return whether two folders hold the same weights for the same settings; reads to the first difference."""
    if settings_of_values(read_model_config(first)) != settings_of_values(read_model_config(second)):
        return False
    ours, theirs = (sorted(folder.glob("*.safetensors")) for folder in (first, second))
    if [(path.name, path.stat().st_size) for path in ours] != [(path.name, path.stat().st_size) for path in theirs]:
        return False
    return all(filecmp.cmp(one, other, shallow=False) for one, other in zip(ours, theirs, strict=True))


def _check_modules(study: Study, source: str) -> None:
    """Refuse names of adapted modules, and patterns of noised ones, that a model does not have.

    The modules of a model are those of its class, which is created without weights. Of a model of a hub nothing is
    known before its download, except the linear modules of a well-known one.
    """
    training, named = study.config.training, study.config.evaluation.noises
    lora = None if training is None else training.lora
    noises: list[tuple[str, str | None, ModuleNoise | None]] = [
        (f"{source}: evaluation.noises.{name}", None, settings_of(noise).module_noise) for name, noise in named.items()
    ]
    file = study.config.arms_file
    noises += [(f"{file}: arms.{name}", arm.model, arm.module_noise) for name, arm in study.arms.items()]
    patterns = [
        (where, role, noise)
        for where, role, noise in noises
        if noise is not None and (isinstance(noise.modules, tuple) or noise.exclude)
    ]
    for role, model in study.models().items() if lora or patterns else ():
        if source_kind(model.source) != "hub":
            of_role = [(where, noise) for where, of, noise in patterns if of in (None, role)]
            _check_modules_of(model, lora, of_role, source)
        elif lora is not None and model.source in KNOWN_CONFIGS:
            known = LoraConfig.model_fields["target_modules"].default
            for name in (name for name in lora.target_modules if name not in known):
                raise ConfigError(
                    f"{source}: training.lora.target_modules: found {name!r}, expected a subset of {', '.join(known)}"
                )


def _check_modules_of(
    model: ModelConfig, lora: LoraConfig | None, patterns: Sequence[tuple[str, ModuleNoise]], source: str
) -> None:
    from aqnpipe.models.layout import select_modules
    from aqnpipe.models.loading import create_model, source_folder

    with _about(source):
        created = create_model(source_folder(model), "meta")
        if lora is not None:
            from aqnpipe.models.adapters import add_adapters

            add_adapters(created, lora, seed=0)
    for where, noise in patterns:
        with _about(f"{where}.module_noise.modules"):
            select_modules(created, noise.modules, noise.exclude)


_CHECKS = (
    check_results,
    _check_dataset,
    _check_imported,
    _check_looks_and_trackers,
    check_custom_code,
    _check_files,
    _check_chat_template,
    check_checkpoints,
    _check_modules,
)
"""The first refusal is reported, so a check may rely on those before it."""
