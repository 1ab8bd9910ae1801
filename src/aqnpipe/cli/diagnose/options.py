"""The options of `aqnpipe diagnose`, checked in one line each before any work starts."""

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aqnpipe.device import DeviceKind, resolve_device, torch_device
from aqnpipe.errors import ConfigError, DeviceError, StorageError, first_line

if TYPE_CHECKING:
    import torch

_DEVICE = re.compile(r"(cuda|npu)(?::(\d+))?")


@dataclass(frozen=True)
class Outputs:
    """Where reports and logs go. No folder is made that does not exist."""

    json: Path | None
    history: Path | None
    logs: Path | None

    def check(self) -> None:
        """Raise StorageError unless everything can be written."""
        if self.json is not None:
            check_writable("--json", self.json)
        for option, folder in (("--history", self.history), ("--logs", self.logs)):
            if folder is not None:
                check_folder(option, folder)


def parse_devices(option: str, text: str) -> tuple[str, ...]:
    """Return torch's names of the devices in `text`: `all`, or a list such as `cuda:0,cuda:1` or `cpu,cpu`.

    `all` means every GPU or NPU that this process sees. The CPU never stands in for them. Raises DeviceError if a
    device is not there, ConfigError if a name is unknown or an accelerator is named twice.
    """
    if text.strip() == "all":
        found = resolve_device("auto")
        if found.kind == "cpu":
            raise DeviceError(f"{option} all: found no GPU or NPU on this machine; `--devices cpu` tests its CPU")
        return tuple(torch_device(found.kind, index) for index in range(found.count))
    names = tuple(part.strip() for part in text.split(","))
    names = tuple(f"{name}:0" if name in ("cuda", "npu") else name for name in names)
    for name in names:
        _check_device(option, name)
        if name != "cpu" and names.count(name) > 1:
            raise ConfigError(f"{option} {text}: {name} is named twice, expected once")
    return names


def _check_device(option: str, name: str) -> None:
    found = _DEVICE.fullmatch(name)
    if name != "cpu" and found is None:
        raise ConfigError(f"{option}: found {name!r}, expected all, or a list of cuda:N, npu:N or cpu")
    if found is not None:
        kind: DeviceKind = "cuda" if found[1] == "cuda" else "npu"
        count = resolve_device(kind).count
        if int(found[2] or 0) >= count:
            raise DeviceError(f"{option}: {name} is not there; found {kind}:0 to {kind}:{count - 1}")


def usable_device(name: str) -> "torch.device":
    """Return the torch device `name`; ConfigError if it cannot be used."""
    import torch

    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        # torch goes on with a list of all of its backends.
        reason = first_line(error).split(". ")[0]
        raise ConfigError(f"--device {name}: not usable here ({reason})") from error
    return device


def check_writable(option: str, path: Path) -> None:
    """Raise StorageError unless a file can be written at `path`. No folder is made, and nothing is left behind."""
    if path.is_dir():
        raise StorageError(f"{option} {path}: found a folder, expected the name of a file")
    check_folder(option, path.parent)


def check_folder(option: str, folder: Path) -> None:
    """Raise StorageError unless `folder` exists and files can be written into it."""
    if not folder.is_dir():
        found = "a file" if folder.exists() else "no such folder"
        raise StorageError(f"{option}: {folder}: found {found}, expected an existing folder")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise StorageError(f"{option}: {folder}: cannot be written ({error.strerror})") from error
