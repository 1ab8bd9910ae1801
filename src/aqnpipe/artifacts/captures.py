"""A capture: what one machine or engine computed for fixed tokens, operator by operator, in one file.

The file is a zip archive without compression: `identity.json`, two tables in parquet, and tensors in safetensors. It
names no folders, hosts or serial numbers, so that it can be sent to another site.
"""

from datetime import datetime
from typing import Literal

from pydantic import Field

from aqnpipe.artifacts.base import Artifact
from aqnpipe.config.model import Attention, Dtype

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
    created: datetime = Field(description="UTC")
    model: str = Field(description="built-in name, hub id, or the last part of a folder's name")
    model_class: str
    weights_sha256: str
    tokenizer_sha256: str | None
    config: dict[str, object] = Field(description="config.json without its private keys")
    tokens_sha256: str
    num_sequences: int = Field(ge=1)
    num_tokens: int = Field(ge=1)
    lengths: tuple[int, ...]
    backend: Backend
    dtype: Dtype
    attention: str = Field(description="attention kernel")
    device: str = Field(description="kind and name of the device")
    driver: str | None
    toolkit: str | None
    threads: int
    tensor_parallel: int = Field(default=1, ge=1)
    batch_invariant: bool = Field(default=False, description="vLLM's batch-invariant mode was in force")
    batch_size: int = Field(ge=1)
    padding: Literal["left", "right", "none"]
    num_decoded: int = Field(ge=0, description="last tokens of each sequence, run one at a time")
    numerics: dict[str, str] = Field(description="torch's switches that change sums")
    versions: dict[str, str]
    num_compared_parameters: int = Field(ge=0)
    stale_parameters: tuple[str, ...]
    replay_of: str | None
    seconds: float = Field(ge=0, description="time of all passes, without loading")
    members: dict[str, str] = Field(description="SHA-256 of the other members by name")

    @property
    def setting(self) -> str:
        """Backend, dtype and what else differs between captures, in a few words."""
        batch = f"batches of {self.batch_size}, {self.threads} thread{'s' if self.threads > 1 else ''}"
        shards = f", {self.tensor_parallel} tensor-parallel workers" if self.tensor_parallel > 1 else ""
        mode = ", batch-invariant" if self.batch_invariant else ""
        return f"{self.backend} {self.dtype} {self.attention} on {self.device}, {batch}{shards}{mode}"


class CaptureConfig(Artifact):
    """How a model is run for a capture."""

    dtype: Dtype = "float32"
    attention: Attention = "eager"
    batch_size: int = Field(default=8, ge=1)
    padding: Literal["left", "right"] = "left"
    num_decoded: int = Field(default=4, ge=0)
    threads: int = Field(default=1, ge=1, description="CPU threads, of each process")
    tensor_parallel: int = Field(default=1, ge=1, description="workers of vLLM that share every layer")
    batch_invariant: bool = Field(default=False, description="vLLM's mode; its workers must report it as requested")
    max_bytes: int = Field(default=200_000_000, ge=1)
    max_rows: int = Field(default=256, ge=1)
