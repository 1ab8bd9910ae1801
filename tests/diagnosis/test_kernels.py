"""The kernels behind a fault: lanes and rows, one finding for one kernel, and a script that shows it elsewhere."""

import subprocess
import sys

import pytest
import torch
from erring_kernels import changed
from random_models import random_layer_norm_model_of, random_mixture_of
from safetensors.torch import load_file

import aqnpipe
from aqnpipe.artifacts.diagnoses import KernelFault, TilePlace
from aqnpipe.diagnosis.kernels import kernel_faults, observe_kernels

IDS = torch.arange(3, 40)


def bad_lanes(operator, columns, width, rows=slice(None)):
    """Scale some output columns of an operator of the CPU by 0.75."""

    def scale(result):
        lanes = [column for column in range(result.shape[-1]) if column % width in columns]
        if result.dtype != torch.float64:
            result.view(-1, result.shape[-1])[rows, lanes] *= 0.75

    return changed(operator, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_kernel_of_a_sound_device_errs(random_model, dtype):
    kernels = observe_kernels(random_model(dtype=dtype), IDS)
    assert kernel_faults(kernels) == ()
    assert {"mm", "bmm", "silu", "_softmax", "mul", "silu_backward"} <= {operator for operator, _, _ in kernels.found}


@pytest.mark.parametrize("make", [random_layer_norm_model_of, random_mixture_of])
def test_no_kernel_of_other_families_errs(make):
    model = make({random_layer_norm_model_of: "bloom", random_mixture_of: "qwen2_moe"}[make])
    assert kernel_faults(observe_kernels(model.to(torch.bfloat16), IDS)) == ()


def test_bad_lanes_of_all_products_are_one_kernel(random_model):
    with bad_lanes("mm", (5, 12), 16):
        (found,) = kernel_faults(observe_kernels(random_model(dtype=torch.bfloat16), IDS))
    assert (found.operator, found.dtype) == ("mm", "bfloat16")
    assert found.column_tile == TilePlace(width=16, offsets=(5, 12))
    assert found.row_tile is None
    assert found.wrong_calls == found.calls > 40
    assert len(found.shapes) > 5
    assert "bfloat16, output columns 5, 12 of every 16, in " in found.in_words


def test_bad_rows_and_another_operator_are_kernels_of_their_own(random_model):
    with bad_lanes("silu", (7,), 16, rows=slice(1, None, 2)):
        found = kernel_faults(observe_kernels(random_model(), IDS[:32]))
    assert [fault.operator for fault in found] == ["silu"]
    assert found[0].shapes == ("1x32x160",)  # a single token is in row 0
    assert found[0].row_tile == TilePlace(width=16, offsets=tuple(range(1, 16, 2)))
    with bad_lanes("silu", (7,), 16), bad_lanes("mm", (3,), 32):
        found = kernel_faults(observe_kernels(random_model(), IDS))
    assert {(fault.operator, fault.column_tile) for fault in found} == {
        ("mm", TilePlace(width=32, offsets=(3,))),
        ("silu", TilePlace(width=16, offsets=(7,))),
    }


def test_gradients_of_the_model_stay_as_they_are(random_model):
    model = random_model()
    model(input_ids=IDS[None]).logits.sum().backward()
    before = {name: weight.grad for name, weight in model.named_parameters()}
    observe_kernels(model, IDS)
    assert all(weight.grad is before[name] for name, weight in model.named_parameters())


def kernel(columns, width, **more):
    return KernelFault(
        **{"operator": "mm", "dtype": "bfloat16", "shapes": ("4x64x8",), "wrong_calls": 3, "calls": 4, "row_tile": None}
        | {"columns": columns, "num_columns": width, "column_tile": None}
        | more
    )


def test_narrow_results_belong_to_the_tile_of_wide_ones():
    tile = TilePlace(width=64, offsets=(13, 45))
    wide = kernel((13, 45, 77, 109), 128, column_tile=tile)
    assert wide.explains(kernel((13,), 32))
    assert wide.explains(kernel((13, 45), 64))
    assert not wide.explains(kernel((13, 14), 32))
    assert not wide.explains(kernel((13,), 32, operator="silu"))
    assert not wide.explains(kernel((13,), 32, dtype="float32"))
    both = wide.with_calls_of(kernel((13,), 32, shapes=("4x32x8",), row_tile=None))
    assert both.in_words == "mm 4x64x8 (and 1 other shape) bfloat16, output columns 13, 45 of every 64, in 6 of 8 calls"


def test_words_of_single_columns_all_columns_and_rows():
    assert kernel((3,), 128).in_words.endswith("output columns 3 of 128, in 3 of 4 calls")
    rows = TilePlace(width=8, offsets=(1, 5))
    assert "output columns all, rows 1, 5 of every 8, in" in kernel(tuple(range(64)), 64, row_tile=rows).in_words
    assert "0, 2, 4, 6, 8, 10, 12, 14, ... of 64" in kernel(tuple(range(0, 64, 2)), 64).in_words


def test_one_bad_lane_is_one_line_of_the_verdict_and_the_script_shows_it(random_model, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "cpu"])
    with bad_lanes("mm", (5,), 16):
        result = aqnpipe.diagnose(random_model(), method="exact", prompt_ids=[IDS], reproducer=tmp_path)
        assert result.verdict == "fault"
        assert len(result.faults) >= 7  # q, k, v, o, gate, up and down are evidence
        (found,) = result.kernels
        assert found.column_tile == TilePlace(width=16, offsets=(5,))
        first, second = result.reason.split("; ")[:2]
        assert first == found.in_words
        assert second.startswith("seen at ")
        sites = {"o_proj", "down_proj", "q_proj.input_gradient", "q_proj.weight_gradient", "lm_head"}
        assert sites <= set(second.removeprefix("seen at ").split(", "))
        script = (tmp_path / "reproduce.py").read_text()
        names = {"__file__": str(tmp_path / "reproduce.py")}
        with pytest.raises(SystemExit) as left:
            exec(compile(script, "reproduce.py", "exec"), names)
    assert left.value.code == 3
    kept = load_file(tmp_path / "operands.safetensors")
    wrong = (kept["shown"].double() - kept["exact"]).abs() > kept["allowed"]
    assert {int(column) % 16 for column in wrong.any(0).nonzero()} == {5}
    # Without the fault, and without this package, the script says that the device is right.
    done = subprocess.run(
        [sys.executable, "-I", str(tmp_path / "reproduce.py"), "cpu"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "cpu: 0 of 100 calls are wrong, in output columns []\n")
    # A device that is not there does not count as one that errs, which ends with another code than Python's for errors.
    absent = subprocess.run(
        [sys.executable, "-I", str(tmp_path / "reproduce.py"), "nothing:0"], capture_output=True, check=False
    )
    assert absent.returncode == 1
    assert "aqnpipe" not in script.split('"""')[2]
    assert len(script.split('"""')[2].strip().splitlines()) <= 20


def test_a_simulated_fault_and_a_hook_are_the_kernel_that_they_stand_behind(random_model, tmp_path):
    fault = "type=bias,layer=1,magnitude=0.5,site=o_proj,sparsity=0.02"
    result = aqnpipe.diagnose(random_model(), method="exact", prompt_ids=[IDS], faults=[fault], reproducer=tmp_path)
    assert {found.operator for found in result.kernels} == {"mm"}
    assert {found.columns for found in result.kernels} == {result.faults[0].channels}
    script = (tmp_path / "reproduce.py").read_text()
    assert "The fault was simulated by aqnpipe" in script


def test_a_fault_outside_the_kernels_names_none(random_model, tmp_path):
    fault = "type=bias,layer=1,magnitude=0.5"
    result = aqnpipe.diagnose(random_model(), method="exact", prompt_ids=[IDS], faults=[fault], reproducer=tmp_path)
    assert result.verdict == "fault"
    assert result.kernels == ()
    assert result.reason.startswith("layer 1, layer_output: bias")
    assert list(tmp_path.iterdir()) == []
