"""Rollouts by vLLM against rollouts by the policy itself, on a CPU: weights, noise, faults, log-probabilities."""

import copy

import pytest
import torch
from tiny_tokenizer import build_tokenizer

from aqnpipe.config.model import builtin_folder
from aqnpipe.config.noise import AdaptiveNoise, Fault, NoiseSpec, OperatorNoise, RelativeGaussian
from aqnpipe.errors import ModelError, ReceiptError
from aqnpipe.generation.backend import Sampling
from aqnpipe.generation.rollout_engines import Rollout, TransformersRolloutEngine, VllmRolloutEngine
from aqnpipe.generation.transformers_backend import TransformersBackend
from aqnpipe.generation.vllm.plugin import is_vllm_installed
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.models.adapters import MergedForEngine
from aqnpipe.models.layout import norms_sha256, rms_norms
from aqnpipe.models.loading import load_model
from aqnpipe.noise.aqn import noised_rollout, target_factors
from aqnpipe.noise.injection.faults import ActiveFaults
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

pytestmark = pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed here: make test-vllm")

QUESTIONS = (
    "Tom has 5 apples . He buys 7 more . How many apples now ?",
    "Ann has 12 pens . She gives 3 pens to Bob . How many pens does Ann have ?",
    "What is 1 plus 1 ?",
    "Ben has 4 boxes with 6 pens each . How many pens are there ?",
)
GREEDY = Sampling(max_response_tokens=24)
DRAWN = Sampling(max_response_tokens=24, temperature=1.2, seed=11, log_probabilities=True)
KEY = NoiseKey(seed=3, step=2)
AQN = AdaptiveNoise(schedule={"kind": "linear", "sigma_start": 0.05, "sigma_end": 0.05})
TOKENIZER = build_tokenizer()
PROMPTS = [TOKENIZER(question)["input_ids"] for question in QUESTIONS]


@pytest.fixture(scope="module")
def start():
    from aqnpipe.generation.vllm.engine import VllmEngine

    def start(folder, **changes):
        settings = {"dtype": "float32", "max_tokens": 128, "batch_size": 4, "device": "cpu"}
        return VllmEngine(folder, end_token=TOKENIZER.eos_token_id, **(settings | changes))

    return start


@pytest.fixture(scope="module")
def engine(start):
    with start(builtin_folder("tiny")) as engine:
        yield engine


@pytest.fixture
def rollouts(engine):
    return VllmRolloutEngine(engine, weights=MergedForEngine(torch.float32), dtype=torch.float32)


@pytest.fixture
def policy():
    """The built-in model with every weight changed, as after some optimiser steps."""
    model = load_model(builtin_folder("tiny"), dtype="float32", attention="sdpa")
    return moved(model)


def moved(model, seed=0, by=0.05):
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for weight in model.parameters():
            weight.add_(weight.std() * by * torch.randn_like(weight) if weight.std() > 0 else 0.01)
    return model


CLEAN = NoiseSpec()
WITH_AQN = NoiseSpec(aqn=AQN)


def recorder(model, spec=CLEAN, **changes):
    made = ReceiptRecorder(
        spec,
        expected_phases=("rollout",),
        num_layers=len(model.model.layers),
        num_norms=len(rms_norms(model)),
        norms_watched=True,
        **changes,
    )
    made.note_clean_norms(model)
    return made


def rollout(model, spec=CLEAN, sigma=0.0, sampling=DRAWN, **changes):
    settings = {"faults": ActiveFaults.of(spec.faults), "key": KEY, "factors": target_factors(model, AQN, None)}
    return Rollout(prompts=PROMPTS, sampling=sampling, spec=spec, sigma=sigma, **(settings | changes))


def log_probabilities(model, completion, prompt):
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1] / DRAWN.temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]


def assert_rollout_engine(model, completions):
    """The sampler's log-probabilities equal those of `model`, except for rounding."""
    for completion, prompt in zip(completions, PROMPTS, strict=True):
        expected = log_probabilities(model, completion, prompt)
        torch.testing.assert_close(torch.tensor(completion.log_probabilities), expected, atol=2e-4, rtol=0)


def test_after_a_sync_the_engine_computes_what_the_policy_does(engine, rollouts, policy):
    """Tied embeddings; the second sync replaces the first, and no cache entry of earlier prompts is used."""
    before = TransformersBackend(policy, TOKENIZER).generate(PROMPTS, GREEDY)
    recorded = recorder(policy)
    assert_rollout_engine(policy, rollouts.roll_out(policy, recorded, rollout(policy)))
    assert engine.generate(PROMPTS, GREEDY) == before
    moved(policy, seed=1, by=0.3)
    recorded.note_clean_norms(policy)
    second = rollout(policy, key=NoiseKey(seed=3, step=3))
    assert_rollout_engine(policy, rollouts.roll_out(policy, recorded, second))
    after = TransformersBackend(policy, TOKENIZER).generate(PROMPTS, GREEDY)
    assert engine.generate(PROMPTS, GREEDY) == after != before
    (record,) = recorded.receipt().check().phases
    assert (record.phase, record.norms_checked, record.norms_noised) == ("rollout", 2, 0)


def test_draws_are_keyed_by_seed_and_row(rollouts, policy):
    first, again = (rollouts.roll_out(policy, recorder(policy), rollout(policy)) for _ in range(2))
    other = Sampling(max_response_tokens=24, temperature=1.2, seed=12, log_probabilities=True)
    assert first == again != rollouts.roll_out(policy, recorder(policy), rollout(policy, sampling=other))
    assert [completion.log_probabilities for completion in first] == [
        completion.log_probabilities for completion in again
    ]


def test_aqn_is_only_on_the_norms_of_the_engine(engine, rollouts, policy):
    """The same noise as in transformers: a policy with it has the same log-probabilities."""
    clean = norms_sha256(policy)
    recorded = recorder(policy, WITH_AQN)
    completions = rollouts.roll_out(policy, recorded, rollout(policy, WITH_AQN, sigma=0.05))
    assert norms_sha256(policy) == clean
    twin, spare = copy.deepcopy(policy), recorder(policy, WITH_AQN)
    factors = target_factors(twin, AQN, None)
    with noised_rollout(twin, AQN, factors, spare, sigma=0.05, seed=KEY.seed, step=KEY.step):
        assert_rollout_engine(twin, completions)
    (ours,), (theirs,) = recorded.receipt().weight_syncs, spare.receipt().weight_syncs
    assert ours == theirs
    assert (ours.sigma, ours.targets, ours.digests) == (0.05, 13, {clean})
    (record,) = recorded.receipt().phases
    assert (record.norms_checked, record.norms_noised) == (1, 1)
    assert engine.generate(PROMPTS, GREEDY) == TransformersBackend(policy, TOKENIZER).generate(PROMPTS, GREEDY)


def test_numbers_of_aqn_on_norms_are_recomputed_in_the_engine(rollouts, policy):
    recorded = recorder(policy, WITH_AQN)
    rollouts.roll_out(policy, recorded, rollout(policy, WITH_AQN, sigma=0.05))
    (record,) = recorded.receipt().phases
    assert not record.contradictions
    # 64 weights of each of the 13 norms, at least in the first forward of each kind.
    assert record.recomputed >= 2 * 13 * 64


def test_noise_and_faults_of_the_run_go_into_its_receipt(rollouts, policy):
    """Two rollouts with a sync between them: hooks survive it, and the threshold of the first call stays cached."""
    noise = OperatorNoise(error=RelativeGaussian(scale=0.2), phases=("rollout",), attention="fused")
    fault = Fault(type="saturation", layer=2, magnitude=0.5, threshold="cached")
    spec = NoiseSpec(operator_noise=noise, faults=(fault,))
    receipts = []
    for rollout_engine in (rollouts, TransformersRolloutEngine(TOKENIZER)):
        recorded, faults = recorder(policy, spec), ActiveFaults.of(spec.faults)
        for step in range(2):
            requested = rollout(policy, spec, faults=faults, key=NoiseKey(seed=3, step=step), factors={})
            rollout_engine.roll_out(policy, recorded, requested)
            if step == 0:
                (cached,) = faults.states()
                assert cached.threshold is not None
        receipt = recorded.receipt().check()
        assert faults.states() == (cached,)
        assert receipt.fault_cells[0].changed > 0
        receipts.append(receipt)
    (ours, n), (theirs, m) = (receipt.measured_scale("rollout") for receipt in receipts)
    assert abs(ours / 0.2 - 1) < 5 / (2 * n) ** 0.5
    assert abs(ours / theirs - 1) < 5 * (1 / (2 * n) + 1 / (2 * m)) ** 0.5


def test_noise_shows_in_the_log_probabilities(rollouts, policy):
    """Tokens drawn under noise have other log-probabilities under the clean policy; training records the mismatch."""
    noise = OperatorNoise(error=RelativeGaussian(scale=0.2), phases=("rollout",), attention="fused")
    spec = NoiseSpec(operator_noise=noise)
    completions = rollouts.roll_out(policy, recorder(policy, spec), rollout(policy, spec))
    differences = [
        (torch.tensor(completion.log_probabilities) - log_probabilities(policy, completion, prompt)).abs().mean()
        for completion, prompt in zip(completions, PROMPTS, strict=True)
    ]
    assert min(differences) > 0.01


def test_aqn_on_hidden_states_has_its_size_in_every_layer_and_combines_with_faults(rollouts, policy):
    """As with transformers: sigma per layer, no noise for factor 0, and a fault on the same sum."""
    requested = AQN.model_copy(update={"targets": "hidden_states"})
    layer_factors = {0: 1.0, 1: 0.0, 2: 2.0, 3: 1.0, 4: 1.0, 5: 1.0}
    factors = target_factors(policy, requested, layer_factors)
    fault = Fault(type="saturation", layer=2, magnitude=0.5, order="around_noise")
    spec = NoiseSpec(aqn=requested, faults=(fault,))
    drawn = []
    for rollout_engine in (rollouts, TransformersRolloutEngine(TOKENIZER)):
        recorded = recorder(policy, spec, num_steps=10, num_epochs=1, layer_factors=layer_factors)
        completions = rollout_engine.roll_out(policy, recorded, rollout(policy, spec, sigma=0.05, factors=factors))
        state = recorded.state()
        assert recorded.receipt().fault_cells[0].changed > 0
        drawn.append((state, completions))
    for state, completions in drawn:
        assert [record.contradictions for record in state.phases] == [{}]
        (sync,) = state.weight_syncs
        assert sync.wrong == 0 < sync.recomputed
        assert sync.digests == {norms_sha256(policy)}
        measured = {factor.layer: (factor.squares / factor.elements) ** 0.5 for factor in state.weight_cells}
        assert measured == pytest.approx({0: 1.0, 2: 2.0, 3: 1.0, 4: 1.0, 5: 1.0}, rel=0.05)
        differences = [
            (torch.tensor(completion.log_probabilities) - log_probabilities(policy, completion, prompt)).abs().mean()
            for completion, prompt in zip(completions, PROMPTS, strict=True)
        ]
        assert min(differences) > 0.001
    ours, theirs = (state.weight_syncs[0] for state, _ in drawn)
    assert (ours.sigma_requested, ours.targets) == (theirs.sigma_requested, theirs.targets)


@pytest.mark.parametrize(
    ("flaw", "message"),
    [
        ("another", r"1 of \d+ parameters of vLLM's Qwen2ForCausalLM differ .*: model.layers.3.mlp.up_proj.weight"),
        ("missing", "on one side only: model.layers.3.mlp.up_proj.weight"),
        ("unknown", "on one side only: lm_head.weight"),
    ],
)
def test_weights_that_are_not_those_sent_are_refused(engine, policy, monkeypatch, flaw, message):
    weights, name = dict(MergedForEngine(torch.float32)(policy)), "model.layers.3.mlp.up_proj.weight"
    if flaw == "missing":
        del weights[name]
    if flaw == "unknown":
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    if flaw == "another":
        rpc = engine._llm.collective_rpc

        def change(method, args):
            """Another bit in the buffer, as by a race or a broken device."""
            if method == "aqnpipe_load_weights":
                with open(args[0][0], "r+b") as buffer:
                    (start,) = [start for named, *_, start in args[1] if named == name]
                    buffer.seek(start)
                    byte = buffer.read(1)[0]
                    buffer.seek(start)
                    buffer.write(bytes([byte ^ 1]))
            return rpc(method, args=args)

        monkeypatch.setattr(engine._llm, "collective_rpc", change)
    with pytest.raises(ReceiptError, match=message):
        engine.load_weights(weights.items())


@pytest.mark.parametrize(
    ("dropped", "message"),
    [
        (
            "aqnpipe_load_weights",
            r"\d+ of \d+ parameters of vLLM's Qwen2ForCausalLM differ from those",
        ),
        ("aqnpipe_digests", "not every one of 1 vLLM workers says what it holds"),
        ("aqnpipe_begin_batch", "measured 0 forward passes, the responses took at least"),
        ("aqnpipe_end_pass", r"measurements of workers \[\], expected 1"),
    ],
)
def test_a_worker_that_skips_a_step_fails_the_rollout(engine, rollouts, policy, monkeypatch, dropped, message):
    rpc = engine._llm.collective_rpc
    reply = [] if dropped == "aqnpipe_end_pass" else [{}]
    monkeypatch.setattr(
        engine._llm, "collective_rpc", lambda method, **rest: reply if method == dropped else rpc(method, **rest)
    )
    recorded = recorder(moved(policy, seed=4), WITH_AQN)
    with pytest.raises(ReceiptError, match=message):
        rollouts.roll_out(policy, recorded, rollout(policy, WITH_AQN, sigma=0.05))


def test_untied_embeddings_and_norms_in_a_finer_dtype_than_the_engine(start, tmp_path, make_model):
    """A float32 policy in a bfloat16 engine: norms are not rounded, because AQN of 0.0005 would be lost."""
    make_model(
        num_layers=2,
        hidden_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=len(TOKENIZER),
        tie_word_embeddings=False,
        eos_token_id=TOKENIZER.eos_token_id,
        pad_token_id=TOKENIZER.pad_token_id,
    ).save_pretrained(tmp_path / "model")
    policy = moved(load_model(tmp_path / "model", dtype="float32", attention="sdpa"))
    recorded = recorder(policy, WITH_AQN)
    with start(tmp_path / "model", dtype="bfloat16") as engine:
        rollouts = VllmRolloutEngine(engine, weights=MergedForEngine(torch.bfloat16), dtype=torch.bfloat16)
        completions = rollouts.roll_out(policy, recorded, rollout(policy, WITH_AQN, sigma=0.0005))
        (sync,) = recorded.receipt().weight_syncs
        assert sync.wrong == 0 < sync.recomputed
        assert sync.digests == {norms_sha256(policy)}
        rounded = copy.deepcopy(policy).bfloat16()
        for completion, prompt in zip(completions, PROMPTS, strict=True):
            expected = log_probabilities(rounded, completion, prompt).float()
            torch.testing.assert_close(torch.tensor(completion.log_probabilities), expected, atol=0.1, rtol=0)
    with pytest.raises(ModelError, match="no sleep mode on a CPU"):
        start(tmp_path / "model", sleeps=True)
