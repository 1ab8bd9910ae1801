"""Rules across the sections of a study: names that must exist, limits, and what cannot be combined.

A rule is a path into the study and a check, which returns what is expected in place of a value there. `[*]` stands for
every entry of a mapping or a list, `|` for several keys. `arms` are the arms that the study trains, `models` its
models or checkpoints, `noises` the settings of the named noises of its evaluation. All problems have one form: file,
key, what was found and what is expected. The first is reported, so a rule may rely on those before it, as that a
machine exists.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
from aqnpipe.config.model import known_config, may_route, noised_attention, num_layers_of, source_kind
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
class _Scope:
    """A study read from `source`, the content of its arms file or its checkpoints as arms, and the checks of rules."""

    study: "StudyConfig"
    arms: Mapping[str, Arm]
    source: str

    def places(self, path: str) -> list[Place]:
        """Return the places of a path that have a value."""
        first, *parts = (part.split("|") for part in path.replace("[*]", ".*").split("."))
        found: list[Place] = [(*self._root(name), ()) for name in first]
        for names in parts:
            found = [place for start in found for name in names for place in _step(start, name)]
        return [place for place in found if place[1] is not None]

    def _root(self, name: str) -> tuple[str, Any]:
        models = self.study.models
        match name:
            case "arms":
                return f"{self.study.arms_file}: arms", self.trained_arms
            case "models":
                return f"{self.source}: {'models' if self.study.training else 'checkpoints'}", models
            case "checkpoints":
                return f"{self.source}: checkpoints", None if self.study.training else models
            case "noises":
                noises = self.study.evaluation.noises
                return f"{self.source}: evaluation.noises", {key: settings_of(noise) for key, noise in noises.items()}
        return f"{self.source}: {name}", getattr(self.study, name, None)

    @property
    def trained_arms(self) -> dict[str, Arm]:
        """The arms that the study trains, by name."""
        return {name: self.arms[name] for name in self.study.arms} if self.study.training is not None else {}

    @property
    def is_of_task(self) -> bool:
        """Return whether a task of lm-evaluation-harness makes the prompts and grades the answers."""
        return isinstance(self.study.dataset, LmEvalDataset)

    def all_models(self, *_: str) -> Iterable[str]:
        """Return the models of the study, or its checkpoints, by name."""
        return self.study.models

    def used_models(self, *_: str) -> Iterable[str]:
        """Return the models of the arms, or the checkpoints."""
        roles = {arm.model for arm in self.trained_arms.values()}
        return [role for role in self.study.models if role in roles or self.study.training is None]

    def its_model(self, arm: str) -> Iterable[str]:
        """Return the model of an arm."""
        return [self.arms[arm].model]

    # Checks of names, machines and numbers.

    def not_reserved(self, value: object, name: str) -> str | None:
        return "another name: this one is of the model before training" if name == PRETRAINED else None

    def task(self, task: str, *_: str) -> str | None:
        own = getattr(self.study.dataset, "task", None)
        return None if task == own else f"{own}, the task of the data set of {self.source}"

    def runs_here(self, name: str, *_: str) -> str | None:
        """Jobs run on the device of the study, on machines that were not diagnosed elsewhere."""
        study = self.study
        if name not in study.machines:
            return one_of(name, study.machines)
        if study.machines[name].diagnosed_in is not None:
            return "a machine on which jobs run here, it was diagnosed elsewhere"
        kind = study.other_kind(name)
        return kind and f"a machine on the device of the study, {study.device}: machines.{name}.device is {kind}"

    def has_faults(self, name: str, *_: str) -> str | None:
        return None if self.study.machines[name].faults else "a machine with simulated faults"

    def orders(self, orders: tuple[str, ...], number: str) -> str | None:
        name = self.study.loss_studies[int(number)].machine
        is_inside = any(fault.site != "layer_output" for fault in self.study.machines[name].faults)
        if set(orders) == {"after_noise"} or not is_inside:
            return None
        return (
            f"[after_noise]: {name} has faults at sites other than layer_output, where hidden states have their noise"
        )

    def counterpart(self, counterpart: Any, name: str) -> str | None:
        """A counterpart must not be the machine itself, with the settings of all models."""
        asked = counterpart.model_dump(exclude_none=True)
        models = [{"dtype": model.dtype, "attention": model.attention} for model in self.study.models.values()]
        is_other = self.study.machines[name].device is not None or not all(asked.items() <= of.items() for of in models)
        if not asked or is_other:
            return None
        return (
            f"other settings than {', '.join(f'{key} {value}' for key, value in asked.items())}, which the models have"
        )

    def device_has_effect(self, device: str, name: str) -> str | None:
        study, machine = self.study, self.study.machines[name]
        is_diagnosed = study.training is not None and machine.diagnosed_in is None
        if name in study.evaluation.machines or machine.counterpart is not None or is_diagnosed:
            return None
        why = "it was diagnosed elsewhere" if machine.diagnosed_in else "nothing is diagnosed in this study"
        return f"no device, which has no effect: {why}, it has no `counterpart`, and evaluation.machines lacks it"

    def evaluates_otherwise(self, name: str, *_: str) -> str | None:
        """Evaluations on a further machine must be possible there, and differ from those of the study itself."""
        study, machine = self.study, self.study.machines[name]
        counterpart, is_here = machine.counterpart, study.other_kind(name) is None
        if counterpart is None:
            is_same = is_here and not machine.faults
            return "a machine with another device, simulated faults or a `counterpart`" if is_same else None
        for role, model in study.models.items():
            if counterpart.attention not in (None, model.attention):
                return (
                    f"a `counterpart` with attention {model.attention} as of model {role}, not "
                    f"{counterpart.attention}: noise on attention would be another one"
                )
            changed = (counterpart.dtype, counterpart.threads, counterpart.batch_size)
            usual = (model.dtype, study.evaluation.threads, study.evaluation.batch_size)
            if is_here and all(new in (None, old) for new, old in zip(changed, usual, strict=True)):
                return f"a `counterpart` with another dtype, threads or batch_size than model {role} has here"
        return None

    def validated(self, asked: int) -> str | None:
        return expected_validation_questions(self.study, self.study.dataset.num_test)

    # Checks of the data set, and of what a task of lm-evaluation-harness decides.

    def scorer(self, scorer: str) -> str | None:
        return expected_scorer(scorer, self.study.dataset.answer_format)

    def answers_with_reward(self, answers: str) -> str | None:
        training = self.study.training
        if training is None or training.rewards or answers not in ("text", "choice"):
            return None
        return "gsm8k, number or boxed, or training.rewards: the usual reward is for the number behind ####"

    def sampling(self, sampling: object) -> str | None:
        return "none: the task says how responses are sampled" if self.is_of_task else None

    def backend_of_task(self, backend: str) -> str | None:
        is_wrong = self.is_of_task and backend == "vllm"
        return "transformers or auto for dataset.source lm_eval" if is_wrong else None

    def unit(self, unit: str) -> str | None:
        dataset = self.study.dataset
        if unit == "question":
            return None
        if isinstance(dataset, GeneratedDataset) or getattr(dataset, "cluster_column", None):
            return "question: the questions of the data set have clusters"
        is_other = self.is_of_task or self.study.generation.backend == "vllm"
        return "question: vLLM and lm-evaluation-harness choose their batches themselves" if is_other else None

    # Checks with a model. Of most models of a hub, nothing is known before they are downloaded.

    def facts(self, role: str) -> Mapping[str, Any]:
        """Return what is known of a model's config.json; nothing of a folder without one, which is another problem."""
        source = self.study.models[role].source
        if source_kind(source) == "folder" and not (Path(source) / "config.json").is_file():
            return {}
        return known_config(source) or {}

    def named(self, role: str) -> str:
        """Return a model in messages."""
        return f"model {role} ({self.study.models[role].source})"

    def source_of_model(self, source: str, *_: str) -> str | None:
        try:
            num_layers_of(source)
        except ModelError as error:
            return f"a model that can be read: {error}"
        return None

    def layers(self, asked: int | Collection[int], role: str) -> str | None:
        num_layers = num_layers_of(self.study.models[role].source)
        largest = asked if isinstance(asked, int) else max(asked, default=-1)
        if num_layers is None or largest < num_layers:
            return None
        return f"layers 0 to {num_layers - 1}, which {self.named(role)} has"

    def attention_of_noise(self, given: str, role: str) -> str | None:
        """Evaluations have noise on attention as each model computes it."""
        attention = self.study.models[role].attention
        usual = noised_attention(attention)
        return None if given == usual else f"no value: model {role} computes attention {attention}, {usual}"

    def attention_of_arm(self, given: str, arm: str) -> str | None:
        """Noise on single attention products needs eager attention; noise on fused attention needs sdpa."""
        noise, role = self.arms[arm].operator_noise, self.arms[arm].model
        attention = self.study.models[role].attention
        is_free = noise is None or not noise.is_active or isinstance(noise.error, FakeQuantization)
        if is_free or given == noised_attention(attention):
            return None
        return f"{noised_attention(attention)}: models.{role}.attention is {attention}"

    def redraw(self, redraw: str, role: str) -> str | None:
        """A fixed machine derives its error from the operands of each product, which only eager attention has."""
        is_possible = redraw != "never" or self.study.models[role].attention == "eager"
        return None if is_possible else f"always, or models.{role}.attention: eager"

    def scales_float16(self, loss_scale: int) -> str | None:
        is_used = any(self.study.models[role].dtype == "float16" for role in self.used_models())
        return None if is_used else "no value, which has an effect on models with dtype: float16 alone"

    def routed(self, replays: bool, role: str) -> str | None:
        is_dense = replays and (facts := self.facts(role)) and not may_route(facts)
        return f"false: {self.named(role)} is no mixture of experts" if is_dense else None

    def shared(self, num_workers: int, role: str) -> str | None:
        reason = why_not_shared(self.facts(role), num_workers) if num_workers > 1 else None
        return reason and f"a number by which {self.named(role)} can be shared: {reason}"

    def positions(self, tokens: int, role: str) -> str | None:
        """Responses must leave positions for prompts, which a job compares with; a task cuts prompts itself."""
        context = None if self.is_of_task else self.facts(role).get("max_position_embeddings")
        if not isinstance(context, int) or tokens < context:
            return None
        return f"fewer than the {context} positions of {self.named(role)}, which its prompts need too"

    def another_model(self, source: str, name: str) -> str | None:
        """Checkpoints must be different models."""
        models = self.study.models
        for other in list(models)[: list(models).index(name)]:
            is_same = _location(models[other].source) == _location(source)
            if is_same and models[other].revision == models[name].revision:
                return f"another model, this is also checkpoint {other}"
        return None

    # Checks of what vLLM can compute.

    def fits_vllm(self, error: Any, *_: str) -> str | None:
        generation = self.study.generation
        if generation.backend != "vllm":
            return None
        if is_without_vllm(error):
            return f"an error that vLLM can compute, not {name_of(error)}, or generation.backend: transformers"
        is_divided = isinstance(error, FakeQuantization) and generation.tensor_parallel > 1
        return "an error of results, as generation.tensor_parallel divides operands" if is_divided else None

    def fused_for_vllm(self, attention: str, role: str) -> str | None:
        on_vllm = self.study.generation.backend == "vllm" and any(self.study.evaluation.all_levels())
        if not on_vllm or attention == "sdpa" or role not in self.used_models():
            return None
        return "sdpa for generation.backend vllm, which computes attention as one operator"

    def rolls_out_on_vllm(self, arm: Arm, *_: str) -> str | None:
        reason = why_vllm_cannot_roll_out(arm) if self.study.generation.requested_for_rollouts == "vllm" else None
        return reason and f"generation.rollout_backend: transformers, vLLM cannot make its rollouts: {reason}"

    # Checks of measured errors and sigmas.

    def no_figures(self, figures: object, *_: str) -> str | None:
        return "none: they are read from the file that `from` names"

    def measured(self, source: str, *_: str) -> str | None:
        """The figures of a measured error must be readable or measurable."""
        machines = self.study.machines
        if source.endswith(".json"):
            return None if Path(source).is_file() else "an existing file that `aqnpipe parity --json` wrote"
        if source not in machines:
            return f"{one_of(source, machines)}, or a file of `aqnpipe parity --json` with the ending .json"
        return None if machines[source].has_parity else _with_counterpart(source)

    def measured_for_sigmas(self, strategy: str, arm: str) -> str | None:
        aqn = self.arms[arm].aqn
        machine = None if aqn is None else aqn.layer_sigmas_from
        if strategy != NEEDS_PARITY or machine is None or self.study.machines[machine].has_parity:
            return None
        return f"another strategy, or {_with_counterpart(machine)}"

    def energy(self, base: float) -> str | None:
        rule = self.study.sigma_rule
        for name, arm in self.trained_arms.items():
            strategy = "published" if arm.aqn is None else arm.aqn.layer_sigmas_strategy
            if strategy != "published" and not rule.sigma_min <= base <= rule.sigma_max:
                limits = f"sigma_min {rule.sigma_min:g} to sigma_max {rule.sigma_max:g}"
                return f"{limits}: the sigmas {strategy} of arm {name} have its total variance"
        return None

    def ranges(self, ranges: tuple[object, ...], *_: str) -> str | None:
        training = self.study.training
        is_right = training is None or len(ranges) == training.epochs
        return None if is_right else f"a range for each of the {training and training.epochs} epochs"

    # Checks of comparisons.

    def compared(self, name: str, *_: str) -> str | None:
        return one_of(name, (*self.study.arms, *([PRETRAINED] if self.study.training else [])))

    def clean_level(self, kind: str, *_: str) -> str | None:
        is_right = kind == "arms" or 0.0 in self.study.evaluation.noise_levels
        return None if is_right else "arms, or 0.0 among evaluation.noise_levels, to which it is compared"

    def level(self, level: float, *_: str) -> str | None:
        evaluation = self.study.evaluation
        evaluated = ", ".join([*map(str, evaluation.noise_levels), *evaluation.noises])
        return None if level in evaluation.all_levels() else f"one that the study evaluates: {evaluated}"

    def explored(self, control: str) -> str | None:
        treatment = self.study.report.explore.treatment if self.study.report.explore else control
        roles = [self.arms[name].model for name in (treatment, control) if name != PRETRAINED]
        is_right = treatment != control and len(set(roles)) == 1
        return None if is_right else f"another arm than {treatment}, of the model {roles[0]}"

    def aa_control(self, target: str, name: str) -> str | None:
        arms = self.arms
        if target not in self.study.arms:
            return f"{one_of(target, self.study.arms)}; without it nothing controls {name}"
        if _imitates(arms, target, name):
            return f"an arm that is no control of {name} itself"
        is_right = arms[target].model == arms[name].model
        return None if is_right else f"an arm of the model {arms[name].model}, it has {arms[target].model}"

    def seed(self, offset: int, *_: str) -> str | None:
        largest = LARGEST_TRAINING_SEED - max(seed_numbers(self.study.seeds))
        return None if offset <= largest else f"at most {largest:,} beside the seeds of {self.source}"


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


def expected_validation_questions(study: "StudyConfig", num_test: int | None) -> str | None:
    """Return the number of questions expected for validations; None if it is right, or `num_test` is not known.

    Of fewer questions than the default all are taken, but a number that was asked for is not lowered in silence.
    """
    training = study.training
    if training is None or num_test is None or "validation_questions" not in training.model_fields_set:
        return None
    return f"at most the {num_test} test questions" if training.validation_questions > num_test else None


def _with_counterpart(machine: str) -> str:
    return f"machines.{machine}.counterpart or measured_in: the error of {machine} is not measured"


def _imitates(arms: Mapping[str, Arm], name: str, target: str) -> bool:
    """Return whether arm `name` is `target`, or an A/A control of it, or of an arm that is."""
    followed: set[str] = set()
    while name != target and name in arms and name not in followed:
        followed.add(name)
        name = arms[name].aa_control_of or ""
    return name == target


def _location(source: str) -> str:
    """Return the folder of a local model as an absolute path without links; other sources as they are."""
    return str(Path(source).resolve()) if source_kind(source) == "folder" else source


def _in(section: str) -> Check:
    """Return the check that a name is one of those in a section."""
    return lambda scope, name, *_: one_of(name, getattr(scope.study, section))


def _at_most(key: str, *, below: bool = False) -> Check:
    """Return the check that a number is not above, or is below, another setting; null there is no limit."""

    def check(scope: _Scope, asked: int, *_: str) -> str | None:
        limit = attrgetter(key)(scope.study)
        if limit is None or asked < limit + (not below):
            return None
        return f"{'fewer than' if below else 'at most'} {key} {limit}"

    return check


def _usual_of_task(setting: str) -> Check:
    """Return the check that a task of lm-evaluation-harness, which makes its prompts, gets no setting of prompts."""
    usual = getattr(PromptFormat(), setting)
    expected = f"{usual!r}: the task makes its prompts (dataset.num_fewshot sets the examples)"
    return lambda scope, value: expected if scope.is_of_task and value != usual else None


def _same(key: str) -> Check:
    """Return the check that checkpoints compute alike."""

    def check(scope: _Scope, value: str, *_: str) -> str | None:
        first, model = next(iter(scope.study.models.items()))
        theirs = getattr(model, key)
        return None if value == theirs else f"{theirs} as checkpoint {first}: a comparison would also be one of {key}s"

    return check


def _each(models: Callable[..., Iterable[str]], check: Check) -> Check:
    """Return the check of a value with each of some models; the check gets the name of a model."""
    return lambda scope, *given: next(
        filter(None, (check(scope, given[0], role) for role in models(scope, *given[1:]))), None
    )


RULES: tuple[tuple[str, Check], ...] = (
    ("arms|checkpoints[*]", _Scope.not_reserved),
    ("arms[*].task", _Scope.task),
    ("arms[*].model", _in("models")),
    ("arms[*].machine", _Scope.runs_here),
    ("arms[*].aqn.layer_sigmas_from", _in("machines")),
    ("evaluation.num_questions", _at_most("dataset.num_test")),
    ("training.validation_questions", _Scope.validated),
    ("loss_studies[*].num_texts", _at_most("dataset.num_test")),
    ("prompt.num_examples", _at_most("dataset.num_train", below=True)),
    ("evaluation.primary_scorer", _Scope.scorer),
    ("dataset.answer_format", _Scope.answers_with_reward),
    *((f"prompt.{key}", _usual_of_task(key)) for key in ("layout", "instruction", "num_examples", "example_seed")),
    ("evaluation.sampling", _Scope.sampling),
    ("generation.backend", _Scope.backend_of_task),
    ("statistics.unit", _Scope.unit),
    ("evaluation.pretrained_machine", _Scope.runs_here),
    ("machines[*].counterpart", _Scope.counterpart),
    ("machines[*].device", _Scope.device_has_effect),
    ("loss_studies[*].model", _in("models")),
    ("loss_studies[*].machine", _Scope.runs_here),
    ("loss_studies[*].machine", _Scope.has_faults),
    ("loss_studies[*].orders", _Scope.orders),
    ("evaluation.machines[*]", _in("machines")),
    ("evaluation.machines[*]", _Scope.evaluates_otherwise),
    ("models[*].source", _Scope.source_of_model),
    ("machines[*].faults[*].layer", _each(_Scope.all_models, _Scope.layers)),
    ("noises[*].operator_noise.layers|layer_scales", _each(_Scope.all_models, _Scope.layers)),
    ("arms[*].operator_noise.layers|layer_scales", _each(_Scope.its_model, _Scope.layers)),
    ("noises[*].operator_noise.error.redraw", _each(_Scope.used_models, _Scope.redraw)),
    ("arms[*].operator_noise.error.redraw", _each(_Scope.its_model, _Scope.redraw)),
    ("training.loss_scale", _Scope.scales_float16),
    ("noises[*].operator_noise.attention", _each(_Scope.all_models, _Scope.attention_of_noise)),
    ("arms[*].operator_noise.attention", _Scope.attention_of_arm),
    ("noises[*].operator_noise|module_noise.error", _Scope.fits_vllm),
    ("models[*].attention", _Scope.fused_for_vllm),
    ("generation.tensor_parallel", _each(_Scope.used_models, _Scope.shared)),
    ("arms[*].routing_replay", _each(_Scope.its_model, _Scope.routed)),
    ("arms[*]", _Scope.rolls_out_on_vllm),
    ("arms|noises[*].operator_noise.error.figures", _Scope.no_figures),
    ("arms|noises[*].operator_noise.error.source", _Scope.measured),
    ("sigma_rule.base_sigma", _Scope.energy),
    ("arms[*].aqn.layer_sigmas_strategy", _Scope.measured_for_sigmas),
    ("arms[*].aqn.schedule.ranges", _Scope.ranges),
    ("comparisons[*].arm|treatment|control", _Scope.compared),
    ("comparisons[*].kind", _Scope.clean_level),
    ("comparisons[*].noise_level", _Scope.level),
    ("report.explore.treatment|control", _Scope.compared),
    ("report.explore.control", _Scope.explored),
    ("report.explore.noise_level", _Scope.level),
    ("arms[*].aa_control_of", _Scope.aa_control),
    ("arms[*].seed_offset", _Scope.seed),
    ("training|evaluation.max_response_tokens", _each(_Scope.used_models, _Scope.positions)),
    ("checkpoints[*].source", _Scope.another_model),
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
    scope = _Scope(study, arms, source)
    for path, check in RULES:
        for where, value, names in scope.places(path):
            if expected := check(scope, value, *names):
                yield f"{where}: found {_found(where, value)}, expected {expected}"
