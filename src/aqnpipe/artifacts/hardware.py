"""The hardware behind a torch device: name, serial number, driver, toolkit and temperature, as far as they are known.

The vendors' tools (nvidia-smi, npu-smi) are asked if they are installed. Nothing here is required: what a machine does
not say is None.
"""

import os
import platform
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from aqnpipe.artifacts.base import Artifact
from aqnpipe.device import name_of_device, uuid_of_device, visible_ids

if TYPE_CHECKING:
    import torch

_SECONDS_TO_ANSWER = 20
_NVIDIA_FIELDS = ("uuid", "serial", "pci.bus_id", "driver_version", "temperature.gpu")
_CPU_SENSORS = ("coretemp", "k10temp", "zenpower")
_UNKNOWN = ("", "N/A", "[N/A]", "NA", "-", "[Not Supported]")


class Hardware(Artifact):
    """One device. `temperature_celsius` was read when this was."""

    name: str
    uuid: str | None = None
    serial: str | None = None
    slot: str | None = None  # address on the PCI bus
    driver: str | None = None
    toolkit: str | None = None
    temperature_celsius: float | None = None


def read_hardware(device: "torch.device") -> Hardware:
    """Return what this machine says about `device` (cpu, cuda:N or npu:N)."""
    match device.type:
        case "cuda":
            return _nvidia(device)
        case "npu":
            return _ascend(device)
        case _:
            return Hardware(name=_processor(), temperature_celsius=_cpu_temperature())


def read_temperature(device: "torch.device") -> float | None:
    """Return the temperature of `device` in degrees Celsius; None where the machine does not say it."""
    return read_hardware(device).temperature_celsius


def _nvidia(device: "torch.device") -> Hardware:
    import torch

    uuid = uuid_of_device(device)
    rows = _answer("nvidia-smi", f"--query-gpu={','.join(_NVIDIA_FIELDS)}", "--format=csv,noheader,nounits")
    facts = parse_nvidia_smi(rows).get(uuid or "", {})
    toolkit = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    return Hardware(
        name=name_of_device(device) or str(device),
        uuid=uuid,
        serial=facts.get("serial"),
        slot=facts.get("pci.bus_id"),
        driver=facts.get("driver_version"),
        toolkit=toolkit,
        temperature_celsius=_number(facts.get("temperature.gpu")),
    )


def _ascend(device: "torch.device") -> Hardware:
    index, ids = device.index or 0, visible_ids("npu")
    place = parse_npu_map(_answer("npu-smi", "info", "-m")).get(ids[index] if index < len(ids) else str(index))
    chip = ("-i", place[0], "-c", place[1]) if place else None
    board = parse_npu_fields(_answer("npu-smi", "info", "-t", "board", *chip[:2])) if chip else {}
    heat = parse_npu_fields(_answer("npu-smi", "info", "-t", "temp", *chip)) if chip else {}
    return Hardware(
        name=name_of_device(device) or str(device),
        serial=board.get("Serial Number"),
        driver=board.get("Software Version"),
        toolkit=_cann_version(),
        temperature_celsius=_number(next((value for key, value in heat.items() if "Temperature" in key), None)),
    )


def parse_nvidia_smi(text: str) -> dict[str, dict[str, str]]:
    """Return the known fields of every GPU by UUID, from nvidia-smi's CSV with the columns _NVIDIA_FIELDS."""
    gpus = {}
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(_NVIDIA_FIELDS):
            known = zip(_NVIDIA_FIELDS, values, strict=True)
            gpus[values[0]] = {field: value for field, value in known if value not in _UNKNOWN}
    return gpus


def parse_npu_map(text: str) -> dict[str, tuple[str, str]]:
    """Return (NPU id, chip id) by logical id, from `npu-smi info -m`; rows of controllers have no logical id."""
    rows = (line.split() for line in text.splitlines())
    return {row[2]: (row[0], row[1]) for row in rows if len(row) > 3 and all(part.isdigit() for part in row[:3])}


def parse_npu_fields(text: str) -> dict[str, str]:
    """Return the fields of npu-smi's lines `name : value`, without those that it does not know."""
    pairs = ((key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in text.splitlines()))
    return {key: value for key, value in pairs if value not in _UNKNOWN}


def _cann_version() -> str | None:
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    if home is None:
        return None
    for path in sorted(Path(home).glob("*-linux/ascend_toolkit_install.info")):
        version = re.search(r"^version=(\S+)", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        if version:
            return f"CANN {version[1]}"
    return None


def _answer(*command: str) -> str:
    """Return the standard output of a vendor's tool; empty if it is not installed, fails or does not answer."""
    try:
        done = subprocess.run(  # noqa: S603 - fixed commands
            command, capture_output=True, text=True, check=True, timeout=_SECONDS_TO_ANSWER
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    return done.stdout


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    named = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine()


def _cpu_temperature() -> float | None:
    import psutil

    sensors = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
    readings = [reading.current for name in _CPU_SENSORS for reading in sensors.get(name, ())]
    return max(readings, default=None)


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
