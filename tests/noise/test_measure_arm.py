import math
import re
from pathlib import Path

import pytest
import torch
from typed import typed

from aqnpipe.artifacts.files import read_json
from aqnpipe.config.arm import Arm
from aqnpipe.config.noise import (
    AdaptiveNoise,
    CacheNoise,
    EpochAwareRanges,
    EpochRange,
    ModuleNoise,
    OperatorNoise,
    RelativeGaussian,
)
from aqnpipe.config.study import read_arms
from aqnpipe.errors import ConfigError
from aqnpipe.noise.measure_arm import measure_arm
from aqnpipe.noise.receipts.receipt import Receipt

E5 = OperatorNoise(error=RelativeGaussian(scale=0.05))
AQN = AdaptiveNoise(schedule=EpochAwareRanges(ranges=(EpochRange(sigma_start=0.05, sigma_end=0.01),)))


def test_an_arm_whose_noise_is_measured_as_requested_passes(model):
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    receipt = measure_arm(model, Arm(description="", operator_noise=E5, aqn=AQN), prompt_tokens=32).check()
    assert {record.phase for record in receipt.phases if record.calls} == set(E5.phases)
    assert {record.phase: record.noised_share for record in receipt.phases}["rollout"] == 1.0
    assert receipt.weight_syncs[0].sigma == 0.05
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())


def test_norm_hooks_reach_hardly_any_operation(model):
    noise = ModuleNoise(modules="minimal", error=RelativeGaussian(scale=0.05))
    receipt = measure_arm(model, Arm(description="", module_noise=noise)).check()
    assert len(receipt.phases[0].modules) == 7
    assert receipt.phases[0].noised_share == 0.0


@pytest.mark.parametrize("number_format", ["fp8", "int8"])
def test_a_cache_in_every_forward_phase(model, number_format):
    phases = ("rollout", "reference", "validation", "actor_forward")
    noise = CacheNoise(format=number_format, phases=phases)
    receipt = measure_arm(model, Arm(description="", kv_cache=noise, operator_noise=E5)).check()
    assert {cell.phase: cell.calls for cell in receipt.cache_cells} == dict.fromkeys(phases, 1) | {"rollout": 2}


def test_attention_of_another_kernel_than_requested_is_reported(make_model):
    model = make_model(attn_implementation="sdpa")
    problems = measure_arm(model, Arm(description="", operator_noise=E5)).problems()
    assert any("no product of attention was noised in layers [0, 1, 2]" in problem for problem in problems)


HIDDEN = "targets: hidden_states, "
BY_HAND = "base_sigma: 0.05, layer_sigmas: {1: 0.075, 3: 0.1}"


@pytest.mark.parametrize(
    ("aqn", "expected"),
    {
        "sigmas by hand": (f"sigmas: {{{BY_HAND}}}", [1, 1.5, 1, 2, 1, 1, 1]),
        "sigmas from a file": ("sigmas: by_hand.yaml", [1, 1.5, 1, 2, 1, 1, 1]),
        "layers": ("sigmas: by_hand.yaml, target_layers: [1, 2]", [None, 1.5, 1, None, None, None, None]),
        "norms": ("exclude: ['model.norm', '*.2.*']", [1, 1, None, 1, 1, 1, None]),
        "training": (f"{HIDDEN}target_layers: [4], actor_forward: true", [None] * 4 + [1, None]),
    }.values(),
)
def test_the_command_applies_aqn_in_the_layers_that_the_arm_names(tmp_path, aqn, expected):
    (tmp_path / "by_hand.yaml").write_text(f"aqn: {{{BY_HAND}}}\n")
    arms = tmp_path / "arms.yaml"
    settings = f"{{schedule: {{kind: constant, sigma: 0.05}}, {aqn}}}"
    arms.write_text(f"arms:\n  guided:\n    description: x\n    aqn: {settings}\n")
    result = run("--arms", str(arms), "--arm", "guided")
    assert result.exit_code == 0, result.output
    phases = ("rollout", "actor_forward") if "actor_forward" in aqn else ("rollout",)
    factors = r"AQN in (\w+) by layer, measured, times the scheduled sigma: ((?:\w+: [\d.]+,? )+)"
    found = re.findall(factors, " ".join(result.output.split()))
    assert tuple(phase for phase, _ in found) == phases
    for _, line in found:
        measured = dict(re.findall(r"(\w+): (\d+\.\d+)", line))
        layers = [*map(str, range(6)), "outside"][: len(expected)]
        wanted = {layer: factor for layer, factor in zip(layers, expected, strict=True) if factor is not None}
        assert {layer: float(value) for layer, value in measured.items()} == pytest.approx(wanted, rel=0.25)


@pytest.mark.parametrize(
    ("aqn", "message"),
    [("target_layers: [6]", "aqn.target_layers: found layers [6]"), ("exclude: ['*.norms']", "aqn.exclude: found")],
)
def test_layers_and_norms_that_the_model_does_not_have_are_refused(tmp_path, aqn, message):
    arms = tmp_path / "arms.yaml"
    settings = f"{{schedule: {{kind: constant, sigma: 0.05}}, {aqn}}}"
    arms.write_text(f"arms:\n  guided:\n    description: x\n    aqn: {settings}\n")
    result = run("--arms", str(arms), "--arm", "guided")
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def run(*arguments):
    return typed("measure-noise", "tiny", *arguments)


def test_the_command_shows_the_error_of_a_cache():
    result = run("--arm", "kv_int8_rollouts")
    assert result.exit_code == 0, result.output
    (line,) = (line for line in result.output.splitlines() if "kv_cache" in line)
    # Six layers, two passes: 1/127 of the largest channel is a step, of which a rounding moves by 1/sqrt(12).
    assert line.split()[:4] == ["rollout", "kv_cache", "0-5", "int8"]
    assert float(line.split()[-1]) == pytest.approx(2.5 / 127 / 12**0.5, rel=0.3)


def test_the_command_shows_what_was_reached(tmp_path):
    result = run("--arm", "E5b", "--json", str(tmp_path / "receipt.json"))
    assert result.exit_code == 0, result.output
    receipt = read_json(tmp_path / "receipt.json", Receipt)
    scale, elements = receipt.measured_scale("rollout")
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    (row,) = [line for line in lines if line.startswith("rollout 0.05 ")]
    off, error = 100 * (scale / 0.05 - 1), 100 / math.sqrt(2 * elements)
    assert row.startswith(f"rollout 0.05 {scale:.4g} {off:+.2f} {error:.2f} {elements:,} ".replace("-", "−"))
    assert " 100.0 " in row
    assert "restored bit for bit" in " ".join(result.output.split())
    assert "every phase has what was requested" in result.output
    receipt = read_json(tmp_path / "receipt.json", Receipt)
    assert receipt.problems() == []


@pytest.mark.parametrize(
    ("arm", "advice"), [("E99", "a known name (did you mean E9?)"), ("something", "one of E10_bias, ")]
)
def test_an_unknown_arm_names_the_nearest_or_those_that_there_are(arm, advice):
    result = run("--arm", arm)
    assert result.exit_code == 1
    assert f"--arm: found {arm!r}, expected {advice}" in str(result.exception)


def test_the_noise_of_a_machine_that_a_study_measures_is_refused():
    result = run("--arm", "E_measured_1x")
    assert result.exit_code == 1
    assert "E_measured_1x has the noise of machine measured, which the jobs of a study measure" in str(result.exception)


def without_sizes(settings):
    """Settings without their numbers: what is noised and how, not how much."""
    if isinstance(settings, dict):
        return tuple((name, "some" if name == "layers" else without_sizes(value)) for name, value in settings.items())
    if isinstance(settings, list | tuple):
        return tuple(without_sizes(value) for value in settings)
    return None if isinstance(settings, float) else settings


def shipped_arms_by_mechanism():
    """The first arm of every kind of noise that the shipped arms have; arms of one kind differ in sizes and schedules.

    `measure_arm` replaces every schedule of AQN by the largest sigma, so only where its noise is matters.
    """
    arms = {}
    for name, arm in read_arms(Path("config/arms.yaml")).items():
        if arm.model == "base" and not name.startswith("E_measured"):
            noises = (arm.operator_noise, arm.module_noise)
            kinds = (without_sizes(noise.model_dump(exclude_none=True)) if noise else None for noise in noises)
            places = (arm.aqn.targets, arm.aqn.actor_forward, arm.aqn.target_layers is None) if arm.aqn else None
            arms.setdefault((*kinds, places), (name, arm))
    return dict(arms.values())


@pytest.mark.parametrize(("name", "arm"), shipped_arms_by_mechanism().items())
def test_every_kind_of_shipped_arm_has_the_noise_it_requests(name, arm, make_model):
    named = (arm.aqn.target_layers if arm.aqn else None) or ()
    num_layers = max([6, *(layer + 1 for layer in named)])
    measure_arm(make_model(intermediate_size=64, num_layers=num_layers), arm).check()


def test_the_sentence_on_attention_under_fake_quantization_says_that_it_is_exact(tmp_path):
    arms = tmp_path / "arms.yaml"
    error = "{kind: fake_quantization, format: mxfp4}"
    noise = f"{{error: {error}, phases: [rollout, actor_forward, reference]}}"
    arms.write_text(f"arms:\n  fq:\n    description: x\n    operator_noise: {noise}\n")
    result = run("--arms", str(arms), "--arm", "fq")
    assert result.exit_code == 0
    assert "attention: its products have no weight and are exact" in result.output
    assert "with noise on both products" not in result.output
    assert "100.0%" not in result.output
