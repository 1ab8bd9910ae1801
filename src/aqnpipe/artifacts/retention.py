"""Records of the checkpoints whose weights were removed after their evaluation.

Configuration, tokenizer and record of such a checkpoint stay, and the record of the run keeps the digests of its files.
"""

from pathlib import Path

from aqnpipe.artifacts.base import Artifact
from aqnpipe.artifacts.files import read_json
from aqnpipe.config.training import Keep

REMOVED_WEIGHTS_FILE = "removed_weights.json"


class RemovedWeights(Artifact):
    """removed_weights.json in the folder of a checkpoint, written before its weights are removed.

    `files_sha256`: digests of the removed files, by name. `untrained`: whether every weight was still that of the model
    before training; comparisons need it where several checkpoints have equal weights.
    """

    keep: Keep
    files_sha256: dict[str, str]
    untrained: bool


class RetainedRun(Artifact):
    """weights.json of a run: the steps whose weights are kept or removed, and why all are kept if they are."""

    keep: Keep
    kept_steps: tuple[int, ...]
    removed_steps: tuple[int, ...]
    kept_because: str | None = None


def read_removed(checkpoint: Path) -> RemovedWeights | None:
    """Return the record of the removed weights of a checkpoint; None if none were removed. DataError if damaged."""
    path = checkpoint / REMOVED_WEIGHTS_FILE
    return read_json(path, RemovedWeights) if path.is_file() else None


def why_weights_are_gone(checkpoint: Path) -> str | None:
    """Return why a checkpoint has no weights and how to get them again; None if it has weights or never had any."""
    if any(checkpoint.glob("*.safetensors")):
        return None
    removed = read_removed(checkpoint)
    if removed is None:
        return None
    return (
        f"{checkpoint}: its weights were removed after their evaluation (keep: {removed.keep}); to get them again, "
        f"remove {checkpoint.parent.parent} and run the study, which trains this run again (with keep: all they stay)"
    )
