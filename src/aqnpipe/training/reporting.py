"""TensorBoard and Weights & Biases through the trainer's own reporting: offline, and outside the run's own files.

Their files name the host and the time, so they cannot be part of a run that is the same byte for byte.
"""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from aqnpipe.config.training import ReportTo
from aqnpipe.errors import ConfigError

_PACKAGES: dict[ReportTo, tuple[str, ...]] = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",)}
"""What has to be installed for each: any one of these."""


def prepare_reporting(report_to: Sequence[ReportTo], folder: Path, run_name: str) -> None:
    """Point the trackers in `report_to` at `folder`, by the environment variables that they read when they start.

    W&B stays offline and takes project and run name from here unless the user's environment says otherwise. Raises
    ConfigError, with the command that installs it, if one is missing.
    """
    for tracker in report_to:
        if not any(find_spec(package) for package in _PACKAGES[tracker]):
            raise ConfigError(f"training.report_to: {tracker} is not installed (pip install {_PACKAGES[tracker][0]})")
    if "tensorboard" in report_to:
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / "tensorboard")
    if "wandb" in report_to:
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["WANDB_DIR"] = str(folder)
        for variable, value in (("MODE", "offline"), ("PROJECT", "aqnpipe"), ("NAME", run_name)):
            os.environ.setdefault(f"WANDB_{variable}", value)
