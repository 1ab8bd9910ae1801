"""What one job needs of a study: no more, so that an edit elsewhere in the study does not re-run it."""

from aqnpipe.config.arm import Arm
from aqnpipe.config.base import FrozenModel
from aqnpipe.config.dataset import PromptFormat
from aqnpipe.config.evaluation import EvaluationConfig
from aqnpipe.config.model import Attention, Dtype
from aqnpipe.config.training import TrainingConfig


class TrainingSpec(FrozenModel):
    """One training run: an arm, a seed and the shared settings."""

    model_role: str
    arm_id: str
    arm: Arm
    seed: int
    num_steps: int
    dtype: Dtype
    attention: Attention
    prompt: PromptFormat
    training: TrainingConfig


class EvaluationSpec(FrozenModel):
    """One evaluated checkpoint. `step` 0 is the model before training."""

    model_role: str
    arm_id: str
    seed: int
    step: int
    dtype: Dtype
    attention: Attention
    prompt: PromptFormat
    evaluation: EvaluationConfig
