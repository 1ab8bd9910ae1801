"""Checks of a study across its sections: names, layers, machines, attention, and what vLLM can compute.

Each check yields one line per problem: file, key, what was found and what is expected.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aqnpipe.config.analysis import PRETRAINED
from aqnpipe.config.arm import Arm
from aqnpipe.config.base import LARGEST_TRAINING_SEED
from aqnpipe.config.dataset import LmEvalDataset
from aqnpipe.config.diagnosis import NEEDS_PARITY
from aqnpipe.config.evaluation import unfit_scorer
from aqnpipe.config.evaluation_noise import settings_of
from aqnpipe.config.machine_devices import arm_device_problems, machine_device_problems
from aqnpipe.config.measured_noise import MeasuredError
from aqnpipe.config.model import ModelConfig, known_config, num_layers_of, source_kind
from aqnpipe.config.noise import EpochAwareRanges, FakeQuantization, OperatorNoise
from aqnpipe.config.seeds import seed_numbers
from aqnpipe.config.validation_messages import unknown
from aqnpipe.config.vllm_support import kinds_without_vllm, why_not_shared, why_vllm_cannot_roll_out
from aqnpipe.errors import ModelError

if TYPE_CHECKING:
    from aqnpipe.config.study import AnyStudyConfig, StudyConfig


def cross_reference_problems(study: "StudyConfig", arms: Mapping[str, Arm], source: str) -> Iterator[str]:
    """Yield the problems of `study` (read from `source`) with `arms`, the content of its arms file: one line each."""
    yield from _name_problems(study, arms, source)
    yield from size_problems(study, source)
    yield from scorer_problems(study, source)
    yield from machine_problems(study, source)
    yield from arm_device_problems(study, arms)
    yield from machine_device_problems(study, source)
    yield from layer_problems(study, arms, source)
    yield from noised_attention_problems(study, source)
    yield from _attention_problems(study, arms, source)
    yield from _vllm_problems(study, arms, source)
    for name in study.arms:
        where = f"{study.arms_file}: arms.{name}.operator_noise.error"
        yield from measured_problems(study, arms[name].operator_noise, where)
    yield from measured_evaluation_problems(study, source)
    yield from _sigma_problems(study, arms, source)
    yield from _schedule_problems(study, arms)
    known = (*study.arms, PRETRAINED)
    yield from comparison_problems(study, known, source)
    yield from explore_problems(study, arms, known, source)
    yield from _aa_control_problems(study, arms)
    yield from _seed_problems(study, arms, source)
    trained = {arms[name].model for name in study.arms} & set(study.models)
    yield from context_problems(study, {role: study.models[role] for role in study.models if role in trained}, source)


def _name_problems(study: "StudyConfig", arms: Mapping[str, Arm], source: str) -> Iterator[str]:
    for name in study.arms:
        if name not in arms:
            yield f"{source}: arms: {unknown('arm', name, sorted(arms), f'{study.arms_file} defines')}"
            return
        arm = arms[name]
        if arm.task not in (None, study.dataset.task):
            yield (
                f"{study.arms_file}: arms.{name}.task: found {arm.task}, "
                f"the data set of {source} has the task {study.dataset.task}"
            )
        if arm.model not in study.models:
            yield f"{source}: models: arm {name} needs the role {arm.model!r}, found {', '.join(study.models)}"
        if arm.machine in study.machines and study.machines[arm.machine].diagnosed_in is not None:
            where = f"{study.arms_file}: arms.{name}.machine"
            yield f"{where}: {arm.machine} was diagnosed elsewhere, nothing runs on it here"
        for machine in (arm.machine, arm.aqn.layer_sigmas_from if arm.aqn else None):
            if machine is not None and machine not in study.machines:
                yield f"{source}: machines: arm {name} needs the machine {machine!r}, found {', '.join(study.machines)}"
    if PRETRAINED in arms:
        yield f"{study.arms_file}: arms.{PRETRAINED}: this name is reserved for the model before training"


def size_problems(study: "AnyStudyConfig", source: str) -> Iterator[str]:
    """Yield requests for more questions or examples than the data set has."""
    dataset, asked, shots = study.dataset, study.evaluation.num_questions, study.prompt.num_examples
    if asked is not None and dataset.num_test is not None and asked > dataset.num_test:
        yield f"{source}: evaluation.num_questions: found {asked}, expected at most dataset.num_test {dataset.num_test}"
    yield from validation_problems(study, dataset.num_test, source)
    for index, losses in enumerate(study.loss_studies):
        if dataset.num_test is not None and losses.num_texts > dataset.num_test:
            yield (
                f"{source}: loss_studies.{index}.num_texts: found {losses.num_texts}, expected at most "
                f"dataset.num_test {dataset.num_test}"
            )
    if dataset.num_train is not None and shots >= dataset.num_train:
        yield f"{source}: prompt.num_examples: found {shots}, expected fewer than dataset.num_train {dataset.num_train}"


def validation_problems(study: "AnyStudyConfig", num_test: int | None, source: str) -> Iterator[str]:
    """Yield a number of questions for validations that the data set does not have; `num_test`: None if not known.

    Of fewer questions than the default all are taken, but a number that was asked for is not lowered in silence.
    """
    training = study.training
    asked = training is not None and "validation_questions" in training.model_fields_set
    if training is not None and asked and num_test is not None and training.validation_questions > num_test:
        yield (
            f"{source}: training.validation_questions: found {training.validation_questions}, expected at most the "
            f"{num_test} test questions"
        )


def context_problems(study: "AnyStudyConfig", models: Mapping[str, ModelConfig], source: str) -> Iterator[str]:
    """Yield responses that leave no position for a prompt; most models of a hub are not known yet.

    A job compares with its own prompts. A task of lm-evaluation-harness cuts prompts itself.
    """
    asked = {} if isinstance(study.dataset, LmEvalDataset) else {"evaluation": study.evaluation.max_response_tokens}
    if study.training is not None:
        asked = {"training": study.training.max_response_tokens, **asked}
    for role, model in models.items():
        context = _known(model).get("max_position_embeddings")
        for section, tokens in asked.items():
            if isinstance(context, int) and tokens >= context:
                yield (
                    f"{source}: {section}.max_response_tokens: found {tokens}, expected fewer than the {context} "
                    f"positions of model {role} ({model.source}), which its prompts need too"
                )


def _known(model: ModelConfig) -> Mapping[str, Any]:
    """Return what is known of a model's config.json: nothing before the download of most models of a hub.

    Nothing of a folder without one either, which is a problem of its own.
    """
    if source_kind(model.source) == "folder" and not (Path(model.source) / "config.json").is_file():
        return {}
    return known_config(model.source) or {}


def scorer_problems(study: "AnyStudyConfig", source: str) -> Iterator[str]:
    """Yield scorers and rewards that cannot grade answers in the format of the data set."""
    answers = study.dataset.answer_format
    problem = unfit_scorer(study.evaluation.primary_scorer, answers)
    if problem is not None:
        yield f"{source}: evaluation.primary_scorer: {problem}"
    if study.training is not None and not study.training.rewards and answers in ("text", "choice"):
        yield (
            f"{source}: dataset.answer_format: found {answers}, expected gsm8k, number or boxed, or "
            "training.rewards: the usual reward is for the number behind ####"
        )


def machine_problems(study: "AnyStudyConfig", source: str) -> Iterator[str]:
    """Yield unknown machines, and loss studies whose model or machine does not allow one."""
    machine = study.evaluation.pretrained_machine
    if machine is not None and machine not in study.machines:
        yield f"{source}: evaluation.pretrained_machine: {unknown('machine', machine, study.machines)}"
    elif machine is not None and study.machines[machine].diagnosed_in is not None:
        yield f"{source}: evaluation.pretrained_machine: {machine} was diagnosed elsewhere, nothing runs on it here"
    yield from _counterpart_problems(study, source)
    for index, losses in enumerate(study.loss_studies):
        where = f"{source}: loss_studies.{index}"
        if losses.model not in study.models:
            yield f"{where}.model: {unknown('role', losses.model, study.models)}"
        if losses.machine not in study.machines:
            yield f"{where}.machine: {unknown('machine', losses.machine, study.machines)}"
        elif not study.machines[losses.machine].faults:
            yield f"{where}.machine: {losses.machine} has no faults, expected a machine with simulated faults"
        elif set(losses.orders) != {"after_noise"} and any(
            fault.site != "layer_output" for fault in study.machines[losses.machine].faults
        ):
            yield (
                f"{where}.orders: expected [after_noise], because {losses.machine} has faults at sites other than "
                "layer_output, the only site with noise on hidden states"
            )


def _counterpart_problems(study: "AnyStudyConfig", source: str) -> Iterator[str]:
    """Yield counterparts that are the machine itself, because they name the settings of all models."""
    for name, machine in study.machines.items():
        asked = {} if machine.counterpart is None else machine.counterpart.model_dump(exclude_none=True)
        models = [{"dtype": model.dtype, "attention": model.attention} for model in study.models.values()]
        if asked and machine.device is None and all(asked.items() <= model.items() for model in models):
            given = ", ".join(f"{key} {value}" for key, value in asked.items())
            yield f"{source}: machines.{name}.counterpart: found {given}, which the models have, expected another one"


def layer_problems(study: "AnyStudyConfig", arms: Mapping[str, Arm], source: str) -> Iterator[str]:
    """Yield missing models, and faults and noise in layers beyond those of the model."""
    for role, model in study.models.items():
        try:
            num_layers = num_layers_of(model.source)
        except ModelError as error:
            yield f"{source}: {'checkpoints' if study.training is None else 'models'}.{role}.source: {error}"
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
        for name, named in study.evaluation.noises.items():
            operators = settings_of(named).operator_noise
            if operators is not None:
                where = f"{source}: evaluation.noises.{name}"
                yield from noised_layer_problems(operators, num_layers, where, f"{role} ({model.source})")
        if study.training is None:
            continue
        for arm_name in study.arms:
            noise = arms[arm_name].operator_noise
            if noise is None or arms[arm_name].model != role:
                continue
            where = f"{study.arms_file}: arms.{arm_name}"
            yield from noised_layer_problems(noise, num_layers, where, f"{role} ({model.source})")


def noised_attention_problems(study: "AnyStudyConfig", source: str) -> Iterator[str]:
    """Yield named noises of the evaluation on attention as a model does not compute it."""
    for role, model in study.models.items():
        for name, named in study.evaluation.noises.items():
            problem = settings_of(named).attention_problem(model.attention)
            if problem is not None:
                yield f"{source}: evaluation.noises.{name}.{problem} (model {role})"


def noised_layer_problems(noise: OperatorNoise, num_layers: int, where: str, model: str) -> Iterator[str]:
    """Yield the keys of a noise that name layers beyond those of `model`."""
    for key, layers in (("layers", noise.layers or ()), ("layer_scales", noise.layer_scales)):
        if max(layers, default=-1) >= num_layers:
            yield (f"{where}.operator_noise.{key}: found {max(layers)}, model {model} has layers 0 to {num_layers - 1}")


def _attention_problems(study: "StudyConfig", arms: Mapping[str, Arm], source: str) -> Iterator[str]:
    """Noise on single attention products needs eager attention; noise on fused attention needs sdpa."""
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


def _vllm_problems(study: "StudyConfig", arms: Mapping[str, Arm], source: str) -> Iterator[str]:
    """vLLM computes attention as one operator and supports only some kinds of noise."""
    used: dict[str, ModelConfig] = {arms[name].model: study.models[arms[name].model] for name in study.arms}
    yield from vllm_evaluation_problems(study, used, "models", source)
    wants_rollouts = study.generation.requested_for_rollouts == "vllm"
    for name in study.arms if wants_rollouts else ():
        reason = why_vllm_cannot_roll_out(arms[name])
        if reason is not None:
            yield (
                f"{source}: arm {name}: vLLM cannot draw its rollouts: {reason}; set generation.rollout_backend: "
                "transformers"
            )


def vllm_evaluation_problems(
    study: "AnyStudyConfig", models: Mapping[str, ModelConfig], section: str, source: str
) -> Iterator[str]:
    """Yield the evaluation noises, and the models of `section`, that vLLM does not support."""
    on_vllm = study.generation.backend == "vllm" and any(study.evaluation.all_levels())
    for name, named in study.evaluation.noises.items() if study.generation.backend == "vllm" else ():
        for kind in kinds_without_vllm(settings_of(named)):
            yield (
                f"{source}: evaluation.noises.{name}: found {kind}, which vLLM cannot "
                "compute, expected an error on outputs or generation.backend: transformers"
            )
    for name, model in models.items():
        if on_vllm and model.attention != "sdpa":
            yield (
                f"{source}: {section}.{name}.attention: found {model.attention}, generation.backend vllm "
                "needs sdpa: it computes attention as one operator"
            )
    yield from _sharing_problems(study.generation.tensor_parallel, models, section, source)


def _sharing_problems(num_workers: int, models: Mapping[str, ModelConfig], section: str, source: str) -> Iterator[str]:
    """Yield models whose layers tensor-parallel workers cannot share; most of a hub are not known yet."""
    for name, model in models.items() if num_workers > 1 else ():
        reason = why_not_shared(_known(model), num_workers)
        if reason is not None:
            where = f"{source}: generation.tensor_parallel: found {num_workers}"
            yield f"{where}, but {section}.{name} ({model.source}) cannot be shared so: {reason}"


def measured_evaluation_problems(study: "AnyStudyConfig", source: str) -> Iterator[str]:
    """Yield measured errors of evaluations whose parity can neither be read nor measured."""
    for name, named in study.evaluation.noises.items():
        where = f"{source}: evaluation.noises.{name}.operator_noise.error"
        yield from measured_problems(study, settings_of(named).operator_noise, where)


def measured_problems(study: "AnyStudyConfig", noise: OperatorNoise | None, where: str) -> Iterator[str]:
    """Yield why the figures of a measured error can neither be read nor measured; nothing for other errors."""
    error = None if noise is None else noise.error
    if not isinstance(error, MeasuredError):
        return
    if error.figures is not None:
        yield f"{where}.figures: found figures, expected none: they are read from the file that `from` names"
    elif error.machine is None:
        if not Path(error.source).is_file():
            yield f"{where}.from: no file {error.source}, expected one that `aqnpipe parity --json` wrote"
    elif error.machine not in study.machines:
        yield (
            f"{where}.from: {unknown('machine', error.machine, study.machines)}, or a file of `aqnpipe parity --json` "
            "with the ending .json"
        )
    elif not study.machines[error.machine].has_parity:
        yield (
            f"{where}.from: machine {error.machine} has no counterpart, expected machines.{error.machine}.counterpart "
            "or measured_in"
        )


def _sigma_problems(study: "StudyConfig", arms: Mapping[str, Arm], source: str) -> Iterator[str]:
    """Yield arms whose sigmas need a measured error that the study lacks, or an energy outside the bounds of sigmas."""
    rule = study.sigma_rule
    for name in study.arms:
        aqn = arms[name].aqn
        if aqn is None or aqn.layer_sigmas_from not in study.machines:
            continue
        if aqn.layer_sigmas_strategy != "published" and not rule.sigma_min <= rule.base_sigma <= rule.sigma_max:
            yield (
                f"{source}: sigma_rule.base_sigma: found {rule.base_sigma:g}, expected sigma_min {rule.sigma_min:g} to "
                f"sigma_max {rule.sigma_max:g}: the sigmas {aqn.layer_sigmas_strategy} of arm {name} have its energy"
            )
        if aqn.layer_sigmas_strategy == NEEDS_PARITY and not study.machines[aqn.layer_sigmas_from].has_parity:
            yield (
                f"{study.arms_file}: arms.{name}.aqn.layer_sigmas_strategy: {aqn.layer_sigmas_strategy} needs the "
                f"measured error of machine {aqn.layer_sigmas_from}, which has no counterpart, expected "
                f"machines.{aqn.layer_sigmas_from}.counterpart or measured_in"
            )


def _schedule_problems(study: "StudyConfig", arms: Mapping[str, Arm]) -> Iterator[str]:
    for name in study.arms:
        aqn = arms[name].aqn
        if aqn and isinstance(aqn.schedule, EpochAwareRanges) and len(aqn.schedule.ranges) != study.training.epochs:
            yield (
                f"{study.arms_file}: arms.{name}.aqn.schedule.ranges: found {len(aqn.schedule.ranges)} ranges, "
                f"the study trains {study.training.epochs} epochs"
            )


def comparison_problems(study: "AnyStudyConfig", known: Collection[str], source: str) -> Iterator[str]:
    """Yield comparisons that name an unknown arm or checkpoint, or a noise level that is not evaluated.

    `known`: names that a comparison may use.
    """
    for index, comparison in enumerate(study.comparisons):
        where = f"{source}: comparisons.{index}"
        names = [comparison.arm] if comparison.kind == "levels" else [comparison.treatment, comparison.control]
        for name in names:
            if name not in known:
                yield f"{where}: {unknown(_compared(study), name, known)}"
        if comparison.kind != "arms" and 0.0 not in study.evaluation.noise_levels:
            yield f"{where}: compares with noise level 0, evaluation.noise_levels does not contain 0.0"
        yield from _level_problems(study, comparison.noise_level, where)


def explore_problems(
    study: "AnyStudyConfig", arms: Mapping[str, Arm], known: Collection[str], source: str
) -> Iterator[str]:
    """Yield problems of `report.explore`, the pair whose flipped questions the report shows."""
    pair, where = study.report.explore, f"{source}: report.explore"
    if pair is None:
        return
    names = (pair.treatment, pair.control)
    for name in names:
        if name not in known:
            yield f"{where}: {unknown(_compared(study), name, known)}"
            return
    if pair.treatment == pair.control:
        yield f"{where}: treatment and control are both {pair.control!r}, expected two arms"
    roles = {arms[name].model for name in names if name != PRETRAINED}
    if len(roles) > 1:
        yield f"{where}: {' and '.join(names)} train different models ({', '.join(sorted(roles))})"
    yield from _level_problems(study, pair.noise_level, where)


def _level_problems(study: "AnyStudyConfig", level: float, where: str) -> Iterator[str]:
    if level not in study.evaluation.all_levels():
        evaluated = ", ".join([*map(str, study.evaluation.noise_levels), *study.evaluation.noises])
        yield f"{where}.noise_level: found {level}, the study evaluates {evaluated}"


def _compared(study: "AnyStudyConfig") -> str:
    """Return the kind of things that comparisons of the study name."""
    return "checkpoint" if study.training is None else "arm"


def _imitates(arms: Mapping[str, Arm], name: str, target: str) -> bool:
    """Return whether arm `name` is an A/A control of `target`, or of an arm that is."""
    followed: set[str] = set()
    while name in arms and name not in followed:
        followed.add(name)
        name = arms[name].aa_control_of or ""
        if name == target:
            return True
    return False


def _seed_problems(study: "StudyConfig", arms: Mapping[str, Arm], source: str) -> Iterator[str]:
    """Yield arms whose offset leads beyond the largest seed of a training."""
    largest = max(seed_numbers(study.seeds))
    for name in study.arms:
        total = largest + arms[name].seed_offset
        if total > LARGEST_TRAINING_SEED:
            yield (
                f"{study.arms_file}: arms.{name}.seed_offset: with seed {largest} of {source} it trains with seed "
                f"{total}, expected at most {LARGEST_TRAINING_SEED:,}"
            )


def _aa_control_problems(study: "StudyConfig", arms: Mapping[str, Arm]) -> Iterator[str]:
    for name in study.arms:
        target = arms[name].aa_control_of
        if target is None:
            continue
        where = f"{study.arms_file}: arms.{name}.aa_control_of"
        if target not in arms:
            yield f"{where}: {unknown('arm', target, sorted(arms), 'the file defines')}"
        elif target == name:
            yield f"{where}: found the arm itself, expected another arm"
        elif target not in study.arms:
            yield f"{where}: {unknown('arm', target, study.arms)}; without it nothing controls {name}"
        elif _imitates(arms, target, name):
            yield f"{where}: {target} is itself a control of {name}, expected an arm that is none"
        elif arms[target].model != arms[name].model:
            yield f"{where}: {target} trains the model {arms[target].model}, {name} the model {arms[name].model}"
