"""Rules across the sections of a study: names that must exist, limits, and what cannot be combined.

A rule is a path into the study and a check, which returns what is expected in place of a value there. `[*]` stands for
every entry of a mapping or a list. `arms` are the arms that the study trains, `models` its models or checkpoints,
`noises` the settings of the named noises of its evaluation. All problems have one form: file, key, what was found and
what is expected. The first is reported, so a rule may rely on those before it, as that a machine exists.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from aqnpipe.config.analysis import PRETRAINED, seed_numbers
from aqnpipe.config.arm import Arm
from aqnpipe.config.base import LARGEST_TRAINING_SEED
from aqnpipe.config.dataset import GeneratedDataset, LmEvalDataset, PromptFormat
from aqnpipe.config.diagnosis import NEEDS_PARITY
from aqnpipe.config.evaluation import expected_scorer, settings_of
from aqnpipe.config.generation import is_without_vllm, name_of, why_not_shared, why_vllm_cannot_roll_out
from aqnpipe.config.model import ModelConfig, known_config, may_route, noised_attention, num_layers_of, source_kind
from aqnpipe.config.noise import FakeQuantization
from aqnpipe.config.validation_messages import one_of, shown
from aqnpipe.errors import ModelError

if TYPE_CHECKING:
    from aqnpipe.config.study import StudyConfig

Place = tuple[str, Any, tuple[str, ...]]
"""File and key, the value there, and what stands for each `[*]`."""

Check = Callable[..., str | None]
"""Takes the scope, a value and what stands for each `[*]`; returns what is expected instead, None if it is right."""


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

    @property
    def trained_arms(self) -> dict[str, Arm]:
        """The arms that the study trains, by name."""
        return {name: self.arms[name] for name in self.study.arms} if self.study.training is not None else {}

    @property
    def used_models(self) -> dict[str, ModelConfig]:
        """The models of the arms, or the checkpoints."""
        roles = {arm.model for arm in self.trained_arms.values()}
        models = self.study.models
        return {role: models[role] for role in models if role in roles or self.study.training is None}

    @property
    def is_of_task(self) -> bool:
        """Return whether a task of lm-evaluation-harness makes the prompts and grades the answers."""
        return isinstance(self.study.dataset, LmEvalDataset)

    def _root(self, name: str) -> tuple[str, Any]:
        match name:
            case "arms":
                return f"{self.study.arms_file}: arms", self.trained_arms
            case "models":
                return f"{self.source}: {'models' if self.study.training else 'checkpoints'}", self.study.models
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
        field = type(value).model_fields.get(part) if isinstance(value, BaseModel) else None
        yield f"{where}.{(field and field.alias) or part}", getattr(value, part, None), names
    elif value is not None:
        for key, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield f"{where}.{key}", entry, (*names, str(key))


def _found(where: str, value: Any) -> str:
    """Return a value as it is written; of settings, and of what has none, their key."""
    if isinstance(value, BaseModel):
        return where.rpartition(".")[2]
    if not isinstance(value, tuple):
        return shown(value)
    return f"{len(value)} entries" if any(isinstance(part, BaseModel) for part in value) else shown(list(value))


def _in(section: str) -> Check:
    """Return the check that a name is one of those in a section."""
    return lambda scope, name, *_: one_of(name, getattr(scope.study, section))


def _at_most(key: str, *, below: bool = False) -> Check:
    """Return the check that a number is not above, or is below, another setting; null there is no limit."""

    def check(scope: Scope, asked: int, *_: str) -> str | None:
        limit = attrgetter(key)(scope.study)
        if limit is None or asked < limit + (not below):
            return None
        return f"{'fewer than' if below else 'at most'} {key} {limit}"

    return check


def _usual_of_task(setting: str) -> Check:
    """Return the check that a task of lm-evaluation-harness, which makes its prompts, gets no setting of prompts."""
    usual = getattr(PromptFormat(), setting)
    return lambda scope, value: (
        f"{usual!r}: the task makes its prompts (dataset.num_fewshot sets the examples)"
        if scope.is_of_task and value != usual
        else None
    )


def _validated(scope: Scope, asked: int) -> str | None:
    return expected_validation_questions(scope.study, scope.study.dataset.num_test)


def expected_validation_questions(study: "StudyConfig", num_test: int | None) -> str | None:
    """Return the number of questions expected for validations; None if it is right, or `num_test` is not known.

    Of fewer questions than the default all are taken, but a number that was asked for is not lowered in silence.
    """
    training = study.training
    if training is None or num_test is None or "validation_questions" not in training.model_fields_set:
        return None
    return f"at most the {num_test} test questions" if training.validation_questions > num_test else None


def _runs_here(scope: Scope, name: str, *_: str) -> str | None:
    """Jobs run on the device of the study, on machines that are not just described by a diagnosis made elsewhere."""
    study = scope.study
    if name not in study.machines:
        return one_of(name, study.machines)
    if study.machines[name].diagnosed_in is not None:
        return "a machine on which jobs run here, it was diagnosed elsewhere"
    kind = study.other_kind(name)
    return kind and f"a machine on the device of the study, {study.device}: machines.{name}.device is {kind}"


def _orders(scope: Scope, orders: tuple[str, ...], number: str) -> str | None:
    machine = scope.study.loss_studies[int(number)].machine
    is_inside = any(fault.site != "layer_output" for fault in scope.study.machines[machine].faults)
    if set(orders) == {"after_noise"} or not is_inside:
        return None
    return f"[after_noise]: {machine} has faults at sites other than layer_output, where hidden states have their noise"


def _counterpart(scope: Scope, counterpart: Any, name: str) -> str | None:
    """A counterpart must not be the machine itself, with the settings of all models."""
    asked = counterpart.model_dump(exclude_none=True)
    models = [{"dtype": model.dtype, "attention": model.attention} for model in scope.study.models.values()]
    is_other = scope.study.machines[name].device is not None or not all(asked.items() <= of.items() for of in models)
    if not asked or is_other:
        return None
    return f"other settings than {', '.join(f'{key} {value}' for key, value in asked.items())}, which the models have"


def _device_has_effect(scope: Scope, device: str, name: str) -> str | None:
    study, machine = scope.study, scope.study.machines[name]
    is_diagnosed = study.training is not None and machine.diagnosed_in is None
    if name in study.evaluation.machines or machine.counterpart is not None or is_diagnosed:
        return None
    why = "it was diagnosed elsewhere" if machine.diagnosed_in else "nothing is diagnosed in this study"
    return f"no device, which has no effect: {why}, it has no `counterpart`, and evaluation.machines lacks it"


def _evaluates_otherwise(scope: Scope, name: str, *_: str) -> str | None:
    """Evaluations on a further machine must be possible there, and differ from those of the study itself."""
    study = scope.study
    machine, counterpart = study.machines[name], study.machines[name].counterpart
    is_here = study.other_kind(name) is None
    if counterpart is None:
        is_same = is_here and not machine.faults
        return "a machine with another device, simulated faults or a `counterpart`" if is_same else None
    for role, model in study.models.items():
        if counterpart.attention not in (None, model.attention):
            return (
                f"a `counterpart` with attention {model.attention} as of model {role}, not {counterpart.attention}: "
                "noise on attention would be another one"
            )
        changed = (counterpart.dtype, counterpart.threads, counterpart.batch_size)
        usual = (model.dtype, study.evaluation.threads, study.evaluation.batch_size)
        if is_here and all(new in (None, old) for new, old in zip(changed, usual, strict=True)):
            return f"a `counterpart` with another dtype, threads or batch_size than model {role} has here"
    return None


def _answers_with_reward(scope: Scope, answers: str) -> str | None:
    training = scope.study.training
    if training is None or training.rewards or answers not in ("text", "choice"):
        return None
    return "gsm8k, number or boxed, or training.rewards: the usual reward is for the number behind ####"


def _source_of_model(scope: Scope, source: str, *_: str) -> str | None:
    try:
        num_layers_of(source)
    except ModelError as error:
        return f"a model that can be read: {error}"
    return None


def _with_models(check: Check) -> Check:
    """Return the check of a value with every model of the study; the check gets the name of a model."""
    return lambda scope, value, *_: next(filter(None, (check(scope, value, role) for role in scope.study.models)), None)


def _with_used_models(check: Check) -> Check:
    """Return the check of a value with the models of the arms, or the checkpoints."""
    return lambda scope, value, *_: next(filter(None, (check(scope, value, role) for role in scope.used_models)), None)


def _with_its_model(check: Check) -> Check:
    """Return the check of a value of an arm with the model of the arm."""
    return lambda scope, value, arm: check(scope, value, scope.arms[arm].model)


def _layers(scope: Scope, asked: int | Collection[int], role: str) -> str | None:
    source = scope.study.models[role].source
    return expected_layers(asked, num_layers_of(source), f"{role} ({source})")


def expected_layers(asked: int | Collection[int], num_layers: int | None, model: str) -> str | None:
    """Return the layers that a model has; None if it has those that are asked for, or its number is not known."""
    largest = asked if isinstance(asked, int) else max(asked, default=-1)
    if num_layers is None or largest < num_layers:
        return None
    return f"layers 0 to {num_layers - 1}, which model {model} has"


def _attention_of_noise(scope: Scope, given: str, role: str) -> str | None:
    """Evaluations have noise on attention as each model computes it."""
    attention = scope.study.models[role].attention
    usual = noised_attention(attention)
    return None if given == usual else f"no value: model {role} computes attention {attention}, {usual}"


def _attention_of_arm(scope: Scope, given: str, arm: str) -> str | None:
    """Noise on single attention products needs eager attention; noise on fused attention needs sdpa."""
    noise, role = scope.arms[arm].operator_noise, scope.arms[arm].model
    usual = noised_attention(scope.study.models[role].attention)
    if noise is None or not noise.is_active or isinstance(noise.error, FakeQuantization) or given == usual:
        return None
    return f"{usual}: models.{role}.attention is {scope.study.models[role].attention}"


def _redraw(scope: Scope, redraw: str, role: str) -> str | None:
    """A fixed machine derives its error from the operands of each product, which only eager attention has."""
    is_possible = redraw != "never" or scope.study.models[role].attention == "eager"
    return None if is_possible else f"always, or models.{role}.attention: eager"


def _scales_float16(scope: Scope, loss_scale: int) -> str | None:
    is_used = any(model.dtype == "float16" for model in scope.used_models.values())
    return None if is_used else "no value, which has an effect on models with dtype: float16 alone"


def _fits_vllm(scope: Scope, error: Any, *_: str) -> str | None:
    generation = scope.study.generation
    if generation.backend != "vllm":
        return None
    if is_without_vllm(error):
        return f"an error that vLLM can compute, not {name_of(error)}, or generation.backend: transformers"
    is_divided = isinstance(error, FakeQuantization) and generation.tensor_parallel > 1
    return "an error of results, as generation.tensor_parallel divides operands" if is_divided else None


def _fused_for_vllm(scope: Scope, attention: str, role: str) -> str | None:
    on_vllm = scope.study.generation.backend == "vllm" and any(scope.study.evaluation.all_levels())
    if not on_vllm or attention == "sdpa" or role not in scope.used_models:
        return None
    return "sdpa for generation.backend vllm, which computes attention as one operator"


def _rolls_out_on_vllm(scope: Scope, arm: Arm, *_: str) -> str | None:
    reason = why_vllm_cannot_roll_out(arm) if scope.study.generation.requested_for_rollouts == "vllm" else None
    return reason and f"generation.rollout_backend: transformers, vLLM cannot make its rollouts: {reason}"


def _routed(scope: Scope, replays: bool, role: str) -> str | None:
    """The choice of routers needs routers; most models of a hub are not known yet."""
    model = scope.study.models[role]
    is_dense = replays and (facts := _facts(model)) and not may_route(facts)
    return f"false: model {role} ({model.source}) is no mixture of experts" if is_dense else None


def _shared(scope: Scope, num_workers: int, role: str) -> str | None:
    """Tensor-parallel workers must be able to share the layers; most models of a hub are not known yet."""
    model = scope.study.models[role]
    reason = why_not_shared(_facts(model), num_workers) if num_workers > 1 else None
    return reason and f"a number by which model {role} ({model.source}) can be shared: {reason}"


def _positions(scope: Scope, tokens: int, role: str) -> str | None:
    """Responses must leave positions for a prompt; a job compares with its own prompts. A task cuts prompts itself."""
    model = scope.study.models[role]
    context = None if scope.is_of_task else _facts(model).get("max_position_embeddings")
    if not isinstance(context, int) or tokens < context:
        return None
    return f"fewer than the {context} positions of model {role} ({model.source}), which its prompts need too"


def _facts(model: ModelConfig) -> Mapping[str, Any]:
    """Return what is known of a model's config.json: nothing before the download of most models of a hub.

    Nothing of a folder without one either, which is a problem of its own.
    """
    if source_kind(model.source) == "folder" and not (Path(model.source) / "config.json").is_file():
        return {}
    return known_config(model.source) or {}


def _measured(scope: Scope, source: str, *_: str) -> str | None:
    """The figures of a measured error must be readable or measurable."""
    machines = scope.study.machines
    if source.endswith(".json"):
        return None if Path(source).is_file() else "an existing file that `aqnpipe parity --json` wrote"
    if source not in machines:
        return f"{one_of(source, machines)}, or a file of `aqnpipe parity --json` with the ending .json"
    return None if machines[source].has_parity else _with_counterpart(source)


def _with_counterpart(machine: str) -> str:
    return f"machines.{machine}.counterpart or measured_in: the error of {machine} is not measured"


def _measured_for_sigmas(scope: Scope, strategy: str, arm: str) -> str | None:
    aqn = scope.arms[arm].aqn
    machine = None if aqn is None else aqn.layer_sigmas_from
    if strategy != NEEDS_PARITY or machine is None or scope.study.machines[machine].has_parity:
        return None
    return f"another strategy, or {_with_counterpart(machine)}"


def _energy(scope: Scope, base: float) -> str | None:
    rule = scope.study.sigma_rule
    for name, arm in scope.trained_arms.items():
        strategy = "published" if arm.aqn is None else arm.aqn.layer_sigmas_strategy
        if strategy != "published" and not rule.sigma_min <= base <= rule.sigma_max:
            return (
                f"sigma_min {rule.sigma_min:g} to sigma_max {rule.sigma_max:g}: the sigmas {strategy} of arm {name} "
                "have its total variance"
            )
    return None


def _ranges(scope: Scope, ranges: tuple[object, ...], *_: str) -> str | None:
    training = scope.study.training
    if training is None or len(ranges) == training.epochs:
        return None
    return f"a range for each of the {training.epochs} epochs"


def _compared(scope: Scope, name: str, *_: str) -> str | None:
    return one_of(name, (*scope.study.arms, *([PRETRAINED] if scope.study.training else [])))


def _clean_level(scope: Scope, kind: str, *_: str) -> str | None:
    is_right = kind == "arms" or 0.0 in scope.study.evaluation.noise_levels
    return None if is_right else "arms, or 0.0 among evaluation.noise_levels, to which it is compared"


def _level(scope: Scope, level: float, *_: str) -> str | None:
    evaluation = scope.study.evaluation
    evaluated = ", ".join([*map(str, evaluation.noise_levels), *evaluation.noises])
    return None if level in evaluation.all_levels() else f"one that the study evaluates: {evaluated}"


def _explored(scope: Scope, control: str) -> str | None:
    treatment = scope.study.report.explore.treatment if scope.study.report.explore else control
    roles = [scope.arms[name].model for name in (treatment, control) if name != PRETRAINED]
    is_right = treatment != control and len(set(roles)) == 1
    return None if is_right else f"another arm than {treatment}, of the model {roles[0]}"


def _aa_control(scope: Scope, target: str, name: str) -> str | None:
    study, arms = scope.study, scope.arms
    if target not in study.arms:
        return f"{one_of(target, study.arms)}; without it nothing controls {name}"
    if _imitates(arms, target, name):
        return f"an arm that is no control of {name} itself"
    is_right = arms[target].model == arms[name].model
    return None if is_right else f"an arm of the model {arms[name].model}, it has {arms[target].model}"


def _imitates(arms: Mapping[str, Arm], name: str, target: str) -> bool:
    """Return whether arm `name` is `target`, or an A/A control of it, or of an arm that is."""
    followed: set[str] = set()
    while name != target and name in arms and name not in followed:
        followed.add(name)
        name = arms[name].aa_control_of or ""
    return name == target


def _seed(scope: Scope, offset: int, *_: str) -> str | None:
    largest = LARGEST_TRAINING_SEED - max(seed_numbers(scope.study.seeds))
    return None if offset <= largest else f"at most {largest:,} beside the seeds of {scope.source}"


def _unit(scope: Scope, unit: str) -> str | None:
    dataset = scope.study.dataset
    if unit == "question":
        return None
    if isinstance(dataset, GeneratedDataset) or getattr(dataset, "cluster_column", None):
        return "question: the questions of the data set have clusters"
    is_other = scope.is_of_task or scope.study.generation.backend == "vllm"
    return "question: vLLM and lm-evaluation-harness choose their batches themselves" if is_other else None


def _same(key: str) -> Check:
    """Return the check that checkpoints compute alike."""

    def check(scope: Scope, value: str, *_: str) -> str | None:
        first, model = next(iter(scope.study.models.items()))
        theirs = getattr(model, key)
        return None if value == theirs else f"{theirs} as checkpoint {first}: a comparison would also be one of {key}s"

    return check


def _another_model(scope: Scope, source: str, name: str) -> str | None:
    """Checkpoints must be different models."""
    models = scope.study.models
    for other in list(models)[: list(models).index(name)]:
        is_same = _location(models[other].source) == _location(source)
        if is_same and models[other].revision == models[name].revision:
            return f"another model, this is also checkpoint {other}"
    return None


def _location(source: str) -> str:
    """Return the folder of a local model as an absolute path without links; other sources as they are."""
    return str(Path(source).resolve()) if source_kind(source) == "folder" else source


def _task(scope: Scope, task: str, *_: str) -> str | None:
    own = getattr(scope.study.dataset, "task", None)
    return None if task == own else f"{own}, the task of the data set of {scope.source}"


def _not_reserved(scope: Scope, value: object, name: str) -> str | None:
    return "another name: this one is of the model before training" if name == PRETRAINED else None


def _has_faults(scope: Scope, name: str, *_: str) -> str | None:
    return None if scope.study.machines[name].faults else "a machine with simulated faults"


def _scorer(scope: Scope, scorer: str) -> str | None:
    return expected_scorer(scorer, scope.study.dataset.answer_format)


def _backend_of_task(scope: Scope, backend: str) -> str | None:
    is_wrong = scope.is_of_task and backend == "vllm"
    return "transformers or auto for dataset.source lm_eval" if is_wrong else None


def _no_figures(scope: Scope, figures: object, *_: str) -> str | None:
    return "none: they are read from the file that `from` names"


RULES: tuple[tuple[str, Check], ...] = (
    ("arms[*]", _not_reserved),
    ("checkpoints[*]", _not_reserved),
    ("arms[*].task", _task),
    ("arms[*].model", _in("models")),
    ("arms[*].machine", _runs_here),
    ("arms[*].aqn.layer_sigmas_from", _in("machines")),
    ("evaluation.num_questions", _at_most("dataset.num_test")),
    ("training.validation_questions", _validated),
    ("loss_studies[*].num_texts", _at_most("dataset.num_test")),
    ("prompt.num_examples", _at_most("dataset.num_train", below=True)),
    ("evaluation.primary_scorer", _scorer),
    ("dataset.answer_format", _answers_with_reward),
    *((f"prompt.{key}", _usual_of_task(key)) for key in ("layout", "instruction", "num_examples", "example_seed")),
    ("evaluation.sampling", lambda s, *_: "none: the task says how responses are sampled" if s.is_of_task else None),
    ("generation.backend", _backend_of_task),
    ("statistics.unit", _unit),
    ("evaluation.pretrained_machine", _runs_here),
    ("machines[*].counterpart", _counterpart),
    ("machines[*].device", _device_has_effect),
    ("loss_studies[*].model", _in("models")),
    ("loss_studies[*].machine", _runs_here),
    ("loss_studies[*].machine", _has_faults),
    ("loss_studies[*].orders", _orders),
    ("evaluation.machines[*]", _in("machines")),
    ("evaluation.machines[*]", _evaluates_otherwise),
    ("models[*].source", _source_of_model),
    ("machines[*].faults[*].layer", _with_models(_layers)),
    ("noises[*].operator_noise.layers", _with_models(_layers)),
    ("noises[*].operator_noise.layer_scales", _with_models(_layers)),
    ("arms[*].operator_noise.layers", _with_its_model(_layers)),
    ("arms[*].operator_noise.layer_scales", _with_its_model(_layers)),
    ("noises[*].operator_noise.error.redraw", _with_used_models(_redraw)),
    ("arms[*].operator_noise.error.redraw", _with_its_model(_redraw)),
    ("training.loss_scale", _scales_float16),
    ("noises[*].operator_noise.attention", _with_models(_attention_of_noise)),
    ("arms[*].operator_noise.attention", _attention_of_arm),
    ("noises[*].operator_noise.error", _fits_vllm),
    ("noises[*].module_noise.error", _fits_vllm),
    ("models[*].attention", _fused_for_vllm),
    ("generation.tensor_parallel", _with_used_models(_shared)),
    ("arms[*].routing_replay", _with_its_model(_routed)),
    ("arms[*]", _rolls_out_on_vllm),
    ("arms[*].operator_noise.error.figures", _no_figures),
    ("arms[*].operator_noise.error.source", _measured),
    ("noises[*].operator_noise.error.figures", _no_figures),
    ("noises[*].operator_noise.error.source", _measured),
    ("sigma_rule.base_sigma", _energy),
    ("arms[*].aqn.layer_sigmas_strategy", _measured_for_sigmas),
    ("arms[*].aqn.schedule.ranges", _ranges),
    ("comparisons[*].arm", _compared),
    ("comparisons[*].treatment", _compared),
    ("comparisons[*].control", _compared),
    ("comparisons[*].kind", _clean_level),
    ("comparisons[*].noise_level", _level),
    ("report.explore.treatment", _compared),
    ("report.explore.control", _compared),
    ("report.explore.control", _explored),
    ("report.explore.noise_level", _level),
    ("arms[*].aa_control_of", _aa_control),
    ("arms[*].seed_offset", _seed),
    ("training.max_response_tokens", _with_used_models(_positions)),
    ("evaluation.max_response_tokens", _with_used_models(_positions)),
    ("checkpoints[*].source", _another_model),
    ("checkpoints[*].dtype", _same("dtype")),
    ("checkpoints[*].attention", _same("attention")),
)


def cross_reference_problems(study: "StudyConfig", arms: Mapping[str, Arm], source: str) -> Iterator[str]:
    """Yield the problems of `study` (read from `source`), one line each; only the first is sure to be meant.

    `arms`: the content of its arms file, or its checkpoints as arms.
    """
    for index, name in enumerate(study.arms):
        if expected := one_of(name, arms):
            yield f"{source}: arms.{index}: found {shown(name)}, expected {expected} of {study.arms_file}"
            return
    scope = Scope(study, arms, source)
    for path, check in RULES:
        for where, value, names in scope.places(path):
            if expected := check(scope, value, *names):
                yield f"{where}: found {_found(where, value)}, expected {expected}"
