"""The detection benchmark: its faults change the model and nothing else, healthy arithmetic stays healthy, the page is
current."""

from collections import Counter
from dataclasses import replace

import detection
import polars as pl
import pytest
import torch
import torch.nn.functional as F
from machine_faults.bits import flip_bit, keep_mantissa, mantissa_bit, ulps
from machine_faults.cases import Case, fault_cases, healthy_cases, run_case, run_effect
from machine_faults.catalogue import FAULTS
from machine_faults.device import Behaviour, emulated
from machine_faults.healthy import DEVICES
from machine_faults.models import ARCHITECTURES, DTYPES, subject
from machine_faults.observe import OBSERVABLE, clean, effect, outputs
from machine_faults.page import page


def fault_case(name, architecture, dtype="float32", layer=2):
    return Case(name, FAULTS[name].group, architecture, dtype, layer)


def effect_of(name, architecture, dtype="float32", layer=2):
    fault = FAULTS[name]
    model = subject(architecture, dtype, fault.attention)
    clean(architecture, dtype, fault.attention, fault.backward)
    with fault.put_in(model, ARCHITECTURES[architecture], layer):
        found = outputs(model, gradients=fault.backward)
    return effect(architecture, dtype, fault.attention, found, gradients=fault.backward)


def test_the_benchmark_has_the_size_that_was_asked_for():
    cases = list(fault_cases(1))
    assert len(FAULTS) >= 150
    assert {case.architecture for case in cases} == set(ARCHITECTURES)
    assert {case.dtype for case in cases} == set(DTYPES)
    assert len(ARCHITECTURES) >= 12
    assert len(list(healthy_cases(9))) >= 300
    assert min(Counter(fault.group for fault in FAULTS.values()).values()) >= 7
    every = [*fault_cases(3), *healthy_cases(9)]
    assert len({tuple(case.identity.values()) for case in every}) == len(every)


def test_every_fault_fits_some_model():
    assert {case.name for case in fault_cases(1)} == set(FAULTS)


def test_what_runs_outside_of_modules_or_in_float64_is_the_host():
    model = subject("qwen2", "float32")
    x = torch.ones(2, 64)
    linear = model.model.layers[0].self_attn.q_proj
    clean_output = linear(x)
    double = torch.nn.Linear(64, 4).double()
    kept = double(x.double())
    zero = Behaviour(frozenset({"linear"}), lambda call: call.compute() * 0)
    with emulated(model, [zero]) as device:
        assert linear(x).abs().max() == 0
        assert F.linear(x, linear.weight, linear.bias).equal(clean_output)
        assert double(x.double()).equal(kept)
    assert device.changed_calls == 1
    assert linear(x).equal(clean_output)
    assert not any(hasattr(module, "_emulated_path") for module in model.modules())


def test_a_fault_stays_in_its_layer():
    model = subject("qwen2", "float32")
    ids = torch.arange(8)[None]
    healthy = model(ids, output_hidden_states=True).hidden_states
    with FAULTS["q: dead channel"].put_in(model, ARCHITECTURES["qwen2"], 2):
        faulty = model(ids, output_hidden_states=True).hidden_states
    assert [a.equal(b) for a, b in zip(healthy, faulty, strict=True)] == [True, True, True, False, False]


def test_stored_weights_are_restored():
    model = subject("llama", "float32")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fault = FAULTS["down: two rows swapped"]
    with fault.put_in(model, ARCHITECTURES["llama"], 2):
        changed = [name for name, value in model.state_dict().items() if not value.equal(before[name])]
    assert changed == ["model.layers.2.mlp.down_proj.weight"]
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("q: dead channel", "qwen2"),
        ("act: gradient of silu 3 % off", "stablelm"),
        *(
            pytest.param(*others, marks=pytest.mark.slow)
            for others in (
                ("norm1: rsqrt 1 % off for arguments in [0.5, 1.5)", "llama"),
                ("softmax: the sum misses a key", "gpt_neox"),
                ("cache: every 8th position is zero", "gemma2"),
                ("expert 1: dead channel of down", "mixtral"),
                ("sdpa: the next token is visible", "phi3"),
                ("lm_head: dead channel", "olmo2"),
            )
        ),
    ],
)
def test_faults_change_the_logits(name, architecture):
    assert effect_of(name, architecture) > OBSERVABLE


def test_a_device_without_a_fault_changes_no_bit():
    nothing = replace(FAULTS["q: dead channel"], changes=())
    model = subject("qwen2", "bfloat16")
    reference = clean("qwen2", "bfloat16", "eager", False)
    with nothing.put_in(model, ARCHITECTURES["qwen2"], 0):
        found = outputs(model)
    assert all(a.equal(b) for a, b in zip(reference, found, strict=True))
    assert effect("qwen2", "bfloat16", "eager", found) == 0


@pytest.mark.parametrize(
    "name",
    [
        "down: two channels swapped",
        pytest.param("q: dead channel", marks=pytest.mark.slow),
        pytest.param("o: sign of one channel inverted", marks=pytest.mark.slow),
    ],
)
def test_simple_faults_are_found_in_their_layer_and_operation(name):
    case = fault_case(name, "qwen2")
    row = run_case(case)
    assert row["verdict"] == "fault"
    assert row["layer_right"]
    assert row["operation_right"]
    assert row["elsewhere"] == 0
    assert row["restored"]
    assert run_effect(case)["observable"]


@pytest.mark.parametrize(
    "device",
    [
        "split-K of 4",
        pytest.param("this CPU", marks=pytest.mark.slow),
        pytest.param("functions off by 1 ulp", marks=pytest.mark.slow),
    ],
)
def test_healthy_arithmetic_is_called_healthy(device):
    row = run_case(Case(device, "healthy", "qwen2", "float32", 0))
    assert row["verdict"] == "healthy"
    assert row["forwards"] <= 25


def test_the_running_maximum_of_flash_attention_has_no_gradient():
    """Differentiated, it collected the roundings of its block, and the gradient of its key was off by 18 %."""
    case = Case("flash attention, blocks of 64, fast functions", "healthy", "qwen3", "bfloat16", 0, seed=1)
    assert run_case(case)["verdict"] == "healthy"


def test_healthy_arithmetic_differs_from_this_machine_by_rounding_alone():
    reference = clean("qwen2", "float32", "eager", False)
    model = subject("qwen2", "float32")
    for name in (
        "split-K of 5, uneven",
        "atomics of 8",
        "stream-K, tiles of 8",
        "pairwise sums",
        "functions off by 2 ulp",
    ):
        with DEVICES[name].put_in(model):
            found = outputs(model)
        assert 0 < max(float((a - b).abs().max()) for a, b in zip(reference, found, strict=True)) < 1e-4, name


@pytest.mark.slow
def test_a_crash_of_the_diagnosis_is_a_row_and_rows_are_not_run_again(tmp_path):
    unknown = Case("no such fault", "linears", "qwen2", "float32", 0)
    path = tmp_path / "rows.csv"
    for _ in range(2):
        detection.run_missing(path, detection.FIELDS["faults"], [unknown], jobs=1)
    (row,) = pl.read_csv(path).to_dicts()
    assert row["verdict"] == "crash"
    assert "KeyError" in row["reported"]


def test_mantissa_bits_are_counted_from_the_top():
    x = torch.tensor([1.75, -1.75, 1.25])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert mantissa_bit(x.to(dtype), 1, 0).tolist() == [1.25, -1.25, 1.25]
        assert mantissa_bit(x.to(dtype), 2, 0).tolist() == [1.5, -1.5, 1.0]


def test_rounding_to_tf32_is_to_nearest_even():
    one = 1.0
    step = 2.0**-10
    x = torch.tensor([one + step / 2, one + 1.5 * step, one + 0.51 * step, -(one + 0.51 * step)])
    assert keep_mantissa(x, 10).tolist() == [one, one + 2 * step, one + step, -(one + step)]


def test_fast_functions_are_off_by_their_ulps():
    x = torch.rand(4096) + 1
    off = (ulps(x, 2).view(torch.int32) - x.view(torch.int32)).unique().tolist()
    assert off == [-2, -1, 0, 1, 2]
    assert flip_bit(flip_bit(x, 7), 7).equal(x)


def test_the_page_is_that_of_the_committed_tables():
    tables = (detection.read(detection.FOLDER / f"detection_{kind}.csv") for kind in detection.FIELDS)
    assert page(*tables) == (detection.FOLDER / "detection.md").read_text()


def test_the_page_counts_permanent_observable_faults_alone():
    keys = {"group": "linears", "architecture": "qwen2", "dtype": "float32", "seed": 0, "layer": 1}
    names = ["q: dead channel", "down: dead channel", "k: sign of one channel lost", "o: NaN in one call of 5"]
    effects = pl.DataFrame(
        [
            {**keys, "name": name, "permanent": name[:2] != "o:", "effect": 9.0, "observable": name[:2] != "k:"}
            for name in names
        ]
    )
    answer = {"verdict": "fault", "layer_right": True, "device_wide": False, "elsewhere": 0, "forwards": 11.0}
    answer |= {"seconds": 1.0, "restored": True, "commit": "abc"}
    faults = pl.DataFrame([{**keys, **answer, "name": name, "operation_right": name[:2] == "q:"} for name in names])
    healthy = pl.DataFrame(
        [
            {**keys, **answer, "group": "healthy", "name": "this CPU", "verdict": verdict, "emulated": False}
            for verdict in ("healthy", "fault", "abstain", "healthy")
        ]
    )
    text = page(effects, faults, healthy)
    assert "| permanent observable faults found (layer and operation) | 1 of 2 (50.0%) |" in text
    assert "| healthy runs called faulty | 1 of 4" in text
    assert "| healthy runs without a verdict | 1 of 4 (25.0%) |" in text
    assert "1 runs with permanent faults change no logits" in text
    assert "| linears | down: dead channel | 1 of 1 | qwen2 float32 | another operation |" in text


@pytest.mark.parametrize(
    "change", [lambda x: mantissa_bit(x, 1, 0), lambda x: keep_mantissa(x, 3), lambda x: ulps(x, 2)]
)
def test_changed_bits_pass_gradients_on(change):
    x = torch.tensor([1.75, -1.3, 0.4], requires_grad=True)
    y = change(x)
    assert not y.equal(x)
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [1.0, 1.0, 1.0]
