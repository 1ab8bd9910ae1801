"""Rules across the sections of a study: names that must exist, limits, and what cannot be combined.

A rule is a path into the study and a check of each value there. `[*]` stands for every entry of a mapping or a list.
`arms` are the arms that the study trains, `models` its models or checkpoints, `noises` the settings of the named noises
of its evaluation. The first problem is reported, so a rule may rely on those before it, as that a machine exists. Each
problem is one line: file, key, what was found and what is expected.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aqnpipe.config.analysis import PRETRAINED, seed_numbers
from aqnpipe.config.arm import Arm
from aqnpipe.config.base import LARGEST_TRAINING_SEED
from aqnpipe.config.dataset import GeneratedDataset, LmEvalDataset, PromptFormat
from aqnpipe.config.diagnosis import NEEDS_PARITY
from aqnpipe.config.evaluation import scorer_problem
from aqnpipe.config.evaluation_noise import EvaluationNoise, settings_of
from aqnpipe.config.generation import kinds_without_vllm, why_not_shared, why_vllm_cannot_roll_out
from aqnpipe.config.measured_noise import MeasuredError
from aqnpipe.config.model import ModelConfig, known_config, num_layers_of, source_kind
from aqnpipe.config.noise import FakeQuantization
from aqnpipe.config.validation_messages import unknown
from aqnpipe.errors import ModelError

if TYPE_CHECKING:
    from aqnpipe.config.study import StudyConfig

Place = tuple[str, Any, tuple[str, ...]]
"""File and key, the value there, and what stands for each `[*]`."""


@dataclass(frozen=True)
class Scope:
    """A study read from `source`, and the content of its arms file or its checkpoints as arms."""

    study: "StudyConfig"
    arms: Mapping[str, Arm]
    source: str

    def places(self, path: str) -> list[Place]:
        """Return the places of a path that have a value."""
        first, *parts = path.replace("[*]", ".*").split(".")
        found: list[Place] = [(*self._root(first), ())]
        for part in parts:
            found = [place for start in found for place in _step(start, part)]
        return [place for place in found if place[1] is not None]

    def trained_arms(self) -> dict[str, Arm]:
        """Return the arms that the study trains, by name."""
        return {name: self.arms[name] for name in self.study.arms} if self.study.training is not None else {}

    def _root(self, name: str) -> tuple[str, Any]:
        match name:
            case "arms":
                return f"{self.study.arms_file}: arms", self.trained_arms()
            case "models":
                return f"{self.source}: {_models(self)}", self.study.models
            case "checkpoints":
                return f"{self.source}: checkpoints", None if self.study.training else self.study.models
            case "noises":
                noises = self.study.evaluation.noises
                return f"{self.source}: evaluation.noises", {key: settings_of(noise) for key, noise in noises.items()}
            case _:
                return f"{self.source}: {name}", getattr(self.study, name, None)


def _step(place: Place, part: str) -> Iterator[Place]:
    where, value, names = place
    if part != "*":
        yield f"{where}.{part}", getattr(value, part, None), names
    elif value is not None:
        for key, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield f"{where}.{key}", entry, (*names, str(key))


Check = Callable[..., str | None]
"""Takes the scope, the value and what stands for each `[*]`; returns the problem, which may begin with `.key`."""


def _known(kind: str, section: str) -> Check:
    return lambda scope, name, *_: _missing(kind, name, getattr(scope.study, section))


def _missing(kind: str, name: str, known: Collection[str]) -> str | None:
    return None if name in known else unknown(kind, name, known)


def _at_most(key: str, *, below: bool = False) -> Check:
    """Return the check that a number is not above, or is below, another setting; null there is no limit."""

    def check(scope: Scope, asked: int, *_: str) -> str | None:
        limit = attrgetter(key)(scope.study)
        if limit is None or asked < limit + (not below):
            return None
        return f"found {asked}, expected {'fewer than' if below else 'at most'} {key} {limit}"

    return check


def _validated(scope: Scope, asked: int) -> str | None:
    return validation_problem(scope.study, scope.study.dataset.num_test)


def validation_problem(study: "StudyConfig", num_test: int | None) -> str | None:
    """Return why the data set has too few questions for validations; `num_test`: None if not known.

    Of fewer questions than the default all are taken, but a number that was asked for is not lowered in silence.
    """
    training = study.training
    if training is None or num_test is None or "validation_questions" not in training.model_fields_set:
        return None
    asked = training.validation_questions
    return f"found {asked}, expected at most the {num_test} test questions" if asked > num_test else None


def _task(scope: Scope, task: str, *_: str) -> str | None:
    own = getattr(scope.study.dataset, "task", None)
    return None if task == own else f"found {task}, the data set of {scope.source} has the task {own}"


def _reserved(scope: Scope, value: object, name: str) -> str | None:
    return "this name is reserved for the model before training, expected another one" if name == PRETRAINED else None


def _runs_here(scope: Scope, name: str, *_: str) -> str | None:
    """Jobs run on the device of the study, on machines that are not just described by a diagnosis made elsewhere."""
    study = scope.study
    if name not in study.machines:
        return unknown("machine", name, study.machines)
    if study.machines[name].diagnosed_in is not None:
        return f"{name} was diagnosed elsewhere, nothing runs on it here"
    kind = study.other_kind(name)
    return kind and (
        f"{name} is on another device, {kind} (machines.{name}.device), expected a machine on the device of the study, "
        f"{study.device}"
    )


def _has_faults(scope: Scope, name: str, *_: str) -> str | None:
    has_none = not scope.study.machines[name].faults
    return f"{name} has no faults, expected a machine with simulated faults" if has_none else None


def _orders(scope: Scope, orders: tuple[str, ...], number: str) -> str | None:
    machine = scope.study.loss_studies[int(number)].machine
    is_inside = any(fault.site != "layer_output" for fault in scope.study.machines[machine].faults)
    if set(orders) == {"after_noise"} or not is_inside:
        return None
    return (
        f"expected [after_noise], because {machine} has faults at sites other than layer_output, the only site with "
        "noise on hidden states"
    )


def _counterpart(scope: Scope, counterpart: Any, name: str) -> str | None:
    """A counterpart must not be the machine itself, with the settings of all models."""
    asked = counterpart.model_dump(exclude_none=True)
    models = [{"dtype": model.dtype, "attention": model.attention} for model in scope.study.models.values()]
    if not asked or scope.study.machines[name].device is not None:
        return None
    if not all(asked.items() <= model.items() for model in models):
        return None
    given = ", ".join(f"{key} {value}" for key, value in asked.items())
    return f"found {given}, which the models have, expected another one"


def _device_has_effect(scope: Scope, device: str, name: str) -> str | None:
    study, machine = scope.study, scope.study.machines[name]
    is_diagnosed = study.training is not None and machine.diagnosed_in is None
    if name in study.evaluation.machines or machine.counterpart is not None or is_diagnosed:
        return None
    why = "it was diagnosed elsewhere" if machine.diagnosed_in else "nothing is diagnosed in this study"
    return (
        f"found {device}, which has no effect: {why}, it has no counterpart to measure, and evaluation.machines lacks "
        "it; remove device"
    )


def _evaluates_otherwise(scope: Scope, name: str, *_: str) -> str | None:
    """Evaluations on a further machine must be possible there, and differ from those of the study itself."""
    study = scope.study
    machine, counterpart = study.machines[name], study.machines[name].counterpart
    is_here = study.other_kind(name) is None
    if is_here and not machine.faults and counterpart is None:
        return (
            f"{name} computes as the study does, expected a machine with another device, simulated faults or a "
            "counterpart"
        )
    if counterpart is None:
        return None
    for role, model in study.models.items():
        if counterpart.attention not in (None, model.attention):
            return (
                f"{name} has counterpart.attention {counterpart.attention}, model {role} has {model.attention}: noise "
                "on attention would be another one, expected the same"
            )
        changed = (counterpart.dtype, counterpart.threads, counterpart.batch_size)
        usual = (model.dtype, study.evaluation.threads, study.evaluation.batch_size)
        if is_here and all(new in (None, old) for new, old in zip(changed, usual, strict=True)):
            return f"{name} has a counterpart with the dtype, threads and batch_size of model {role} here"
    return None


def _scorer(scope: Scope, scorer: str) -> str | None:
    return scorer_problem(scorer, scope.study.dataset.answer_format)


def _reward(scope: Scope, answers: str) -> str | None:
    training = scope.study.training
    if training is None or training.rewards or answers not in ("text", "choice"):
        return None
    return (
        f"found {answers}, expected gsm8k, number or boxed, or training.rewards: the usual reward is for the number "
        "behind ####"
    )


def _source_of_model(scope: Scope, source: str, *_: str) -> str | None:
    try:
        num_layers_of(source)
    except ModelError as error:
        return str(error)
    return None


def _layer(scope: Scope, asked: Any, *_: str) -> str | None:
    for role in scope.study.models:
        if problem := _beyond(scope, asked, role):
            return problem
    return None


def _layer_of_arm(scope: Scope, asked: Any, arm: str) -> str | None:
    return _beyond(scope, asked, scope.arms[arm].model)


def _beyond(scope: Scope, asked: int | Collection[int], role: str) -> str | None:
    source = scope.study.models[role].source
    return beyond_layers(asked, num_layers_of(source), f"{role} ({source})")


def beyond_layers(asked: int | Collection[int], num_layers: int | None, model: str) -> str | None:
    """Return why a layer, or one of several, is none of a model; None if all are, or its number is not known."""
    largest = asked if isinstance(asked, int) else max(asked, default=-1)
    if num_layers is None or largest < num_layers:
        return None
    return f"found {largest}, model {model} has layers 0 to {num_layers - 1}"


def _attention_of_noise(scope: Scope, noise: EvaluationNoise, *_: str) -> str | None:
    """Evaluations have noise on attention as each model computes it."""
    for role, model in scope.study.models.items():
        problem = noise.attention_problem(model.attention)
        if problem is not None:
            return f".{problem} (model {role})"
    return None


def _attention_of_arm(scope: Scope, noise: Any, arm: str) -> str | None:
    """Noise on single attention products needs eager attention; noise on fused attention needs sdpa."""
    role = scope.arms[arm].model
    needed, model = {"decomposed": "eager", "fused": "sdpa"}[noise.attention], scope.study.models[role]
    if not noise.is_active or isinstance(noise.error, FakeQuantization) or model.attention == needed:
        return None
    return f".attention: found {noise.attention}, which needs models.{role}.attention {needed}, found {model.attention}"


def _evaluates_on_vllm(scope: Scope, noise: EvaluationNoise, *_: str) -> str | None:
    kinds = list(kinds_without_vllm(noise)) if scope.study.generation.backend == "vllm" else []
    if not kinds:
        return None
    return (
        f"found {kinds[0]}, which vLLM cannot compute, expected an error on outputs or generation.backend: transformers"
    )


def _fused_for_vllm(scope: Scope, attention: str, role: str) -> str | None:
    on_vllm = scope.study.generation.backend == "vllm" and any(scope.study.evaluation.all_levels())
    if not on_vllm or attention == "sdpa" or role not in used_models(scope):
        return None
    return f"found {attention}, generation.backend vllm needs sdpa: it computes attention as one operator"


def _rolls_out_on_vllm(scope: Scope, arm: Arm, *_: str) -> str | None:
    reason = why_vllm_cannot_roll_out(arm) if scope.study.generation.requested_for_rollouts == "vllm" else None
    return reason and f"vLLM cannot make its rollouts: {reason}; set generation.rollout_backend: transformers"


def _shared(scope: Scope, num_workers: int) -> str | None:
    """Tensor-parallel workers must be able to share the layers; most models of a hub are not known yet."""
    for role, model in used_models(scope).items() if num_workers > 1 else ():
        reason = why_not_shared(_facts(model), num_workers)
        if reason is not None:
            return f"found {num_workers}, but {_models(scope)}.{role} ({model.source}) cannot be shared so: {reason}"
    return None


def _positions(scope: Scope, tokens: int) -> str | None:
    """Responses must leave positions for a prompt; a job compares with its own prompts."""
    for role, model in used_models(scope).items():
        context = _facts(model).get("max_position_embeddings")
        if isinstance(context, int) and tokens >= context:
            return (
                f"found {tokens}, expected fewer than the {context} positions of model {role} ({model.source}), which "
                "its prompts need too"
            )
    return None


def _positions_of_evaluation(scope: Scope, tokens: int) -> str | None:
    # A task of lm-evaluation-harness cuts prompts itself.
    return None if isinstance(scope.study.dataset, LmEvalDataset) else _positions(scope, tokens)


def used_models(scope: Scope) -> dict[str, ModelConfig]:
    """Return the models of the arms, or the checkpoints."""
    roles = {arm.model for arm in scope.trained_arms().values()}
    models = scope.study.models
    return {role: models[role] for role in models if role in roles or scope.study.training is None}


def _models(scope: Scope) -> str:
    return "checkpoints" if scope.study.training is None else "models"


def _facts(model: ModelConfig) -> Mapping[str, Any]:
    """Return what is known of a model's config.json: nothing before the download of most models of a hub.

    Nothing of a folder without one either, which is a problem of its own.
    """
    if source_kind(model.source) == "folder" and not (Path(model.source) / "config.json").is_file():
        return {}
    return known_config(model.source) or {}


def _measured(scope: Scope, error: object, *_: str) -> str | None:
    """The figures of a measured error must be readable or measurable."""
    if not isinstance(error, MeasuredError):
        return None
    machines = scope.study.machines
    if error.figures is not None:
        return ".figures: found figures, expected none: they are read from the file that `from` names"
    if error.machine is None:
        is_there = Path(error.source).is_file()
        return None if is_there else f".from: no file {error.source}, expected one that `aqnpipe parity --json` wrote"
    if error.machine not in machines:
        found = unknown("machine", error.machine, machines)
        return f".from: {found}, or a file of `aqnpipe parity --json` with the ending .json"
    return None if machines[error.machine].has_parity else f".from: {_without_counterpart(error.machine)}"


def _without_counterpart(machine: str) -> str:
    return f"machine {machine} has no counterpart, expected machines.{machine}.counterpart or measured_in"


def _measured_for_sigmas(scope: Scope, strategy: str, arm: str) -> str | None:
    aqn = scope.arms[arm].aqn
    machine = None if aqn is None else aqn.layer_sigmas_from
    if strategy != NEEDS_PARITY or machine is None or scope.study.machines[machine].has_parity:
        return None
    return f"{strategy} needs a measured error, but {_without_counterpart(machine)}"


def _energy(scope: Scope, base: float) -> str | None:
    rule = scope.study.sigma_rule
    for name, arm in scope.trained_arms().items():
        strategy = "published" if arm.aqn is None else arm.aqn.layer_sigmas_strategy
        if strategy != "published" and not rule.sigma_min <= base <= rule.sigma_max:
            return (
                f"found {base:g}, expected sigma_min {rule.sigma_min:g} to sigma_max {rule.sigma_max:g}: the sigmas "
                f"{strategy} of arm {name} have its energy"
            )
    return None


def _ranges(scope: Scope, ranges: tuple[object, ...], *_: str) -> str | None:
    training = scope.study.training
    if training is None or len(ranges) == training.epochs:
        return None
    return f"found {len(ranges)} ranges, the study trains {training.epochs} epochs"


def _compared(scope: Scope, name: str, *_: str) -> str | None:
    study = scope.study
    if study.training is None:
        return _missing("checkpoint", name, study.arms)
    return _missing("arm", name, (*study.arms, PRETRAINED))


def _clean_level(scope: Scope, comparison: Any, *_: str) -> str | None:
    if comparison.kind == "arms" or 0.0 in scope.study.evaluation.noise_levels:
        return None
    return "compares with noise level 0, evaluation.noise_levels does not contain 0.0"


def _level(scope: Scope, level: float, *_: str) -> str | None:
    evaluation = scope.study.evaluation
    if level in evaluation.all_levels():
        return None
    evaluated = ", ".join([*map(str, evaluation.noise_levels), *evaluation.noises])
    return f"found {level}, the study evaluates {evaluated}"


def _explored(scope: Scope, pair: Any) -> str | None:
    names = (pair.treatment, pair.control)
    if pair.treatment == pair.control:
        return f"treatment and control are both {pair.control!r}, expected two arms"
    roles = {scope.arms[name].model for name in names if name != PRETRAINED}
    if len(roles) > 1:
        return f"{' and '.join(names)} train different models ({', '.join(sorted(roles))})"
    return None


def _aa_control(scope: Scope, target: str, name: str) -> str | None:
    study, arms = scope.study, scope.arms
    if target not in arms:
        return unknown("arm", target, sorted(arms), "the file defines")
    if target == name:
        return "found the arm itself, expected another arm"
    if target not in study.arms:
        return f"{unknown('arm', target, study.arms)}; without it nothing controls {name}"
    if _imitates(arms, target, name):
        return f"{target} is itself a control of {name}, expected an arm that is none"
    if arms[target].model != arms[name].model:
        return f"{target} trains the model {arms[target].model}, {name} the model {arms[name].model}"
    return None


def _imitates(arms: Mapping[str, Arm], name: str, target: str) -> bool:
    """Return whether arm `name` is an A/A control of `target`, or of an arm that is."""
    followed: set[str] = set()
    while name in arms and name not in followed:
        followed.add(name)
        name = arms[name].aa_control_of or ""
        if name == target:
            return True
    return False


def _seed(scope: Scope, offset: int, *_: str) -> str | None:
    largest = max(seed_numbers(scope.study.seeds))
    if largest + offset <= LARGEST_TRAINING_SEED:
        return None
    return (
        f"with seed {largest} of {scope.source} it trains with seed {largest + offset}, expected at most "
        f"{LARGEST_TRAINING_SEED:,}"
    )


def _prompt_of_task(scope: Scope, prompt: PromptFormat) -> str | None:
    if not isinstance(scope.study.dataset, LmEvalDataset) or prompt == PromptFormat(style=prompt.style):
        return None
    return (
        "found layout, instruction or examples, expected style alone: the task makes its prompts (dataset.num_fewshot "
        "sets the examples)"
    )


def _sampling_of_task(scope: Scope, sampling: object) -> str | None:
    is_task = isinstance(scope.study.dataset, LmEvalDataset)
    return "the task says how responses are drawn, remove sampling" if is_task else None


def _backend_of_task(scope: Scope, backend: str) -> str | None:
    is_task = isinstance(scope.study.dataset, LmEvalDataset)
    fits = not is_task or backend != "vllm"
    return None if fits else "found vllm, expected transformers or auto for dataset.source lm_eval"


def _unit(scope: Scope, unit: str) -> str | None:
    dataset = scope.study.dataset
    if unit == "question":
        return None
    if isinstance(dataset, GeneratedDataset) or getattr(dataset, "cluster_column", None):
        return f"found {unit}, but the questions of the data set have clusters, expected question"
    if isinstance(dataset, LmEvalDataset) or scope.study.generation.backend == "vllm":
        return f"found {unit}, but vLLM and lm-evaluation-harness make batches of their own, expected question"
    return None


def _comparable(scope: Scope, checkpoint: ModelConfig, name: str) -> str | None:
    """Checkpoints must be different models that compute alike."""
    for other, earlier in scope.study.models.items():
        if other == name:
            break
        if _location(earlier.source) == _location(checkpoint.source) and earlier.revision == checkpoint.revision:
            return f"found {checkpoint.source!r}, which is also checkpoint {other}, expected another model"
        for key in ("dtype", "attention"):
            ours, theirs = getattr(checkpoint, key), getattr(earlier, key)
            if ours != theirs:
                return (
                    f".{key}: found {ours}, checkpoint {other} has {theirs}: expected the same for all, because a "
                    "comparison would also be one of number formats or kernels"
                )
    return None


def _location(source: str) -> str:
    """Return the folder of a local model as an absolute path without links; other sources as they are."""
    return str(Path(source).resolve()) if source_kind(source) == "folder" else source


RULES: tuple[tuple[str, Check], ...] = (
    ("arms[*]", _reserved),
    ("checkpoints[*]", _reserved),
    ("arms[*].task", _task),
    ("arms[*].model", _known("role", "models")),
    ("arms[*].machine", _runs_here),
    ("arms[*].aqn.layer_sigmas_from", _known("machine", "machines")),
    ("evaluation.num_questions", _at_most("dataset.num_test")),
    ("training.validation_questions", _validated),
    ("loss_studies[*].num_texts", _at_most("dataset.num_test")),
    ("prompt.num_examples", _at_most("dataset.num_train", below=True)),
    ("evaluation.primary_scorer", _scorer),
    ("dataset.answer_format", _reward),
    ("prompt", _prompt_of_task),
    ("evaluation.sampling", _sampling_of_task),
    ("generation.backend", _backend_of_task),
    ("statistics.unit", _unit),
    ("evaluation.pretrained_machine", _runs_here),
    ("machines[*].counterpart", _counterpart),
    ("machines[*].device", _device_has_effect),
    ("loss_studies[*].model", _known("role", "models")),
    ("loss_studies[*].machine", _runs_here),
    ("loss_studies[*].machine", _has_faults),
    ("loss_studies[*].orders", _orders),
    ("evaluation.machines[*]", _known("machine", "machines")),
    ("evaluation.machines[*]", _evaluates_otherwise),
    ("models[*].source", _source_of_model),
    ("machines[*].faults[*].layer", _layer),
    ("noises[*].operator_noise.layers", _layer),
    ("noises[*].operator_noise.layer_scales", _layer),
    ("arms[*].operator_noise.layers", _layer_of_arm),
    ("arms[*].operator_noise.layer_scales", _layer_of_arm),
    ("noises[*]", _attention_of_noise),
    ("arms[*].operator_noise", _attention_of_arm),
    ("noises[*]", _evaluates_on_vllm),
    ("models[*].attention", _fused_for_vllm),
    ("generation.tensor_parallel", _shared),
    ("arms[*]", _rolls_out_on_vllm),
    ("arms[*].operator_noise.error", _measured),
    ("noises[*].operator_noise.error", _measured),
    ("sigma_rule.base_sigma", _energy),
    ("arms[*].aqn.layer_sigmas_strategy", _measured_for_sigmas),
    ("arms[*].aqn.schedule.ranges", _ranges),
    ("comparisons[*].arm", _compared),
    ("comparisons[*].treatment", _compared),
    ("comparisons[*].control", _compared),
    ("comparisons[*]", _clean_level),
    ("comparisons[*].noise_level", _level),
    ("report.explore.treatment", _compared),
    ("report.explore.control", _compared),
    ("report.explore", _explored),
    ("report.explore.noise_level", _level),
    ("arms[*].aa_control_of", _aa_control),
    ("arms[*].seed_offset", _seed),
    ("training.max_response_tokens", _positions),
    ("evaluation.max_response_tokens", _positions_of_evaluation),
    ("checkpoints[*]", _comparable),
)


def cross_reference_problems(study: "StudyConfig", arms: Mapping[str, Arm], source: str) -> Iterator[str]:
    """Yield the problems of `study` (read from `source`), one line each; only the first is sure to be meant.

    `arms`: the content of its arms file, or its checkpoints as arms.
    """
    for name in study.arms:
        if name not in arms:
            yield f"{source}: arms: {unknown('arm', name, sorted(arms), f'{study.arms_file} defines')}"
            return
    scope = Scope(study, arms, source)
    for path, check in RULES:
        for where, value, names in scope.places(path):
            if problem := check(scope, value, *names):
                yield f"{where}{'' if problem.startswith('.') else ': '}{problem}"
