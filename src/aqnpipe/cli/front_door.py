"""The one way into a study: `aqnpipe check`, `aqnpipe report` and the Snakefile open it here, so they never disagree.

A study is refused for mistakes in its files, and if questions, chat templates or published figures that it needs are
missing. Otherwise a job would find out minutes later.
"""

import argparse
import filecmp
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any

from aqnpipe.cli.own_noise import own_noise_problems
from aqnpipe.cli.profile_file import refuse_unreadable_profiles
from aqnpipe.config.cross_references import validation_problem
from aqnpipe.config.dataset import LmEvalDataset, LocalDataset
from aqnpipe.config.evaluation_noise import settings_of
from aqnpipe.config.model import KNOWN_CONFIGS, ModelConfig, builtin_folder, source_kind
from aqnpipe.config.noise import ModuleNoise
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.published import PublishedFile
from aqnpipe.config.study import Study, StudyConfig, load_study_files, read_study_file
from aqnpipe.config.training import LoraConfig
from aqnpipe.config.yaml_file import load_yaml
from aqnpipe.device import VISIBLE_DEVICES, RequestedDevice, resolve_device, visible_ids
from aqnpipe.errors import EXIT_USER_ERROR, AqnpipeError, ConfigError, DataError, DeviceError, ModelError
from aqnpipe.runtime.device_allocation import devices_to_compute_on

_REPLACED = ("README.md", "report.html", "summary.md")
"""Files of a report that a folder may have had before."""

_OF_STUDIES = ("eval", "jobs", "runs", "srdd")
"""Folders that results with a report have, also those without records."""

_LONGEST_NAME = 255
"""Bytes of a file name on Linux."""


def open_study(
    paths: Sequence[Path], overrides: Mapping[str, Any] = MappingProxyType({}), *, look_outside: bool = True
) -> StudyPlan:
    """Return the plan of the study in `paths`, of which later files extend earlier ones, and `overrides` all of them.

    look_outside: also check data sets, chat templates and published figures. Raises AqnpipeError with one line.
    """
    shown = [shown_path(path) for path in paths]
    study = load_study_files(shown, overrides)
    if look_outside:
        for problem in _outside_problems(study, ", ".join(map(str, shown))):
            raise ConfigError(problem)
    return StudyPlan(study)


def shown_path(path: Path) -> Path:
    """Return the path relative to the working directory if it is below it; Snakemake makes every path absolute."""
    try:
        return path.absolute().relative_to(Path.cwd())
    except ValueError:
        return path


def device_problem(requested: RequestedDevice) -> str | None:
    """Return why this machine cannot run jobs on the requested kind of device; None if it can, or for `auto`."""
    if requested in ("auto", "cpu"):
        return None
    try:
        resolve_device(requested)
    except DeviceError as error:
        return str(error)
    return None


def refuse_unreadable_studies() -> None:
    """End this process with one line if a profile or study given to Snakemake cannot be read, or lists of devices.

    Snakemake reads these files before the workflow, and ends in a traceback if it cannot. The default profile, which
    Snakemake reads before everything else, calls this.
    """
    try:
        for kind in VISIBLE_DEVICES:
            visible_ids(kind)
        refuse_unreadable_profiles(_given_profiles())
        for path in _given_studies():
            read_study_file(shown_path(path))
    except AqnpipeError as error:
        sys.stderr.write(f"ERROR: {error}\n")
        sys.exit(EXIT_USER_ERROR)


def workers_of_given_study() -> int:
    """Return `training.num_workers` of the study given to Snakemake, for a profile; 1 if it says nothing."""
    return _number_in_given_study("training", "num_workers")


def shards_of_given_study() -> int:
    """Return `generation.tensor_parallel` of the study given to Snakemake, for a profile; 1 if it says nothing."""
    return _number_in_given_study("generation", "tensor_parallel")


def shards_problem(requested: RequestedDevice, shards: int) -> str | None:
    """Return why no engine of an evaluation can have a device for each of its `shards` here; None if it can.

    For jobs of this machine. An existing Ray cluster may have devices elsewhere.
    """
    if shards == 1 or os.environ.get("RAY_ADDRESS"):
        return None
    kind, ids = devices_to_compute_on(requested)
    if kind == "cpu" and requested not in ("cpu", "auto"):
        return None  # `device_problem` says why there is none.
    found = len(ids) or len(os.sched_getaffinity(0))
    if shards <= found:
        return None
    what = "CPU cores" if kind == "cpu" else f"{kind} devices"
    return f"generation.tensor_parallel: found {shards}, this machine has {found} {what}; every worker needs one"


def shards_without_devices(rule: str, given: Mapping[str, Any], shards: int) -> str | None:
    """Return why the devices that a profile gives to an evaluating job do not fit its engines; None if they do.

    given: the resources of the rule in the profile. shards: `generation.tensor_parallel`, the devices of each of its
    `workers`. Resources that are not numbers are left to Snakemake.
    """
    workers, nodes = (whole_number(given.get(name, 1)) for name in ("workers", "nodes"))
    gres = str(given.get("gres", "")).rpartition(":")[2]
    for name, found, per_job in (
        ("devices", whole_number(given.get("devices")), 1),
        ("gres", whole_number(gres), nodes),
    ):
        if shards == 1 or found is None or workers is None or per_job is None:
            continue
        # An engine is on one node.
        fitting = found // shards * per_job
        if fitting < workers:
            return (
                f"set-resources: {rule}: {name}: found {found} devices{' per node' if name == 'gres' else ''}, enough "
                f"for {fitting} of {workers} workers with the {shards} of generation.tensor_parallel each"
            )
    return None


def workers_problem(requested: RequestedDevice, workers: int, given: Mapping[str, Any], *, here: bool) -> str | None:
    """Return why the workers of a training run have no device each; None if they have, or compute on CPU cores.

    given: the resources of rule train in the profile. here: whether the job runs on this machine.
    """
    devices = devices_of_job(given)
    if requested == "cpu" or (here and os.environ.get("RAY_ADDRESS")):
        return None
    if devices is not None and devices < workers:
        return (
            f"training.num_workers: found {workers}, the profile gives a training run {devices} devices, expected one "
            "for each worker (train_devices in its site block)"
        )
    kind, ids = devices_to_compute_on(requested) if here else ("cpu", ())
    if kind != "cpu" and len(ids) < workers:
        return (
            f"training.num_workers: found {workers}, this machine has {len(ids)} {kind} devices; every worker needs one"
        )
    return None


def devices_of_job(given: Mapping[str, Any]) -> int | None:
    """Return how many devices the resources of a job are, on all its nodes; None if the profile does not say."""
    leased, gres = whole_number(given.get("devices")), whole_number(str(given.get("gres", "")).rpartition(":")[2])
    if leased is not None or gres is None:
        return leased
    return gres * (whole_number(given.get("nodes", 1)) or 1)


def whole_number(value: object) -> int | None:
    """Return a resource as a number; None if it is not a whole one, which is left to Snakemake."""
    return int(str(value)) if str(value).isdecimal() else None


def _number_in_given_study(section: str, key: str) -> int:
    number: object = 1
    for path in _given_studies():
        try:
            content = read_study_file(shown_path(path)).get(section)
        except AqnpipeError:
            return 1  # The default profile ends with its line.
        if isinstance(content, Mapping):
            number = content.get(key, number)
    return number if isinstance(number, int) and number > 0 else 1


def _given_studies() -> list[Path]:
    """Return the study files that Snakemake reads: those of the command line, else those of the last profile."""
    given = _given_to_snakemake()
    if given.configfile:
        return list(given.configfile)
    return next((files for name in reversed(_given_profiles()) if (files := _studies_of_profile(name))), [])


def _given_profiles() -> list[str]:
    """Return the names of the profiles that Snakemake reads, besides the default one."""
    return _given_to_snakemake().profile or [os.environ.get("SNAKEMAKE_PROFILE", "none")]


def _given_to_snakemake() -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--configfile", "--configfiles", nargs="+", action="extend", default=[], type=Path)
    parser.add_argument("--profile", action="append", default=[])
    return parser.parse_known_args()[0]


def _studies_of_profile(name: str) -> list[Path]:
    """Return the study files that a profile names. Snakemake itself reports a profile that cannot be read."""
    import yaml
    import yte
    from snakemake.cli import get_profile_dir

    found = get_profile_dir(name)
    if found is None:
        return []
    folder, file = found
    try:
        text = file.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
        named = content.get("configfile") if isinstance(content, dict) else None
        if isinstance(named, str) and named.startswith("?"):
            named = yte.process_yaml(text).get("configfile")
    except (OSError, UnicodeDecodeError, yaml.YAMLError, yte.exceptions.YteError):
        return []
    if isinstance(named, str):
        # As Snakemake: a file beside the profile hides one in the working directory.
        path = os.path.expanduser(os.path.expandvars(named))
        return [folder / path if (folder / path).exists() else Path(path)]
    return [Path(each) for each in named] if isinstance(named, list) else []


def _outside_problems(study: Study, source: str) -> Iterator[str]:
    yield from (f"{source}: results_dir: {problem}" for problem in _folder_problems(Path(study.config.results_dir)))
    yield from _dataset_problems(study, source)
    yield from _diagnosis_problems(study, source)
    yield from _parity_problems(study, source)
    yield from _refusals(_checks_of_settings(study, source))
    yield from own_noise_problems(study, source)
    yield from _chat_template_problems(study, source)
    yield from _refusals(_checks_of_files(study, source))
    yield from _checkpoint_problems(study, source)
    yield from _module_problems(study, source)


def _refusals(checks: Iterable[tuple[str, Callable[[], object]]]) -> Iterator[str]:
    """Yield the refusals of checks, each after the key that it is about."""
    for where, check in checks:
        try:
            check()
        except (ConfigError, DataError, ModelError) as error:
            yield f"{where}: {error}"


def _checks_of_settings(study: Study, source: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the checks of looks, trackers, rewards and scorers; each imports what it needs, which is slow."""
    training, evaluation = study.config.training, study.config.evaluation
    if study.adaptive_seeds is not None:
        from aqnpipe.comparison.look_states import registered_design

        yield source, partial(registered_design, study)
    if training is not None and training.report_to:
        from aqnpipe.training.reporting import refuse_missing

        yield source, partial(refuse_missing, training.report_to)
    for index, reward in enumerate(training.rewards if training is not None else ()):
        from aqnpipe.data.rewards import refuse_unusable

        yield f"{source}: training.rewards.{index}.function", partial(refuse_unusable, reward)
    if ":" in evaluation.primary_scorer:
        from aqnpipe.data.graders import refuse_unusable_scorer

        yield f"{source}: evaluation.primary_scorer", partial(refuse_unusable_scorer, evaluation)


def _checks_of_files(study: Study, source: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the checks of local models (unsafe, incomplete, or with truncated weights) and of published figures."""
    section = "models" if study.has_training else "checkpoints"
    for name, model in study.models().items():
        if source_kind(model.source) == "folder":
            from aqnpipe.models.loading import refuse_unusable

            yield f"{source}: {section}.{name}", partial(refuse_unusable, model)
    published = study.config.statistics.published
    if published is not None:
        yield f"{source}: statistics.published", partial(load_yaml, Path(published), PublishedFile)


def _folder_problems(folder: Path) -> Iterator[str]:
    """Yield why a folder is none and cannot be made, or has files of the user that a report would replace."""
    longest = max(len(os.fsencode(part)) for part in folder.parts)
    if longest > _LONGEST_NAME:
        yield f"a folder name has {longest} bytes, expected at most {_LONGEST_NAME}"
        return
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not existing.is_dir():
        yield f"{existing} is no folder, expected a folder or a new path"
    elif not any((folder / name).exists() for name in _OF_STUDIES):
        for path in (folder / name for name in _REPLACED if (folder / name).is_file()):
            yield f"{path} is of no study and would be replaced, expected another folder"


def _dataset_problems(study: Study, source: str) -> Iterator[str]:
    dataset = study.config.dataset
    if isinstance(dataset, LmEvalDataset):
        yield from _task_problems(dataset, source)
    if not isinstance(dataset, LocalDataset):
        return
    from aqnpipe.data.loader import load_problems

    try:
        sizes = {split: len(load_problems(dataset, split)) for split in StudyPlan(study).splits()}
    except DataError as error:
        yield f"{source}: dataset: {error}"
        return
    if problem := validation_problem(study.config, sizes.get("test")):
        yield f"{source}: training.validation_questions: {problem}"


def _task_problems(dataset: LmEvalDataset, source: str) -> Iterator[str]:
    """Yield why a task cannot be used: one of the user's own is loaded, of others only the harness is looked for."""
    if find_spec("lm_eval") is None:
        yield f"{source}: dataset.source: lm-evaluation-harness is not installed: pip install 'aqnpipe[lm-eval]'"
    elif dataset.include_path is not None:
        from aqnpipe.data.loader import load_problems

        if not Path(dataset.include_path).is_dir():
            yield f"{source}: dataset.include_path: {dataset.include_path}: no such folder, expected one with tasks"
            return
        try:
            load_problems(dataset, "test")
        except (ConfigError, DataError) as error:
            yield f"{source}: {error}"


def _diagnosis_problems(study: Study, source: str) -> Iterator[str]:
    """Yield files of diagnoses made elsewhere that are missing, or lack a sensitivity that sigmas need."""
    plan = StudyPlan(study)
    for model, machine in plan.diagnoses():
        where, paths = f"{source}: machines.{machine}.diagnosed_in", plan.imported_diagnosis(model, machine)
        missing = [path for path in paths if not Path(path).is_file()]
        yield from (f"{where}: found no {path}, expected a diagnosis of {model}" for path in missing)
        needing = [strategy for strategy in plan.strategies(model, machine) if strategy != "published"]
        if paths and needing and not missing:
            yield from _sensitivity_problems(Path(paths[0]), needing[0], where)


def _parity_problems(study: Study, source: str) -> Iterator[str]:
    """Yield files of measured machines that are missing."""
    for model, name, path in StudyPlan(study).all_parities():
        machine = study.config.machines.get(name)
        if machine is not None and machine.measured_in is not None and not Path(path).is_file():
            yield (
                f"{source}: machines.{name}.measured_in: no file {path}, expected one that `aqnpipe parity --json` "
                f"wrote of {model}"
            )


def _sensitivity_problems(layers: Path, strategy: str, where: str) -> Iterator[str]:
    from aqnpipe.artifacts.diagnoses import LayerTable
    from aqnpipe.artifacts.files import read_table

    try:
        table = read_table(layers, LayerTable)
    except DataError as error:
        yield f"{where}: {error}"
        return
    if table["sensitivity"].null_count():
        yield f"{where}: {layers} has no sensitivity of the layers, which the sigmas {strategy} need"


def _chat_template_problems(study: Study, source: str) -> Iterator[str]:
    if study.config.prompt.style != "chat":
        return
    from aqnpipe.data.prompts import refuse_unusable_template
    from aqnpipe.models.chat_templates import refuse_endless_templates, templates_in
    from aqnpipe.models.loading import load_tokenizer

    for role, model in study.models().items():
        name = model.source
        kind = source_kind(name)
        folder = builtin_folder(name) if kind == "builtin" else Path(name)
        if kind == "hub":
            continue
        try:
            has_template = bool(templates_in(folder))
            if has_template:
                refuse_endless_templates(folder)
                refuse_unusable_template(study.config.prompt, load_tokenizer(folder))
            else:
                yield (
                    f"{source}: prompt.style: found chat, expected plain: the tokenizer of model {role} ({name}) has "
                    "no chat template"
                )
        except ModelError as error:
            yield f"{source}: prompt.style: found chat, which model {role} cannot be asked in: {error}"


def _module_problems(study: Study, source: str) -> Iterator[str]:
    """Yield names of adapted modules and patterns of noised ones that a model does not have.

    The modules of a model are those of its class, which is created without weights. Of a model of a hub nothing is
    known before its download, except the linear modules of a well-known one.
    """
    training, named = study.config.training, study.config.evaluation.noises
    lora = None if training is None else training.lora
    noises: list[tuple[str, str | None, ModuleNoise | None]] = [
        (f"{source}: evaluation.noises.{name}", None, settings_of(noise).module_noise) for name, noise in named.items()
    ]
    if isinstance(study.config, StudyConfig):
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
            yield from _local_module_problems(model, lora, of_role, source)
        elif lora is not None and model.source in KNOWN_CONFIGS:
            known = LoraConfig.model_fields["target_modules"].default
            for name in (name for name in lora.target_modules if name not in known):
                yield f"{source}: training.lora.target_modules: found {name!r}, expected a subset of {', '.join(known)}"


def _local_module_problems(
    model: ModelConfig, lora: LoraConfig | None, patterns: Sequence[tuple[str, ModuleNoise]], source: str
) -> Iterator[str]:
    from aqnpipe.models.layout import select_modules
    from aqnpipe.models.loading import create_model, source_folder

    try:
        created = create_model(source_folder(model), "meta")
        if lora is not None:
            from aqnpipe.models.adapters import add_adapters

            add_adapters(created, lora, seed=0)
    except ModelError as error:
        yield f"{source}: {error}"
        return
    for where, noise in patterns:
        try:
            select_modules(created, noise.modules, noise.exclude)
        except ModelError as error:
            yield f"{where}.module_noise.modules: {error}"


def _checkpoint_problems(study: Study, source: str) -> Iterator[str]:
    """Yield pairs of checkpoints with the same weights, which cannot be compared."""
    if study.has_training:
        return
    from aqnpipe.models.loading import source_folder

    local = {name: model for name, model in study.models().items() if source_kind(model.source) != "hub"}
    for (first, model), (second, other) in combinations(local.items(), 2):
        if _same_weights(source_folder(model), source_folder(other)):
            yield (
                f"{source}: checkpoints.{second}: has the same weights as checkpoint {first} ({model.source}), "
                "expected another model"
            )


def _same_weights(first: Path, second: Path) -> bool:
    """Return whether two folders hold the same weights; reads no further than to the first difference."""
    ours, theirs = (sorted(folder.glob("*.safetensors")) for folder in (first, second))
    if [(path.name, path.stat().st_size) for path in ours] != [(path.name, path.stat().st_size) for path in theirs]:
        return False
    return all(filecmp.cmp(one, other, shallow=False) for one, other in zip(ours, theirs, strict=True))
