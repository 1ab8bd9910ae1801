"""The noise of a training run: its specification, its recorder, and the scale of AQN over layers and steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aqnpipe.artifacts.diagnoses import SigmaFile
from aqnpipe.artifacts.files import read_yaml
from aqnpipe.config.noise import TRAINING_PHASES, NoiseSpec, Phase
from aqnpipe.config.run import TrainingSpec
from aqnpipe.errors import ConfigError
from aqnpipe.models.layout import decoder_layers, num_rms_norms
from aqnpipe.noise.aqn import target_factors
from aqnpipe.noise.injection.faults import ActiveFaults
from aqnpipe.noise.receipts.passes import stated
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.noise.receipts.table import Row
from aqnpipe.noise.schedule import sigma_at


@dataclass(frozen=True)
class NoisePlan:
    """The noise of a run: its specification, the recorder of what was applied, and the scale of AQN.

    `faults` are those of `spec`, with the thresholds that the run has cached. `aqn_factors` maps the names of AQN's
    targets to factors on the schedule's sigma; it is empty without AQN.
    """

    seed: int
    spec: NoiseSpec
    faults: ActiveFaults
    recorder: ReceiptRecorder
    aqn_factors: Mapping[str, float]
    num_steps: int
    num_epochs: int

    def sigma(self, step: int) -> float:
        """Return AQN's sigma for the rollout after `step` optimiser steps; 0 without AQN."""
        noise = self.spec.aqn
        return sigma_at(noise.schedule, step, self.num_steps, self.num_epochs) if noise else 0.0


def noise_of(spec: TrainingSpec) -> NoiseSpec:
    """Return the noise of a run, and the faults of its machine."""
    arm = spec.arm
    noises = {name: getattr(arm, name) for name in ("operator_noise", "module_noise", "kv_cache", "aqn")}
    return NoiseSpec(**noises, faults=spec.faults)


def build_noise_plan(
    spec: TrainingSpec, model: Any, sigmas_file: Path | None, weights_sha256: str | None = None
) -> NoisePlan:
    """Return the noise plan of a run on `model`; `weights_sha256` is the digest of its weight files.

    Raises ConfigError if the sigmas file is missing or belongs to another model, machine or strategy.
    """
    aqn = spec.arm.aqn
    layer_factors = _layer_factors(spec, sigmas_file, weights_sha256)
    noise = noise_of(spec)
    recorder = ReceiptRecorder(
        noise,
        expected_phases=tuple(p for p in TRAINING_PHASES if p != "reference" or spec.training.kl_coefficient > 0),
        num_layers=len(decoder_layers(model)),
        num_norms=num_rms_norms(model),
        num_steps=spec.num_steps,
        num_epochs=spec.training.epochs,
        steps_per_rollout=spec.training.steps_per_rollout,
        norms_watched=True,
        layer_factors=layer_factors,
        seed=spec.random_seed,
        required=required_passes(spec),
    )
    return NoisePlan(
        seed=spec.random_seed,
        spec=noise,
        faults=ActiveFaults.of(noise.faults),
        recorder=recorder,
        aqn_factors=target_factors(model, aqn, layer_factors) if aqn else {},
        num_steps=spec.num_steps,
        num_epochs=spec.training.epochs,
    )


def _layer_factors(spec: TrainingSpec, sigmas_file: Path | None, weights_sha256: str | None) -> dict[int, float] | None:
    aqn = spec.arm.aqn
    machine = aqn.layer_sigmas_from if aqn else None
    if (machine is None) != (sigmas_file is None):
        raise ConfigError(f"arm {spec.arm_id}: layer_sigmas_from is {machine!r}, the sigmas file is {sigmas_file}")
    if sigmas_file is None:
        return None
    sigmas = read_yaml(sigmas_file, SigmaFile)
    metadata = sigmas.srdd_metadata
    found = tuple(metadata.get(key) for key in ("model", "machine", "strategy"))
    needed = (spec.model_role, machine, aqn.layer_sigmas_strategy if aqn else None)
    if found != needed:
        raise ConfigError(
            f"{sigmas_file}: these sigmas are for (model, machine, strategy) {found}, arm {spec.arm_id} needs {needed}"
        )
    if weights_sha256 is not None and metadata.get("weights_sha256") != weights_sha256:
        raise ConfigError(
            f"{sigmas_file}: these sigmas come from a diagnosis of another model (SHA-256 of the weights differs from "
            f"that of {spec.model_role})"
        )
    return {layer: sigma / sigmas.aqn.base_sigma for layer, sigma in sigmas.aqn.layer_sigmas.items()}


def required_passes(spec: TrainingSpec) -> tuple[Row, ...]:
    """Return what each phase must do on each worker in each step; the backward passes are those of the actor's graphs.

    A rollout, and with a KL term the reference, read every sequence of a batch once, and so does the actor for the old
    log-probabilities, where several steps learn from one batch or a correction compares the sampler with them. In every
    step the actor is trained on the sequences of that step, and may have dropout. A validation reads any number. The
    reference of adapters is the policy, in training mode like the actor.
    """
    training, num_format, steps = spec.training, spec.dtype, range(spec.num_steps)
    batches = range(0, spec.num_steps, training.steps_per_rollout)
    validations = training.validation_steps(spec.num_steps)
    of_step = training.sequences_per_step // training.num_workers
    of_batch = {step: of_step * training.steps_per_rollout if step in batches else 0 for step in steps}
    scores_old = training.steps_per_rollout > 1 or spec.arm.importance_sampling is not None
    reads: tuple[Phase, ...] = ("rollout", "reference") if training.kl_coefficient else ("rollout",)

    in_training: set[Phase] = {"actor_forward", "reference"} if training.lora else {"actor_forward"}

    def row(phase: Phase, step: int, sequences: int | None, **columns: Any) -> Row:
        mode = "training" if phase in in_training else "evaluation"
        known = {"passes": int(bool(sequences))} | stated(num_format, spec.attention, mode)
        return Row(phase, step, sequences=sequences, **known | columns)

    trained = {"trained_sequences": of_step, "formats": {num_format, f"{num_format} with dropout"}}
    # A micro-batch that is computed twice, on a device other than a CPU.
    verified = {
        step - 1: {"algorithms": {"default", "deterministic"}} for step in training.verified_steps(spec.num_steps)
    }
    return (
        *(row(phase, step, of_batch[step]) for phase in reads for step in steps),
        *(
            row("actor_forward", step, of_batch[step] if scores_old else 0, **trained, **verified.get(step, {}))
            for step in steps
        ),
        *(row("validation", step, None, passes=int(step in validations)) for step in range(spec.num_steps + 1)),
    )
