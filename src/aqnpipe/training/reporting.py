"""TensorBoard and Weights & Biases through the trainer's own reporting: offline, and outside the run's own files.

Their files contain host and time, so they cannot belong to a run that must be reproducible byte for byte.
"""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from aqnpipe.config.training import ReportTo
from aqnpipe.errors import ConfigError

_PACKAGES: dict[ReportTo, tuple[str, ...]] = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",)}
"""The packages that provide each tracker; one of them must be installed."""


def refuse_missing(report_to: Sequence[ReportTo]) -> None:
    """Raise ConfigError with the install command if a tracker is not installed."""
    for tracker in report_to:
        if not any(find_spec(package) for package in _PACKAGES[tracker]):
            raise ConfigError(f"training.report_to: {tracker} is not installed (pip install {_PACKAGES[tracker][0]})")


def prepare_reporting(report_to: Sequence[ReportTo], folder: Path, run_name: str) -> None:
    """Set the environment variables that make the trackers in `report_to` write to `folder`.

    W&B is offline and gets project and run name from here, unless the user's environment sets them. Raises ConfigError
    as `refuse_missing`.
    """
    refuse_missing(report_to)
    if "tensorboard" in report_to:
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / "tensorboard")
    if "wandb" in report_to:
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["WANDB_DIR"] = str(folder)
        for variable, value in (("MODE", "offline"), ("PROJECT", "aqnpipe"), ("NAME", run_name)):
            os.environ.setdefault(f"WANDB_{variable}", value)
