"""A parity: how the operators of two captures differ, and what that does to log-probabilities.

A capture is what one machine or engine computed for fixed tokens, operator by operator, in one file. The file is a zip
archive without compression: `identity.json`, two tables in parquet, and tensors in safetensors. It names no folders,
hosts or serial numbers, so that it can be sent to another site.
"""

from datetime import datetime
from typing import Literal, get_args

from pydantic import ConfigDict, Field

from aqnpipe.artifacts.base import Artifact
from aqnpipe.config.measured_noise import ErrorFigures, is_norm
from aqnpipe.config.model import Attention, Dtype

OperatorVerdict = Literal["equal", "rounding", "different algorithm", "fault"]
ParityVerdict = Literal[
    "equal", "rounding", "different algorithm", "fault", "not located", "different function", "stale weights"
]

SEVERITY: tuple[ParityVerdict, ...] = get_args(ParityVerdict)
WITHIN_ROUNDING: tuple[ParityVerdict, ...] = ("equal", "rounding")

_NO_PRODUCTS = ("embed_tokens", "rotary_q", "rotary_k", "activation", "attention_residual", "mlp_residual")
"""Kinds of operators besides norms that multiply no matrices."""

CAPTURE_FORMAT = 1
"""Version of the files; a file of another version is refused."""
Backend = Literal["transformers", "vllm"]


class CaptureIdentity(Artifact):
    """identity.json: everything that decides the values of a capture, and the digests of the other members.

    `lengths` are the numbers of recorded tokens of the first sequences. `stale_parameters` are parameters whose values
    in memory were not those of the model's files. `replay_of` is the digest of the capture whose values every operator
    was fed.
    """

    format: int = CAPTURE_FORMAT
    aqnpipe: str
    created: datetime  # UTC
    model: str  # built-in name, hub id, or the last part of a folder's name
    model_class: str
    weights_sha256: str
    tokenizer_sha256: str | None
    config: dict[str, object]  # config.json without its private keys
    tokens_sha256: str
    num_sequences: int = Field(ge=1)
    num_tokens: int = Field(ge=1)
    lengths: tuple[int, ...]
    backend: Backend
    dtype: Dtype
    attention: str  # attention kernel
    device: str  # kind and name of the device
    driver: str | None
    toolkit: str | None
    threads: int
    tensor_parallel: int = Field(default=1, ge=1)
    batch_invariant: bool = False  # vLLM's batch-invariant mode was in force
    batch_size: int = Field(ge=1)
    padding: Literal["left", "right", "none"]
    num_decoded: int = Field(ge=0)  # last tokens of each sequence, run one at a time
    numerics: dict[str, str]  # torch's switches that change sums
    versions: dict[str, str]
    num_compared_parameters: int = Field(ge=0)
    stale_parameters: tuple[str, ...]
    replay_of: str | None
    seconds: float = Field(ge=0)  # time of all forward passes, without loading
    members: dict[str, str]  # SHA-256 of the other members by name

    @property
    def setting(self) -> str:
        """Backend, dtype and what else differs between captures, in a few words."""
        batch = f"batches of {self.batch_size}, {self.threads} thread{'s' if self.threads > 1 else ''}"
        shards = f", {self.tensor_parallel} tensor-parallel workers" if self.tensor_parallel > 1 else ""
        mode = ", batch-invariant" if self.batch_invariant else ""
        return f"{self.backend} {self.dtype} {self.attention} on {self.device}, {batch}{shards}{mode}"


class CaptureConfig(Artifact):
    """How and where a model is run for a capture, and how large the capture may be."""

    model_config = ConfigDict(validate_by_name=True)

    backend: Backend = "transformers"
    dtype: Dtype = "float32"
    attention: Attention = "eager"
    device: str = "cpu"  # torch's name of the device
    batch_size: int = Field(default=8, ge=1)
    padding: Literal["left", "right"] = "left"
    num_decoded: int = Field(default=4, ge=0, alias="decode")
    threads: int = Field(default=1, ge=1)  # CPU threads, of each process
    tensor_parallel: int = Field(default=1, ge=1)  # workers of vLLM that share every layer
    batch_invariant: bool | None = None
    """vLLM's mode; its workers must report it as requested; null: its environment variable"""
    max_bytes: int = Field(default=200_000_000, ge=1)
    max_rows: int = Field(default=256, ge=1)


def is_product(kind: str) -> bool:
    """Return whether operators of a kind multiply matrices: linear modules and attention."""
    return kind not in _NO_PRODUCTS and not is_norm(kind)


class OperatorParity(Artifact):
    """One operator of both sides. Errors are second minus first, on the same input unless the parity says otherwise.

    - relative_rms: RMS of the error over the RMS of the first side's results; bias: its mean in the same unit.
    - ulps_p99, ulps_largest: the error in units of the last place of the coarser dtype.
    - gain: slope of the error over the results; -0.1 means that the second side is 10 % too small.
    - input_correlation: of the RMS of the error and of the input, over tokens; null if one of them is constant.
    - equal_share: share of results that are equal after rounding to the coarser dtype; null without the same input.
    - bound_share: largest error over the sum of both forward error bounds.
    - accumulated_*: of the results in the sides' own passes, whose inputs differ already.
    - figures: how the error depends on result and input; null without the same input, and for operators that are
      neither products nor norms. figures_rms: the relative RMS that the figures give on the same values.
    - result_rms: RMS of the first side's results; null in files of older versions.
    """

    name: str
    kind: str
    layer: int | None
    verdict: OperatorVerdict
    reason: str
    relative_rms: float
    bias: float
    ulps_p99: float
    ulps_largest: float
    gain: float
    input_correlation: float | None
    equal_share: float | None
    bound_share: float
    first_algorithm: str | None
    second_algorithm: str | None
    accumulated_relative_rms: float
    accumulated_correlation: float | None
    figures: ErrorFigures | None = None
    figures_rms: float | None = None
    result_rms: float | None = None

    @property
    def is_product(self) -> bool:
        """Return whether the operator multiplies matrices: a linear module or attention."""
        return is_product(self.kind)

    @property
    def is_norm(self) -> bool:
        """Return whether the operator is an RMSNorm or a LayerNorm."""
        return is_norm(self.kind)


class LogProbabilities(Artifact):
    """Differences of the log-probabilities of the tokens, second minus first, in nats."""

    num_tokens: int
    mean: float
    rms: float
    p99: float  # 99th percentile of the absolute difference
    largest: float
    argmax_changes: float  # share of tokens in whose place another token is the most likely
    prefill_rms: float | None
    decode_rms: float | None


class SubstitutedKind(Artifact):
    """Effect of the second side's operators of these kinds, in the first side's place, on the log-probabilities.

    `explained`: share of the mean square of the difference that is gone if they are substituted; below 0 if they make
    it larger.
    """

    kinds: tuple[str, ...]
    rms: float = Field(ge=0)
    explained: float | None


class Substitution(Artifact):
    """Which operators explain the difference. `alone`: one kind at a time; `together`: cumulatively, largest first."""

    num_tokens: int
    rms: float  # RMS difference of the log-probabilities of these tokens
    alone: tuple[SubstitutedKind, ...]
    together: tuple[SubstitutedKind, ...]


class ParityFile(Artifact):
    """Output of `aqnpipe parity --json`."""

    verdict: ParityVerdict
    summary: str
    first: CaptureIdentity
    second: CaptureIdentity
    same_inputs: bool
    """the second side's operators were fed the first side's inputs; if not, operator errors are differences of the
    errors against exact results"""
    num_rows: int  # tokens on which operators were compared
    first_beyond_rounding: str | None
    operators: tuple[OperatorParity, ...]  # in the order in which they run
    log_probabilities: LogProbabilities
    substitution: Substitution | None
    settings: tuple[str, ...]  # settings that differ between the two sides
    notes: tuple[str, ...]

    def layer_errors(self) -> dict[int, float]:
        """Return the relative error of every decoder layer: the root mean square over its products."""
        squares: dict[int, list[float]] = {}
        for operator in self.operators:
            if operator.layer is not None and operator.is_product:
                squares.setdefault(operator.layer, []).append(operator.relative_rms**2)
        return {layer: (sum(found) / len(found)) ** 0.5 for layer, found in squares.items()}
