"""Devices: the requested device is used or refused, never silently replaced by the CPU."""

import os
import re
import subprocess
import sys
import types

import pytest
import torch

from aqnpipe import device as devices
from aqnpipe.device import (
    Device,
    can_compute_on,
    name_of_device,
    refuse_other_numbers,
    resolve_device,
    torch_device,
    uuid_of_device,
    visible_ids,
)
from aqnpipe.errors import ConfigError, DeviceError


def backend(*names):
    """A made-up torch backend with devices of these names."""
    module = types.ModuleType("backend")
    module.is_available = lambda: bool(names)
    module.device_count = lambda: len(names)
    module.get_device_name = lambda index: names[index]
    return module


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch):
    for variable in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "VLLM_ASCEND_ENABLE_NZ"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(torch, "cuda", backend())
    monkeypatch.setattr(devices, "find_spec", lambda name: None)


@pytest.fixture
def ascend(monkeypatch):
    """Two NPUs: torch_npu can be imported and has added torch.npu."""
    monkeypatch.setattr(devices, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    monkeypatch.setattr(torch, "npu", backend("Ascend910C", "Ascend910C"), raising=False)
    monkeypatch.setenv("VLLM_ASCEND_ENABLE_NZ", "0")


def test_auto_selects_the_cpu_only_if_there_is_nothing_else():
    assert resolve_device("auto") == Device("cpu", 1, ("cpu",))


def test_auto_selects_gpus(monkeypatch):
    monkeypatch.setattr(torch, "cuda", backend("A100", "A100"))
    found = resolve_device("auto")
    assert found == Device("cuda", 2, ("A100", "A100"))
    assert found.label == "cuda: 2 x A100"


def test_auto_prefers_npus(monkeypatch, ascend):
    monkeypatch.setattr(torch, "cuda", backend("A100"))
    assert resolve_device("auto") == Device("npu", 2, ("Ascend910C", "Ascend910C"))


def test_cpu_is_the_cpu_even_if_there_are_gpus(monkeypatch):
    monkeypatch.setattr(torch, "cuda", backend("A100"))
    assert resolve_device("cpu").label == "cpu"


def test_on_ascend_weights_keep_their_layout(monkeypatch, ascend):
    monkeypatch.delenv("VLLM_ASCEND_ENABLE_NZ")
    resolve_device("npu")
    assert os.environ["VLLM_ASCEND_ENABLE_NZ"] == "0"


def test_a_missing_gpu_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceError, match=r"requested cuda, found none: torch \S+ is built without CUDA"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(DeviceError, match=r"torch sees none .does nvidia-smi show them"):
        resolve_device("cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(DeviceError, match=r"CUDA_VISIBLE_DEVICES is '' .the job has no devices"):
        resolve_device("cuda")


def test_a_missing_npu_is_refused_with_the_reason():
    with pytest.raises(DeviceError, match=r"requested npu, found none: torch_npu is not installed .pip install"):
        resolve_device("npu")


@pytest.mark.parametrize("variable", ["CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"])
def test_auto_refuses_the_cpu_if_the_environment_lists_devices(monkeypatch, variable):
    monkeypatch.setenv(variable, "2,3")
    with pytest.raises(DeviceError, match=f"found only the CPU, but {variable}=2,3 lists devices"):
        resolve_device("auto")
    assert resolve_device("cpu").kind == "cpu"


@pytest.mark.parametrize("nothing", ["", "-1", "NoDevFiles", "none", ",0"])
def test_an_environment_that_lists_no_devices_selects_the_cpu(monkeypatch, nothing):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nothing)
    assert visible_ids("cuda") == ()
    assert resolve_device("auto").kind == "cpu"


def test_visible_ids_are_those_of_the_environment(monkeypatch):
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4, 5")
    assert visible_ids("npu") == ("4", "5")
    assert visible_ids("cuda") == visible_ids("cpu") == ()


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("0,1,", ("0", "1")),
        ("2,-1,3", ("2",)),
        ("01,1 ,2", None),
        ("01, 2", ("1", "2")),
        ("GPU-8932f937-d72c-4106,MIG-GPU-5c89852c/1/0", ("GPU-8932f937-d72c-4106", "MIG-GPU-5c89852c/1/0")),
        ("0,0", None),
        ("0-3", None),
        ("0 1", None),
        ("all", None),
        ("'0,1'", None),
        ("cuda:0", None),
    ],
)
def test_lists_are_read_as_cuda_reads_them_and_others_are_refused(monkeypatch, text, ids):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    if ids is None:
        with pytest.raises(
            DeviceError, match=f"CUDA_VISIBLE_DEVICES: found .*{re.escape(text)}.*, expected device numb"
        ):
            visible_ids("cuda")
    else:
        assert visible_ids("cuda") == ids
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0-7")
    with pytest.raises(
        DeviceError, match="ASCEND_RT_VISIBLE_DEVICES: found '0-7', expected device numbers such as 0,1"
    ):
        visible_ids("npu")


def test_processes_count_devices_among_the_visible_ones():
    assert [torch_device("cuda", rank) for rank in (0, 3)] == ["cuda:0", "cuda:3"]
    assert torch_device("npu", 1) == "npu:1"
    assert torch_device("cpu", 5) == "cpu"


@pytest.mark.parametrize(
    ("visible", "number", "expected"),
    [(None, None, "0"), (None, "1", "1"), ("4,5", None, "4"), ("4,5", "1", "5"), ("5", "1", "5")],
)
def test_a_worker_computes_on_the_device_of_its_number(monkeypatch, visible, number, expected):
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("LOCAL_RANK", number)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert devices.local_device_id("cuda") == expected


def test_the_name_of_one_device(monkeypatch):
    monkeypatch.setattr(torch, "cuda", backend("A100", "H100"))
    torch.cuda.get_device_name = lambda device: ("A100", "H100")[device.index]
    assert name_of_device(torch.device("cuda:1")) == "H100"
    assert name_of_device(torch.device("cpu")) is None


@pytest.mark.parametrize("value", ["", "0"])
def test_a_variable_that_changes_no_number_is_none_to_be_refused(monkeypatch, value):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", value)
    monkeypatch.setenv("ONEDNN_DEFAULT_FPMATH_MODE", "STRICT")
    refuse_other_numbers()
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    with pytest.raises(ConfigError, match="TORCH_ALLOW_TF32_CUBLAS_OVERRIDE is '1'"):
        refuse_other_numbers()


def test_the_module_does_not_import_torch():
    code = "import sys, aqnpipe.device; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("built", "expected"), [("cuda: Optional[str] = None\n", False), ("cuda: Optional[str] = '12.8'\n", True)]
)
def test_what_torch_was_built_for_is_known_without_importing_it(monkeypatch, tmp_path, built, expected):
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\n{built}hip: Optional[str] = None\n")
    found = {"torch": types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))}
    monkeypatch.setattr("aqnpipe.device.find_spec", found.get)
    assert can_compute_on("cuda") is expected
    assert not can_compute_on("npu")
    assert can_compute_on("cpu")


def test_the_uuid_of_a_gpu_is_written_as_nvidia_smi_writes_it(monkeypatch):
    properties = types.SimpleNamespace(uuid="5d2ae7a5-0000-0000-0000-000000000001")
    module = backend("NVIDIA H100")
    module.get_device_properties = lambda device: properties
    monkeypatch.setattr(torch, "cuda", module)
    assert uuid_of_device(torch.device("cuda:0")) == "GPU-5d2ae7a5-0000-0000-0000-000000000001"
    del properties.uuid
    assert uuid_of_device(torch.device("cuda:0")) is None
    assert uuid_of_device(torch.device("cpu")) is None
