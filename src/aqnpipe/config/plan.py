"""The jobs of a study: their files, steps and parameters, as the workflow needs them."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from aqnpipe.config.analysis import PRETRAINED, ReportConfig
from aqnpipe.config.arm import Arm
from aqnpipe.config.base import Settings, evaluations_folder, replaced, rule_on
from aqnpipe.config.dataset import LmEvalDataset, LocalDataset, Split
from aqnpipe.config.diagnosis import NEEDS_PARITY, SigmaStrategy
from aqnpipe.config.evaluation import EvaluationConfig, settings_of
from aqnpipe.config.generation import GenerationConfig, why_vllm_cannot_roll_out
from aqnpipe.config.measured_noise import MeasuredError
from aqnpipe.config.model import builtin_folder, source_kind
from aqnpipe.config.noise import Fault, OperatorNoise
from aqnpipe.config.run import EvaluationSpec, LossStudyConfig, LossStudySpec, ParitySpec, TrainingSpec
from aqnpipe.config.study import CHECKPOINTS, Study
from aqnpipe.config.training import TrainingConfig
from aqnpipe.device import DeviceKind
from aqnpipe.errors import ConfigError

_ON_DEVICE_OF_STUDY = ("train", "evaluate", "evaluate_run", "loss_study")


class StudyPlan:
    """All paths and parameters of the workflow, derived from a validated study. Paths are relative strings.

    `machine`: the one of `evaluation.machines` that evaluations are of; None: those of the study itself.
    """

    def __init__(self, study: Study, machine: str | None = None) -> None:
        self.study = study
        self.machine = machine
        self.results = study.config.results_dir
        self.num_steps = study.num_steps
        training = study.config.training
        self.checkpoint_steps = training.checkpoint_steps(self.num_steps) if training else []
        self._specs: dict[tuple[str, ...], dict[str, Any]] = {}

    @property
    def num_evaluations(self) -> int:
        """Number of evaluated checkpoints, including the pretrained models."""
        return len(self.evaluations())

    def runs(self) -> list[tuple[str, str, int]]:
        """Return (model role, arm, seed) of every training run; none in a study of checkpoints."""
        if not self.study.has_training:
            return []
        return [
            (self.study.arms[arm].model, arm, seed)
            for arm in self.study.config.arms
            for seed in self.study.seeds_of(arm)
        ]

    def evaluations(self) -> list[tuple[str, str, int, int]]:
        """Return (model role, arm, seed, step) of every evaluation: the pretrained models, then every checkpoint.

        In a study of checkpoints, each is an arm with seed 0 and step 0.
        """
        if not self.study.has_training:
            return [(CHECKPOINTS, name, 0, 0) for name in self.study.arms]
        return [
            *((role, PRETRAINED, 0, 0) for role in self.study.model_roles()),
            *((*run, step) for run in self.runs() for step in self.checkpoint_steps),
        ]

    def diagnoses(self) -> list[tuple[str, str]]:
        """Return (model role, machine) of every diagnosis; none in a study of checkpoints."""
        if not self.study.has_training:
            return []
        return [(role, machine) for role in self.study.model_roles() for machine in self.study.config.machines]

    def jobs(self) -> dict[str, int]:
        """Return the number of jobs per rule for an empty results folder, without `all` and rules that have no job.

        Of a study that adds seeds, those up to the first look and the ones that end the study.
        """
        losses = self.study.config.loss_studies
        counts = {
            "prepare_data": len(self.splits()),
            "prepare_model": len({*self.study.models(), *(loss_study.model for loss_study in losses)}),
            **_by_rule("srdd_diagnose", self.diagnosed_by_kind(), len(self.study.model_roles())),
            "generate_layer_sigmas": len(self.all_sigmas_files()),
            **_by_rule("measure_parity", self.measured_by_kind(), len(self._parity_models())),
            "train": len(self.runs()),
            "evaluate": self.num_evaluations,
            **_by_rule("evaluate_on_machine", self.evaluated_by_kind(), self.num_evaluations),
            "compare_machines": int(bool(self.study.config.evaluation.machines)),
            "remove_weights": len(self.removal_files()),
            "look": int(self.study.adaptive_seeds is not None),
            "loss_study": len(losses),
            "compare_losses": len(losses),
            "compare": 1,
            "check_published": int(self.study.config.statistics.published is not None),
            "report": 1,
        }
        return {rule: count for rule, count in counts.items() if count}

    def splits(self) -> tuple[Split, ...]:
        """Return the splits of the data set that jobs need; without training and examples only the test split."""
        needs_train = self.study.has_training or self.study.config.prompt.num_examples
        return ("train", "test") if needs_train else ("test",)

    def data_files(self) -> list[str]:
        """Return the files of `splits`."""
        return [f"{self.results}/data/{split}.parquet" for split in self.splits()]

    def prepared_model_files(self) -> list[str]:
        """Return the records of the prepared models."""
        return [f"{self.results}/models/{name}/aqnpipe_model.json" for name in self.study.models()]

    def prepared_model(self, model: str, arm: str) -> str | None:
        """Return the name of the prepared model that an evaluation reads; None if it reads a trained checkpoint."""
        if not self.study.has_training:
            return arm
        return model if arm == PRETRAINED else None

    def training_threads(self) -> int:
        """Return the threads of a training job; 1 if nothing is trained."""
        training = self.study.config.training
        return training.threads * training.num_workers if training else 1

    def strategies(self, model: str, machine: str) -> list[SigmaStrategy]:
        """Return the sigma strategies for a diagnosis: `published`, and those that arms of the model request.

        A machine without simulated faults gets those of every other machine too, to show what the faults change, but
        not those that need a parity if it has none.
        """
        is_healthy = not self.study.config.machines[machine].faults
        requested = [
            arm.aqn.layer_sigmas_strategy
            for arm in self.study.arms.values()
            if arm.model == model
            and arm.aqn is not None
            and arm.aqn.layer_sigmas_from is not None
            and (is_healthy or arm.aqn.layer_sigmas_from == machine)
            and (self.study.config.machines[machine].has_parity or arm.aqn.layer_sigmas_strategy != NEEDS_PARITY)
        ]
        return list(dict.fromkeys(["published", *requested]))

    def all_sigmas_files(self) -> list[str]:
        """Return the sigmas files of every diagnosis, for every strategy that the study uses."""
        return [
            self.sigmas_file(model, machine, strategy)
            for model, machine in self.diagnoses()
            for strategy in self.strategies(model, machine)
        ]

    def run_files(self, name: str) -> list[str]:
        """Return the file `name` of every run, in the order of `runs`."""
        return [f"{self.results}/runs/{role}/{arm}/seed{seed}/{name}" for role, arm, seed in self.runs()]

    def removal_files(self) -> list[str]:
        """Return the records of kept and removed weights, one per run; none if all weights are kept."""
        removes = self.study.config.keep != "all" and len(self.checkpoint_steps) > 1
        return self.run_files("weights.json") if removes else []

    def evaluation_files(self, suffix: str) -> list[str]:
        """Return the file with `suffix` of every evaluation, in the order of `evaluations`."""
        return [
            f"{self.results}/{evaluations_folder(self.machine)}/{role}/{arm}/seed{seed}/step{step}.{suffix}"
            for role, arm, seed, step in self.evaluations()
        ]

    def on(self, machine: str) -> "StudyPlan":
        """Return the plan whose evaluations are those on a machine of `evaluation.machines`."""
        return StudyPlan(self.study, machine)

    def machine_evaluation_files(self, suffix: str) -> list[str]:
        """Return the file with `suffix` of every evaluation on every machine of `evaluation.machines`."""
        return [
            path
            for machine in self.study.config.evaluation.machines
            for path in self.on(machine).evaluation_files(suffix)
        ]

    def evaluation_threads(self) -> int:
        """Return the threads per worker of an evaluation."""
        return self._evaluation_on_machine().threads

    def _evaluation_on_machine(self) -> EvaluationConfig:
        """Return the settings of evaluations, with threads and batch size of the machine's counterpart."""
        machine = None if self.machine is None else self.study.config.machines[self.machine].counterpart
        changes = {} if machine is None else machine.model_dump(include={"threads", "batch_size"}, exclude_none=True)
        return self.evaluation_settings.model_copy(update=changes)

    def loss_study_files(self, suffix: str) -> list[str]:
        """Return the file with `suffix` of every loss study, in the order of the study."""
        return [
            f"{self.results}/loss_study/{loss_study.model}/{loss_study.name}.{suffix}"
            for loss_study in self.study.config.loss_studies
        ]

    def diagnosis_files(self, name: str) -> list[str]:
        """Return the file `name` of every diagnosis, in the order of `diagnoses`."""
        return [f"{self.results}/srdd/{role}/{machine}/{name}" for role, machine in self.diagnoses()]

    def imported_diagnosis(self, model: str, machine: str) -> list[str]:
        """Return layers and verdict of a diagnosis made elsewhere; empty if the machine is diagnosed here."""
        folder = self.study.config.machines[machine].diagnosed_in
        if folder is None:
            return []
        return [f"{folder.replace('{model}', model)}/{name}" for name in ("layers.parquet", "verdict.json")]

    def sigmas_input(self, model: str, arm: str) -> list[str]:
        """Return the sigmas file that an arm needs, as a list; empty if it needs none."""
        aqn = self.study.arms[arm].aqn
        if aqn is None or aqn.layer_sigmas_from is None:
            return []
        return [self.sigmas_file(model, aqn.layer_sigmas_from, aqn.layer_sigmas_strategy)]

    def sigmas_parity_input(self, model: str, machine: str, strategy: SigmaStrategy) -> list[str]:
        """Return the parity file that a strategy needs, as a list; empty if it needs none."""
        return [self.parity_file(model, machine)] if strategy == NEEDS_PARITY else []

    def sigmas_file(self, model: str, machine: str, strategy: SigmaStrategy = "published") -> str:
        """Return the file of the layer sigmas that a strategy derives from the diagnosis of a machine."""
        return f"{self.results}/srdd/{model}/{machine}/{sigmas_name(strategy)}"

    def diagnosed_by_kind(self) -> dict[DeviceKind | None, tuple[str, ...]]:
        """Return the diagnosed machines by kind of device; None: that of the study, or none needed (`diagnosed_in`)."""
        config = self.study.config
        here = [name for name, machine in config.machines.items() if machine.diagnosed_in is None]
        elsewhere = tuple(name for name in config.machines if name not in here)
        found = config.by_kind(here)
        return {**found, None: (*found[None], *elsewhere)} if self.study.has_training else {None: ()}

    def measured_by_kind(self) -> dict[DeviceKind | None, tuple[str, ...]]:
        """Return the machines whose counterpart is measured, by kind of device; None: that of the study."""
        machines = self.study.config.machines
        return self.study.config.by_kind(name for name in machines if machines[name].counterpart)

    def evaluated_by_kind(self) -> dict[DeviceKind | None, tuple[str, ...]]:
        """Return the machines of `evaluation.machines` by kind of device, those that there are; None: the study's."""
        found = self.study.config.by_kind(self.study.config.evaluation.machines)
        return {kind: machines for kind, machines in found.items() if machines}

    def rules_by_kind(self) -> dict[DeviceKind | None, dict[str, str]]:
        """Return the rules whose jobs need a device, by its kind (None: that of the study), each with its base rule."""
        found: dict[DeviceKind | None, dict[str, str]] = {None: {rule: rule for rule in _ON_DEVICE_OF_STUDY}}
        of_machines = {"srdd_diagnose": self.diagnosed_by_kind(), "measure_parity": self.measured_by_kind()}
        for rule, groups in of_machines.items():
            for kind in groups:
                found.setdefault(kind, {})[rule_on(rule, kind)] = rule
        for kind in self.evaluated_by_kind():
            found.setdefault(kind, {})[rule_on("evaluate_on_machine", kind)] = "evaluate"
        return found

    def machines_on(self, kind: DeviceKind) -> list[str]:
        """Return the machines on devices of a kind other than the study's."""
        config = self.study.config
        return [name for name in config.machines if config.other_kind(name) == kind]

    def diagnosed_machine(self, machine: str) -> dict[str, Any]:
        """Return what a diagnosis needs of a machine, as plain data."""
        settings = self.study.config.machines[machine]
        unused = {"description", "counterpart", "measured_in"} | (set() if settings.device else {"device"})
        return settings.model_dump(mode="json", exclude=unused)

    def parity_file(self, model: str, machine: str) -> str:
        """Return the file of the parity of a model on a machine: of its counterpart, or the one that it names."""
        named = self.study.config.machines[machine].measured_in
        if named is not None:
            return named.replace("{model}", model)
        return f"{self.results}/parity/{model}/{machine}.json"

    def all_parities(self) -> list[tuple[str, str, str]]:
        """Return (model, machine or file, path) of the parities that are measured here or named as a file."""
        machines = [name for name, machine in self.study.config.machines.items() if machine.has_parity]
        of_machines = [
            (model, name, self.parity_file(model, name)) for model in self._parity_models() for name in machines
        ]
        errors = [
            *((arm.model, arm.operator_noise) for arm in self.study.arms.values()),
            *((model, noise) for model in self._parity_models() for noise in self._evaluation_noises()),
        ]
        named = [
            (model, noise.error.source, noise.error.source)
            for model, noise in errors
            if noise is not None and isinstance(noise.error, MeasuredError) and noise.error.machine is None
        ]
        return list(dict.fromkeys([*of_machines, *named]))

    def all_parity_files(self) -> list[str]:
        """Return the files of `all_parities`, each once."""
        return list(dict.fromkeys(path for _, _, path in self.all_parities()))

    def training_parity_input(self, model: str, arm: str) -> list[str]:
        """Return the parity file that the measured error of an arm needs, as a list; empty if it needs none."""
        noise = self.study.arms[arm].operator_noise
        return self._parity_input(model, [] if noise is None else [noise])

    def evaluation_parity_input(self, *, model: str, arm: str, **_: str) -> list[str]:
        """Return the parity files that the measured errors of an evaluation need."""
        return self._parity_input(self.prepared_model(model, arm) or model, self._evaluation_noises())

    def parity_spec(self, *, model: str, machine: str) -> dict[str, Any]:
        """Return the parameters of the measurement of a parity (`ParitySpec` as plain data)."""
        config = self.study.config
        return ParitySpec.model_validate(
            {
                "model_role": model,
                "machine": machine,
                "counterpart": config.machines[machine].counterpart,
                **self._computed(model),
                "device": config.device_of(machine),
            }
        ).model_dump(mode="json")

    def _parity_models(self) -> Sequence[str]:
        return self.study.model_roles() if self.study.has_training else tuple(self.study.config.models)

    def _evaluation_noises(self) -> list[OperatorNoise]:
        noises = map(settings_of, self.study.config.evaluation.noises.values())
        return [noise.operator_noise for noise in noises if noise.operator_noise is not None]

    def _parity_input(self, model: str, noises: Sequence[OperatorNoise]) -> list[str]:
        errors = [noise.error for noise in noises if isinstance(noise.error, MeasuredError)]
        return sorted({self.with_parity_files(error, model).source for error in errors})

    def with_parity_files(self, settings: Settings, model: str) -> Settings:
        """Return settings whose measured errors name the file of a parity in the place of a machine of the study."""

        def change(error: MeasuredError) -> MeasuredError:
            return error if error.machine is None else error.measured_in(self.parity_file(model, error.machine))

        return replaced(settings, MeasuredError, change)

    def examples_input(self) -> list[str]:
        """Return the file of training questions if prompts contain examples from it, as a list; else an empty list."""
        return [f"{self.results}/data/train.parquet"] if self.study.config.prompt.num_examples else []

    def checkpoint_input(self, *, model: str, arm: str, seed: str, step: str) -> str:
        """Return a file in the folder of the model that an evaluation reads."""
        prepared = self.prepared_model(model, arm)
        if prepared is not None:
            return f"{self.results}/models/{prepared}/aqnpipe_model.json"
        return f"{self.results}/runs/{model}/{arm}/seed{seed}/checkpoints/step{step}/config.json"

    def checkpoint_record(self, *, model: str, arm: str, seed: str, **_: str) -> list[str]:
        """Return the record with the digests of the weights of a trained checkpoint, as a list; else an empty list.

        Snakemake compares small files by their content, and config.json is the same for other weights.
        """
        return [] if self.prepared_model(model, arm) else [f"{self.results}/runs/{model}/{arm}/seed{seed}/run.json"]

    def model_recipe(self, role: str) -> str:
        """Return the recipe of a built-in model, which changes with its weights; "" for another model."""
        source = self.study.config.models[role].source
        is_builtin = source_kind(source) == "builtin"
        return (builtin_folder(source) / "recipe.json").read_text(encoding="utf-8") if is_builtin else ""

    def model_files(self, role: str) -> list[str]:
        """Return the files of a model in a folder of the user; none of another model."""
        source = self.study.config.models[role].source
        return _files(Path(source).iterdir()) if source_kind(source) == "folder" else []

    def dataset_files(self, split: Split) -> list[str]:
        """Return the files of the user from which a split of the questions is made; none of generated and hub data."""
        dataset = self.study.config.dataset
        if isinstance(dataset, LmEvalDataset) and dataset.include_path is not None:
            return _files(Path(dataset.include_path).rglob("*"))
        if not isinstance(dataset, LocalDataset):
            return []
        path = Path(dataset.path)
        return _files([path] if path.is_file() else path.glob(f"{split}.*"))

    @cached_property
    def _planned_training(self) -> TrainingConfig:
        """The settings of training, with the digests of rewards of the user's own."""
        training = self.study.config.training
        if training is None:
            raise RuntimeError("a study of checkpoints has no training; this is a bug")
        return training.planned()

    @cached_property
    def _planned_arms(self) -> dict[str, Arm]:
        """The arms as they are trained, with the digests of error models and schedules of the user's own."""
        return {name: arm.as_trained().planned() for name, arm in self.study.arms.items()}

    @cached_property
    def evaluation_settings(self) -> EvaluationConfig:
        """The settings of evaluations, with the digests of a scorer and error models of the user's own."""
        return self.study.config.evaluation.planned()

    def training_spec(self, arm: str, seed: int) -> dict[str, Any]:
        """Return the parameters of a training job (`TrainingSpec` as plain data); they share what they have in common.

        Validated once per arm: a plan of thousands of runs asks for each.
        """
        if ("train", arm) not in self._specs:
            self._specs["train", arm] = self._training_spec(arm, seed)
        return {**self._specs["train", arm], "seed": seed}

    def _training_spec(self, arm: str, seed: int) -> dict[str, Any]:
        role = self.study.arms[arm].model
        return TrainingSpec(
            model_role=role,
            arm_id=arm,
            arm=self.with_parity_files(self._planned_arms[arm], role),
            faults=self.faults(self.study.arms[arm].machine),
            seed=seed,
            num_steps=self.num_steps,
            **self._computed(role),
            generation=self.generation_in_training,
            training=self._planned_training,
            scorer=self.evaluation_settings.primary_scorer,
            scorer_sha256=self.evaluation_settings.scorer_sha256,
        ).model_dump(mode="json")

    @cached_property
    def generation_in_training(self) -> GenerationConfig:
        """Generation settings of all trainings: `auto` is one rollout backend, so that arms differ in what they name.

        That is transformers if vLLM, which needs `attention: sdpa`, cannot draw the rollouts of one arm.
        """
        settings, models = self.study.config.generation.for_training, self.study.config.models
        on_vllm = [arm for arm in self.study.arms.values() if models[arm.model].attention == "sdpa"]
        if settings.requested_for_rollouts == "auto" and any(map(why_vllm_cannot_roll_out, on_vllm)):
            return settings.model_copy(update={"rollout_backend": "transformers"})
        return settings

    def evaluation_spec(self, *, model: str, arm: str, seed: str, step: str) -> dict[str, Any]:
        """Return the parameters of an evaluation (`EvaluationSpec` as plain data); they share what they have in common.

        Validated once per model and arm, like `training_spec`.
        """
        if ("evaluate", model, arm) not in self._specs:
            self._specs["evaluate", model, arm] = self._evaluation_spec(model, arm, int(seed), int(step))
        return {**self._specs["evaluate", model, arm], "seed": int(seed), "step": int(step)}

    def evaluation_specs(self, *, model: str, arm: str, seed: str) -> list[dict[str, Any]]:
        """Return the parameters of the evaluations of a run, in the order of its checkpoints."""
        return [self.evaluation_spec(model=model, arm=arm, seed=seed, step=str(step)) for step in self.checkpoint_steps]

    def _evaluation_spec(self, model: str, arm: str, seed: int, step: int) -> dict[str, Any]:
        config = self.study.config
        prepared = self.prepared_model(model, arm)
        computed = config.models[prepared or model]
        machine = config.evaluation.pretrained_machine if prepared is not None else self.study.arms[arm].machine
        counterpart = None if self.machine is None else config.machines[self.machine].counterpart
        return EvaluationSpec(
            model_role=model,
            arm_id=arm,
            seed=seed,
            step=step,
            faults=self.faults(self.machine or machine),
            device=config.device if self.machine is None else config.device_of(self.machine),
            dtype=(counterpart and counterpart.dtype) or computed.dtype,
            attention=computed.attention,
            prompt=config.prompt,
            generation=config.generation,
            evaluation=self.with_parity_files(self._evaluation_on_machine(), prepared or model),
            task=config.dataset if isinstance(config.dataset, LmEvalDataset) else None,
        ).model_dump(mode="json")

    def loss_study_spec(self, model: str, name: str) -> dict[str, Any]:
        """Return the parameters of a loss study (`LossStudySpec` as plain data)."""
        settings = self._loss_study(model, name)
        return LossStudySpec(
            model_role=model,
            faults=self.faults(settings.machine),
            **self._computed(model),
            settings=settings,
        ).model_dump(mode="json")

    def _computed(self, role: str) -> dict[str, Any]:
        """Return the settings that every job with a model has."""
        config, model = self.study.config, self.study.config.models[role]
        return {"device": config.device, "dtype": model.dtype, "attention": model.attention, "prompt": config.prompt}

    def loss_study_threads(self, model: str, name: str) -> int:
        """Return the number of threads of a loss study."""
        return self._loss_study(model, name).threads

    def faults(self, machine: str | None) -> tuple[Fault, ...]:
        """Return the simulated faults of a machine; none for the real device (None)."""
        return self.study.config.machines[machine].faults if machine is not None else ()

    def _loss_study(self, model: str, name: str) -> LossStudyConfig:
        studies = self.study.config.loss_studies
        return next(settings for settings in studies if (settings.model, settings.name) == (model, name))

    def study_params(self) -> dict[str, Any]:
        """Return the whole study as plain data, for jobs that need all of it; `keep` changes none of their results."""
        return self.study.model_dump(mode="json", exclude={"config": {"keep"}})

    def of_run(self, arm: str, seed: int) -> "StudyPlan":
        """Return the plan of a single run and its evaluations, without comparisons and texts of the report."""
        single: dict[str, Any] = {"arms": (arm,), "seeds": (seed,), "comparisons": (), "loss_studies": ()}
        words = {"description": "", "report": ReportConfig(title="", question="")}
        config = self.study.config.model_copy(update=single | words)
        return StudyPlan(Study(config=config, arms={arm: self.study.arms[arm]}))

    def params_at_look(self, look: int) -> dict[str, Any]:
        """Return `study_params` of a study that adds seeds as if a look were its last, whatever its maximum is."""
        rule, config = self.study.adaptive_seeds, self.study.config
        if rule is None:
            raise ValueError("the seeds of the study are fixed")
        ending = config.model_copy(update={"seeds": rule.model_copy(update={"max": rule.seeds_at(look)})})
        return StudyPlan(self.study.model_copy(update={"config": ending, "seeds_per_arm": None})).study_params()


def _by_rule(rule: str, machines: Mapping[DeviceKind | None, Sequence[str]], num_models: int) -> dict[str, int]:
    """Return the jobs of each rule: one per machine and model."""
    return {rule_on(rule, kind): len(group) * num_models for kind, group in machines.items()}


def _files(paths: Iterable[Path]) -> list[str]:
    """Return the files among `paths`, without those that programs leave behind: hidden ones and Python's bytecode."""
    kept = (path for path in paths if not path.name.startswith(".") and "__pycache__" not in path.parts)
    return sorted(str(path) for path in kept if path.is_file())


def sigmas_name(strategy: SigmaStrategy) -> str:
    """Return the file name of the sigmas of a strategy."""
    return f"sigmas-{strategy}.yaml"


def plan_of(params: dict[str, Any]) -> StudyPlan:
    """Return the plan of a study from `study_params`; ConfigError if they are not those of a study."""
    if set(params) != {"config", "arms", "seeds_per_arm"}:
        raise ConfigError(f"study parameters: found keys {sorted(params)}, expected arms, config and seeds_per_arm")
    return StudyPlan(Study.model_validate(params))
