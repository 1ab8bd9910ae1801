"""The rollout backend, the distance between sampler and trained policy, and the importance sampling correction."""

import pytest
import torch
from tiny_training import AQN, run, training_spec

import aqnpipe.generation.backend_choice as choice
import aqnpipe.training.rollout_backend as rollouts
from aqnpipe.artifacts.files import read_json, read_table
from aqnpipe.artifacts.runs import RunRecord, TrainingMetrics
from aqnpipe.config.run import TrainingSpec
from aqnpipe.device import Device
from aqnpipe.errors import ConfigError
from aqnpipe.noise.receipts.receipt import Receipt
from aqnpipe.training.rollout_backend import describe_rollouts
from aqnpipe.training.run import grpo_arguments
from aqnpipe.training.sampler import SamplerDistance

pytestmark = pytest.mark.usefixtures("rewards_that_teach")

FUSED = {"attention": "fused", "error": {"kind": "relative_gaussian", "scale": 0.05}}
FIXED = {"attention": "decomposed", "error": {"kind": "relative_gaussian", "scale": 0.05, "redraw": "never"}}


def changed(spec, **changes) -> TrainingSpec:
    data = spec.model_dump()
    arm = data["arm"] | changes.pop("arm", {})
    return TrainingSpec.model_validate(data | changes | {"arm": arm})


@pytest.fixture
def gpu_with_vllm(monkeypatch):
    monkeypatch.setattr(rollouts, "resolve_device", lambda _: Device("cuda", 1, ("some GPU",)))
    monkeypatch.setattr(rollouts, "check_vllm", lambda _: None)
    monkeypatch.setattr(rollouts, "vllm_version", lambda: "vllm 0.32.0")
    monkeypatch.setattr(rollouts, "nvidia_capability", lambda kind: (9, 0))
    monkeypatch.setattr(choice, "is_vllm_installed", lambda: True)


def metrics(folder):
    return read_table(folder / "metrics.parquet", TrainingMetrics)


def test_the_distance_of_two_policies_by_hand():
    """Three tokens with p(actor)/p(sampler) of 2, 1/2 and 1; the mask excludes a fourth."""
    sampler = torch.tensor([[-1.0, -2.0], [-3.0, -9.0]])
    actor = sampler + torch.tensor([[2.0, 0.5], [1.0, 7.0]]).log()
    distance = SamplerDistance()
    distance.add(sampler[:1], actor[:1], torch.tensor([[1, 1]]))
    distance.add(sampler[1:], actor[1:], torch.tensor([[1, 0]]))
    found = distance.settle()
    ln2 = 0.6931471805599453
    assert found["sampler/logp_difference_mean"] == pytest.approx(2 * ln2 / 3, rel=1e-6)
    assert found["sampler/logp_difference_max"] == pytest.approx(ln2, rel=1e-6)
    assert found["sampler/kl"] == pytest.approx(((2 - 1 - ln2) + (0.5 - 1 + ln2)) / 3, rel=1e-6)
    distance.add(sampler[:1], sampler[:1], torch.tensor([[1, 1]]))
    assert set(distance.settle().values()) == {0.0}


def test_without_noise_sampler_and_actor_are_one_policy_and_with_aqn_they_are_not(inputs, tmp_path):
    clean, noisy = (metrics(run(training_spec(aqn=aqn), inputs, tmp_path / str(bool(aqn)))) for aqn in (None, AQN))
    assert clean["logp_difference_max"].max() < 1e-4
    assert clean["sampler_kl"].max() < 1e-8
    assert noisy["logp_difference_mean"].min() > 10 * clean["logp_difference_max"].max()
    assert noisy["sampler_kl"].min() > 1e-7
    assert clean["importance_ratio_mean"].null_count() == len(clean)


def test_the_correction_weighs_by_the_distance(inputs, tmp_path):
    """Without noise ratios near 1 do not change the gradient; ratios under AQN do."""
    found = {}
    for name, aqn in (("clean", None), ("noisy", AQN)):
        for mode in (None, "token_truncate"):
            arm = {"importance_sampling": {"mode": mode, "clip_max": 2.0} if mode else None}
            spec = changed(training_spec(aqn=aqn, num_steps=1), arm=arm)
            found[name, mode is not None] = metrics(run(spec, inputs, tmp_path / f"{name}{mode}")).row(0, named=True)
    assert found["clean", True]["importance_ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert found["noisy", True]["importance_ratio_mean"] != pytest.approx(1, abs=1e-4)
    assert found["clean", True]["grad_norm"] == pytest.approx(found["clean", False]["grad_norm"], rel=1e-5)
    assert found["noisy", True]["grad_norm"] != pytest.approx(found["noisy", False]["grad_norm"], rel=1e-4)


def test_several_steps_share_the_distance_of_their_rollout(inputs, tmp_path):
    """The correction works with mini-batches, and the distance is measured with the rollout's own weights."""
    spec = changed(
        training_spec(prompts_per_step=2, micro_batch_size=2, steps_per_rollout=2, checkpoint_every=None),
        arm={"importance_sampling": {"mode": "token_truncate"}},
    )
    table = metrics(run(spec, inputs, tmp_path / "run"))
    assert table["logp_difference_mean"].n_unique() == table["importance_ratio_mean"].n_unique() == 1


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ({"clip_min": 4.0}, r"clip_min 4 must be below clip_max 3"),
        ({"clip_max": None}, "mode sequence_mask needs a clip_max, a clip_min, or both"),
        ({"mode": "sequence"}, "token_truncate"),
        ({"cap": 2.0}, "Extra inputs are not permitted"),
    ],
)
def test_a_correction_that_makes_no_sense_is_refused(requested, message):
    with pytest.raises(ValueError, match=message):
        changed(training_spec(), arm={"importance_sampling": requested})


def test_the_correction_reaches_trl(tmp_path):
    requested = {"mode": "token_mask", "clip_max": 2.5, "clip_min": 0.5}
    found = grpo_arguments(changed(training_spec(), arm={"importance_sampling": requested}), tmp_path)
    assert found.vllm_importance_sampling_correction is True
    assert found.vllm_importance_sampling_mode == "token_mask"
    assert (found.vllm_importance_sampling_clip_max, found.vllm_importance_sampling_clip_min) == (2.5, 0.5)
    assert found.use_vllm is False
    assert grpo_arguments(training_spec(), tmp_path).vllm_importance_sampling_correction is False


def test_the_record_names_the_rollout_backend(inputs, tmp_path):
    record = read_json(run(training_spec(num_steps=1), inputs, tmp_path / "run") / "run.json", RunRecord)
    assert record.generation == {"backend": "transformers"}


@pytest.mark.parametrize(
    ("arm", "message"),
    [
        ({"operator_noise": FIXED}, "operator_noise.error is relative_gaussian with redraw: never"),
        ({"operator_noise": {**FUSED, "attention": "decomposed"}}, "operator_noise.attention is decomposed"),
    ],
)
def test_what_vllm_cannot_roll_out_is_refused_or_left_to_transformers(monkeypatch, arm, message):
    monkeypatch.setattr(rollouts, "resolve_device", lambda _: Device("cuda", 2, ("some GPU",)))
    monkeypatch.setattr(choice, "is_vllm_installed", lambda: True)
    spec = changed(training_spec(), arm=arm, attention="sdpa")
    assert describe_rollouts(spec) == {"backend": "transformers"}
    with pytest.raises(ConfigError, match=f"arm test: vLLM cannot make its rollouts: {message}") as refused:
        describe_rollouts(changed(spec, generation={"backend": "vllm"}))
    assert "\n" not in str(refused.value)
    without = {"backend": "vllm", "rollout_backend": "transformers"}
    assert describe_rollouts(changed(spec, generation=without)) == {"backend": "transformers"}


@pytest.mark.parametrize("cache", [{"format": "fp8"}, {"format": "int8", "phases": ["rollout", "actor_forward"]}])
def test_a_cache_in_another_format_is_proven_in_its_phases_alone(inputs, tmp_path, cache):
    folder = run(changed(training_spec(), arm={"kv_cache": cache}), inputs, tmp_path / "run")
    receipt = read_json(folder / "receipt.json", Receipt).check()
    phases = {"rollout", *cache.get("phases", [])}
    assert {row.phase for row in receipt.cache_cells if row.calls and row.squares} == phases
    assert all(not row.wrong and not row.escaped for row in receipt.cache_cells)
    # With such keys and values in the rollout alone, sampler and actor are two policies; in both they are one.
    found = metrics(folder)["logp_difference_max"]
    assert found.min() > 1e-3 if phases == {"rollout"} else found.max() < 1e-3


def test_noise_outside_the_rollout_does_not_exclude_vllm(gpu_with_vllm):
    noise = {**FUSED, "attention": "decomposed", "phases": ["actor_forward", "backward"]}
    spec = changed(training_spec(aqn=AQN), arm={"operator_noise": noise}, attention="sdpa")
    described = {"backend": "vllm", "vllm": "vllm 0.32.0", "enforce_eager": True}
    asked = changed(spec, generation={"rollout_batch_invariance": True})
    assert describe_rollouts(asked) == described | {"batch_invariant": True}


def test_by_default_the_engine_of_an_arm_does_not_depend_on_its_noise(gpu_with_vllm):
    arms = ({}, {"operator_noise": FUSED})
    specs = [changed(training_spec(), arm=arm, attention="sdpa", generation={"backend": "vllm"}) for arm in arms]
    assert describe_rollouts(specs[0]) == describe_rollouts(specs[1])
    asked = [changed(spec, generation={"backend": "vllm", "rollout_batch_invariance": True}) for spec in specs]
    assert describe_rollouts(asked[0]) != describe_rollouts(asked[1])


def test_graphs_are_in_arms_without_noise_in_rollouts_and_the_record_says_which(gpu_with_vllm, monkeypatch):
    opened = []
    monkeypatch.setattr(rollouts, "open_engine", lambda *_, **named: opened.append(named["cuda_graphs"]))
    monkeypatch.setattr(rollouts, "tokenize_prompts", lambda *_: [[1]])
    monkeypatch.setattr(rollouts, "rank_and_size", lambda: (0, 1))
    found = {}
    for arm in ({}, {"operator_noise": FUSED}, {"aqn": AQN}):
        for asked in (False, True):
            generation = {"backend": "vllm", "cuda_graphs": asked}
            spec = changed(training_spec(), arm=arm, attention="sdpa", generation=generation)
            described = describe_rollouts(spec)
            found["".join(arm), asked] = described["enforce_eager"], described.get("why_enforce_eager")
            engine = rollouts.open_rollouts(spec, None, ["?"], None)
            assert engine._cuda_graphs is opened[-1] is not described["enforce_eager"]
    why = "the rollouts have noise or faults, which run in Python"
    assert found == {
        **{(arm, False): (True, None) for arm in ("", "operator_noise", "aqn")},
        ("", True): (False, None),
        **{(arm, True): (True, why) for arm in ("operator_noise", "aqn")},
    }


@pytest.mark.parametrize(
    ("arm", "generation", "reason"),
    [
        ({}, {}, "generation.rollout_batch_invariance is false"),
        ({"operator_noise": FUSED}, {"rollout_batch_invariance": True}, "the arm has operator noise in rollouts"),
    ],
)
def test_the_record_says_why_the_batch_invariant_mode_is_off(gpu_with_vllm, arm, generation, reason):
    spec = changed(training_spec(), arm=arm, attention="sdpa", generation={"backend": "vllm", **generation})
    described = describe_rollouts(spec)
    assert described["batch_invariant"] is False
    assert str(described["why_not_batch_invariant"]).startswith(reason)
