"""The settings of one job.

A job's spec contains only the settings that the job uses, so an edit elsewhere in the study does not re-run it.
"""

from aqnpipe.config.arm import Arm
from aqnpipe.config.base import FrozenModel
from aqnpipe.config.custom_code import CustomFunction
from aqnpipe.config.dataset import LmEvalDataset, PromptFormat
from aqnpipe.config.evaluation import EvaluationConfig, Scorer
from aqnpipe.config.generation import GenerationConfig
from aqnpipe.config.loss_study import LossStudyConfig
from aqnpipe.config.model import Attention, Dtype
from aqnpipe.config.noise import Counterpart, Fault
from aqnpipe.config.training import DEFAULT_LOSS_SCALE, TrainingConfig
from aqnpipe.device import RequestedDevice


class TrainingSpec(FrozenModel):
    """One training run: an arm, a seed and the shared settings. `faults` are those of the arm's machine.

    `seed` identifies the run; `random_seed` keys all its random numbers. `scorer`: grades validations; `scorer_sha256`:
    digest of its source if it is a function of the user's own.
    """

    model_role: str
    arm_id: str
    arm: Arm
    faults: tuple[Fault, ...] = ()
    seed: int
    num_steps: int
    device: RequestedDevice = "auto"
    dtype: Dtype
    attention: Attention
    prompt: PromptFormat
    generation: GenerationConfig = GenerationConfig()
    training: TrainingConfig
    scorer: Scorer | CustomFunction = "strict"
    scorer_sha256: str | None = None

    @property
    def random_seed(self) -> int:
        """Seed of the run's prompts, sampling and noise."""
        return self.seed + self.arm.seed_offset

    @property
    def loss_scale(self) -> int:
        """Factor on the loss while gradients are computed in float16; 1 in other formats."""
        return (self.training.loss_scale or DEFAULT_LOSS_SCALE) if self.dtype == "float16" else 1


class ParitySpec(FrozenModel):
    """The parity of a model: the device as the study uses it, and its counterpart in another configuration."""

    model_role: str
    machine: str
    counterpart: Counterpart
    device: RequestedDevice = "auto"
    dtype: Dtype
    attention: Attention
    prompt: PromptFormat


class EvaluationSpec(FrozenModel):
    """Evaluation of a checkpoint; `step` 0 is the model before training. `faults` are those of the arm's machine.

    `task`: the task of lm-evaluation-harness whose questions they are; None for questions of other data sets.
    """

    model_role: str
    arm_id: str
    seed: int
    step: int
    faults: tuple[Fault, ...] = ()
    device: RequestedDevice = "auto"
    dtype: Dtype
    attention: Attention
    prompt: PromptFormat
    generation: GenerationConfig = GenerationConfig()
    evaluation: EvaluationConfig
    task: LmEvalDataset | None = None


class LossStudySpec(FrozenModel):
    """One loss study. `faults` are those of its machine; the settings replace their magnitudes and orders."""

    model_role: str
    faults: tuple[Fault, ...]
    device: RequestedDevice = "auto"
    dtype: Dtype
    attention: Attention
    prompt: PromptFormat
    settings: LossStudyConfig
