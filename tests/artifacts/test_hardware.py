"""What vendors' tools say about a device; the tools here are made up and print what the real ones print."""

import os

import pytest
import torch

from aqnpipe.artifacts import hardware
from aqnpipe.artifacts.hardware import (
    parse_npu_fields,
    parse_npu_map,
    parse_nvidia_smi,
    read_hardware,
    read_temperature,
)

NVIDIA = """\
GPU-5d2ae7a5-0000-0000-0000-000000000001, 1320220066366, 00000000:07:00.0, 550.54.15, 34
GPU-5d2ae7a5-0000-0000-0000-000000000002, [N/A], 00000000:0F:00.0, 550.54.15, 61
"""
NPU_MAP = """\
\tNPU ID                         Chip ID                        Chip Logic ID                  Chip Name
\t0                              0                              0                              Ascend 910C
\t0                              1                              1                              Ascend 910C
\t0                              2                              -                              Mcu
\t4                              0                              2                              Ascend 910C
"""
NPU_BOARD = """\
\tNPU ID                         : 4
\tSerial Number                  : 033HWX10N6000001
\tSoftware Version               : 24.1.rc2
\tBoard ID                       : NA
"""
NPU_TEMPERATURE = "\tNPU Temperature (C)            : 47\n"


def tool(folder, name, script):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def tools(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def test_nvidia_smi_by_uuid_without_what_it_does_not_know():
    gpus = parse_nvidia_smi(NVIDIA)
    assert gpus["GPU-5d2ae7a5-0000-0000-0000-000000000001"]["serial"] == "1320220066366"
    assert "serial" not in gpus["GPU-5d2ae7a5-0000-0000-0000-000000000002"]
    assert parse_nvidia_smi("NVIDIA-SMI has failed because it couldn't communicate with the driver.\n") == {}


def test_npu_smi_maps_logical_ids_to_chips_and_leaves_controllers_out():
    assert parse_npu_map(NPU_MAP) == {"0": ("0", "0"), "1": ("0", "1"), "2": ("4", "0")}
    assert parse_npu_fields(NPU_BOARD)["Serial Number"] == "033HWX10N6000001"
    assert "Board ID" not in parse_npu_fields(NPU_BOARD)


def test_a_gpu(tools, monkeypatch):
    tool(tools, "nvidia-smi", f"cat <<'END'\n{NVIDIA}END")
    monkeypatch.setattr(hardware, "uuid_of_device", lambda device: "GPU-5d2ae7a5-0000-0000-0000-000000000002")
    monkeypatch.setattr(hardware, "name_of_device", lambda device: "NVIDIA H100")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    found = read_hardware(torch.device("cuda:0"))
    assert (found.name, found.serial, found.driver) == ("NVIDIA H100", None, "550.54.15")
    assert (found.toolkit, found.temperature_celsius) == ("CUDA 12.8", 61.0)


def test_an_npu_among_visible_ones(tools, tmp_path, monkeypatch):
    tool(
        tools,
        "npu-smi",
        f"""case "$*" in
"info -m") cat <<'END'
{NPU_MAP}END
;;
"info -t board -i 4") cat <<'END'
{NPU_BOARD}END
;;
"info -t temp -i 4 -c 0") printf '{NPU_TEMPERATURE.strip()}\\n' ;;
*) exit 1 ;;
esac""",
    )
    toolkit = tmp_path / "cann" / "aarch64-linux"
    toolkit.mkdir(parents=True)
    (toolkit / "ascend_toolkit_install.info").write_text("package_name=Ascend-cann-toolkit\nversion=8.3.RC1\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "cann"))
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "1,2")
    monkeypatch.setattr(hardware, "name_of_device", lambda device: "Ascend910C")
    found = read_hardware(type("Device", (), {"type": "npu", "index": 1})())
    assert (found.serial, found.driver, found.toolkit) == ("033HWX10N6000001", "24.1.rc2", "CANN 8.3.RC1")
    assert found.temperature_celsius == 47.0


@pytest.mark.parametrize("script", ["exit 9", "echo garbage", "printf '\\377'"])
def test_a_tool_that_fails_is_no_error(tools, monkeypatch, script):
    tool(tools, "nvidia-smi", script)
    monkeypatch.setattr(hardware, "uuid_of_device", lambda device: "GPU-1")
    monkeypatch.setattr(hardware, "name_of_device", lambda device: "NVIDIA H100")
    found = read_hardware(torch.device("cuda:0"))
    assert (found.driver, found.temperature_celsius) == (None, None)


def test_a_cpu_has_a_name_and_the_temperature_of_its_hottest_sensor(monkeypatch):
    import psutil

    reading = type("Reading", (), {})
    hot, cool = reading(), reading()
    hot.current, cool.current = 71.5, 40.0
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: {"coretemp": [cool, hot], "nvme": [hot]}, raising=False)
    assert read_hardware(torch.device("cpu")).name
    assert read_temperature(torch.device("cpu")) == 71.5
    monkeypatch.setattr(psutil, "sensors_temperatures", dict, raising=False)
    assert read_temperature(torch.device("cpu")) is None
