"""Routers of sampler and policy: their agreement is measured, and the sampler's choice is replayed on request."""

import contextlib
import dataclasses

import pytest
import torch
from kill_server import KillServer, tree
from random_models import random_mixture_of
from tiny_training import AQN, NOISE, run, training_spec, write_inputs
from transformers import AutoConfig, AutoModelForCausalLM
from two_workers import logs, run_together

from aqnpipe.artifacts.files import read_json, read_table
from aqnpipe.artifacts.runs import RunRecord, TrainingMetrics
from aqnpipe.artifacts.training_facts import EXPERTS, REPLAYED, fact_problems
from aqnpipe.config.run import TrainingSpec
from aqnpipe.errors import ConfigError, ModelError, ReceiptError
from aqnpipe.generation.backend import Completion, RoutedCompletion, Sampling
from aqnpipe.generation.rollout_engines import TransformersRolloutEngine
from aqnpipe.generation.transformers_backend import TransformersBackend
from aqnpipe.models.loading import load_tokenizer
from aqnpipe.models.routers import Routers
from aqnpipe.training.audit.auditor import TrainingAudit
from aqnpipe.training.rollout_backend import describe_rollouts
from aqnpipe.training.sampler import RoutedRollouts
from aqnpipe.training.trainer import NoisyGRPOTrainer

pytestmark = pytest.mark.usefixtures("rewards_that_teach")

BY_TOKENS = {"micro_batch_size": None, "tokens_per_micro_batch": 60}
OFF_POLICY = {"num_steps": 4, "steps_per_rollout": 2, "prompts_per_step": 2, "learning_rate": 1e-2}


def write(folder, family):
    def mixture(num_layers, **settings):
        return random_mixture_of(family, num_hidden_layers=num_layers, max_position_embeddings=256, **settings)

    return write_inputs(folder, mixture)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write(tmp_path_factory.mktemp("inputs"), "qwen3_moe")


def replaying(spec, **arm) -> TrainingSpec:
    data = spec.model_dump()
    return TrainingSpec.model_validate(data | {"arm": data["arm"] | {"routing_replay": True, **arm}})


def metrics(folder):
    return read_table(folder / "metrics.parquet", TrainingMetrics)


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_without_noise_all_routers_agree(family, tmp_path):
    table = metrics(run(training_spec(), write(tmp_path, family), tmp_path / "run"))
    assert set(table["router_agreement"]) == {1.0}
    assert set(table["tokens_routed_differently"]) == {0.0}


@pytest.mark.slow
def test_a_dense_model_has_no_agreement_and_no_hooks(make_model, tmp_path):
    table = metrics(run(training_spec(NOISE), write_inputs(tmp_path, make_model), tmp_path / "run"))
    assert table["router_agreement"].null_count() == table["tokens_routed_differently"].null_count() == len(table)


def test_under_noise_the_agreement_is_that_of_the_routers_outputs(inputs, tmp_path, monkeypatch):
    """Both sides by hand: what the router modules return in each pass, matched by the tokens that were read."""
    of_sampler, of_policy, current = [], [], []

    build, roll_out = NoisyGRPOTrainer.__init__, TransformersRolloutEngine.roll_out

    def built(self, **kwargs):
        build(self, **kwargs)
        for name, module in self.policy.named_modules():
            if name.endswith(".gate"):
                module.register_forward_hook(lambda module, args, output: current.append(output[2].tolist()))
        self.policy.register_forward_hook(passed, with_kwargs=True)

    def passed(module, args, kwargs, output):
        flat = list(zip(*current, strict=True))
        current.clear()
        if "input_ids" not in kwargs:
            return  # a probe of the model after it was saved
        rows = kwargs["input_ids"].tolist()
        width = len(rows[0])
        by_row = [flat[start : start + width] for start in range(0, len(flat), width)]
        if kwargs.get("past_key_values") is not None:
            sampled.append((rows, by_row))
        elif output.logits.requires_grad:
            for row, shown, experts in zip(rows, kwargs["attention_mask"].tolist(), by_row, strict=True):
                tokens = [token for token, is_shown in zip(row, shown, strict=True) if is_shown]
                kept = [chosen for chosen, is_shown in zip(experts, shown, strict=True) if is_shown]
                of_policy.append((tuple(tokens), kept[:-1]))

    sampled: list = []

    def rolled(self, policy, recorder, rollout):
        sampled.clear()
        completions = roll_out(self, policy, recorder, rollout)
        of_sampler.extend(decoded(rollout.prompts, completions, sampled))
        return completions

    monkeypatch.setattr(NoisyGRPOTrainer, "__init__", built)
    monkeypatch.setattr(TransformersRolloutEngine, "roll_out", rolled)
    table = metrics(run(training_spec(NOISE), inputs, tmp_path / "run"))
    sampler = dict(of_sampler)
    assert len(sampler) == len(of_sampler) == len(of_policy) == 16, "no two responses are equal"
    for step in range(2):
        same = tokens_same = choices = tokens = 0
        for read, experts in of_policy[8 * step : 8 * step + 8]:
            for one, other in zip(sampler[read], experts, strict=True):
                equal = [set(a) == set(b) for a, b in zip(one, other, strict=True)]
                choices, same = choices + len(equal), same + sum(equal)
                tokens, tokens_same = tokens + 1, tokens_same + all(equal)
        assert 0.5 < table["router_agreement"][step] < 1
        assert table["router_agreement"][step] == pytest.approx(same / choices, abs=1e-12)
        assert table["tokens_routed_differently"][step] == pytest.approx(1 - tokens_same / tokens, abs=1e-12)


def decoded(prompts, completions, sampled):
    """Yield the tokens of each row and its experts, from passes (ids, experts): prompts first, then a token each.

    Prompts are read by length. Where rows end, the last active rows take their places.
    """
    order = sorted(range(len(prompts)), key=lambda row: (len(prompts[row]), row))
    experts: dict[int, list] = {}
    waiting = list(order)
    while waiting:
        ids, of_rows = sampled.pop(0)
        for of_row in of_rows[: len(ids)]:
            row = waiting.pop(0)
            experts[row] = of_row[: len(prompts[row])]
    active, step = order, 0
    while sampled:
        step += 1
        ids, of_rows = sampled.pop(0)
        stay = [len(completions[row].token_ids) > step for row in active]
        last = [row for row, stays in zip(active[sum(stay) :], stay[sum(stay) :], strict=True) if stays]
        active = [
            row if stays else last.pop() for row, stays in zip(active[: sum(stay)], stay[: sum(stay)], strict=True)
        ]
        for row, read, of_row in zip(active, ids, of_rows, strict=True):
            assert read == [completions[row].token_ids[step - 1]]
            experts[row] += of_row
    for row, prompt in enumerate(prompts):
        yield (*prompt, *completions[row].token_ids), experts[row]


HONEST = {
    "noise": training_spec(NOISE),
    "all operators, AQN, old policy, by tokens, checkpointing": training_spec(
        {**NOISE, "operators": "all"}, AQN, gradient_checkpointing=True, **OFF_POLICY, **BY_TOKENS
    ),
    "adapters": training_spec(NOISE, lora={"rank": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"]}),
    "bfloat16": training_spec(NOISE, AQN, dtype="bfloat16", gradient_checkpointing=True),
    "float16": training_spec(NOISE, dtype="float16"),
    "no noise, no KL": training_spec(kl_coefficient=0.0),
}


@pytest.mark.parametrize(
    "name", [name if name == "noise" else pytest.param(name, marks=pytest.mark.slow) for name in HONEST]
)
def test_with_replay_the_policy_runs_the_experts_of_the_sampler(name, inputs, tmp_path):
    spec = replaying(HONEST[name])
    folder = run(spec, inputs, tmp_path / "run")
    assert set(metrics(folder)["router_agreement"]) == {1.0}
    facts = read_json(folder / "run.json", RunRecord).training
    assert facts is not None
    assert fact_problems(facts, spec) == []
    for name in (EXPERTS, REPLAYED):
        assert facts.recomputed[name].compared > 0
        assert facts.recomputed[name].worst == 0
        left = {key: value for key, value in facts.recomputed.items() if key != name}
        unproven = fact_problems(facts.model_copy(update={"recomputed": left}), spec)
        assert unproven == [f"{name}: never recomputed"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "granitemoe"])
def test_other_families_replay_too(family, tmp_path):
    table = metrics(run(replaying(training_spec(NOISE)), write(tmp_path, family), tmp_path / "run"))
    assert set(table["router_agreement"]) == {1.0}


@pytest.mark.slow
def test_the_weights_of_a_correction_see_replayed_log_probabilities(inputs, tmp_path):
    """Noise in the rollouts alone: what is left of the distance with replay is that of the products themselves."""
    noise = {**NOISE, "phases": ["rollout"]}
    found = {}
    for replays in (False, True):
        spec = replaying(training_spec(noise), routing_replay=replays, importance_sampling={"mode": "token_truncate"})
        found[replays] = metrics(run(spec, inputs, tmp_path / str(replays)))
    assert found[False]["router_agreement"].max() < 1
    assert found[True]["importance_ratio_mean"].null_count() == 0
    assert found[True]["logp_difference_mean"][0] != found[False]["logp_difference_mean"][0]


@pytest.mark.slow
def test_a_killed_replay_continues_byte_for_byte(inputs, tmp_path):
    settings = {"resume_every": 1, "checkpoint_every": None, "gradient_checkpointing": True}
    spec = replaying(training_spec(NOISE, AQN, **{**OFF_POLICY, **BY_TOKENS, **settings}))
    server = KillServer(tmp_path)
    with contextlib.closing(server):
        assert server.train(spec, inputs, tmp_path / "whole", tmp_path / "whole scratch").code == 0
        killed = tmp_path / "killed", tmp_path / "killed scratch"
        # A batch of rollouts is for two steps: the second one is that of steps 3 and 4.
        assert server.train(spec, inputs, *killed, kill=("optimiser step", 4, "before")).code == -9
        again = server.train(spec, inputs, *killed, kill=("log-probabilities", 3, "after"))
        assert again.code == -9, again.said
        last = server.train(spec, inputs, *killed)
        assert last.code == 0, last.said
    assert last.steps == [2]
    assert tree(tmp_path / "killed") == tree(tmp_path / "whole")


@pytest.mark.slow
def test_two_workers_replay_with_whole_and_with_shared_weights(inputs, tmp_path):
    jobs = []
    for parallelism in ("data", "fsdp"):
        settings = {"num_workers": 2, "parallelism": parallelism, "micro_batch_size": 2, "gradient_checkpointing": True}
        spec = replaying(training_spec(NOISE, **settings)).model_dump(mode="json")
        folder = str(tmp_path / parallelism)
        jobs.append({"kind": "train", "folder": folder, "inputs": str(inputs.model.parent), "spec": spec})
    assert run_together(jobs, tmp_path / "logs") == [0, 0], logs(tmp_path / "logs")
    data, shared = (metrics(tmp_path / parallelism / "run") for parallelism in ("data", "fsdp"))
    assert set(data["router_agreement"]) == set(shared["router_agreement"]) == {1.0}
    assert shared["loss"].to_list() == pytest.approx(data["loss"].to_list(), abs=1e-4)


@contextlib.contextmanager
def _nothing(self, rows, mask):
    yield


def _forward_alone(monkeypatch):
    original = TrainingAudit._check_graph

    def before_backward(self, loss):
        original(self, loss)
        for choice in self._trainer._routing._routers._choices:
            choice.given.fill_(-1)

    monkeypatch.setattr(TrainingAudit, "_check_graph", before_backward)


def _noted(change):
    def patch(monkeypatch):
        original = TransformersRolloutEngine.roll_out

        def rolled(self, *args):
            return [change(completion) for completion in original(self, *args)]

        monkeypatch.setattr(TransformersRolloutEngine, "roll_out", rolled)

    return patch


SABOTAGES = {
    "the choice is recorded, not replayed": (
        lambda monkeypatch: monkeypatch.setattr(RoutedRollouts, "replayed", _nothing),
        {},
        "a forward pass of the policy has not run the experts that the sampler's routers chose",
    ),
    "replayed in the forward, not where a backward pass computes it again": (
        _forward_alone,
        {"gradient_checkpointing": True},
        "a backward pass has computed a layer again with other experts than its forward",
    ),
    "other experts are noted than ran": (
        _noted(lambda completion: dataclasses.replace(completion, experts=(completion.experts + 1) % 4)),
        {},
        f"{EXPERTS}: row 0: they are not those that ran",
    ),
    "the sampler notes nothing": (
        _noted(lambda completion: Completion(completion.token_ids, "stop", completion.log_probabilities)),
        {},
        "routing_replay: the sampler noted no experts",
    ),
}


@pytest.mark.parametrize("name", SABOTAGES)
def test_a_replay_that_does_not_happen_is_found(name, inputs, tmp_path, monkeypatch):
    sabotage, settings, message = SABOTAGES[name]
    sabotage(monkeypatch)
    with pytest.raises(ReceiptError, match=message):
        run(replaying(training_spec(NOISE, **settings)), inputs, tmp_path / "run")


def test_a_model_without_routers_is_refused_before_it_trains(make_model, tmp_path):
    inputs = write_inputs(tmp_path, make_model)
    with pytest.raises(ModelError, match="routing_replay: Qwen2ForCausalLM has no routers"):
        run(replaying(training_spec()), inputs, tmp_path / "run")


def test_vllm_cannot_sample_for_a_replay_but_transformers_can():
    spec = replaying(training_spec())
    asked = spec.model_copy(update={"generation": spec.generation.model_copy(update={"backend": "vllm"})})
    with pytest.raises(ConfigError, match="arm test: vLLM cannot make its rollouts: routing_replay is true"):
        describe_rollouts(asked)
    assert describe_rollouts(spec) == {"backend": "transformers"}


@pytest.mark.parametrize("window", [None, 4], ids=["padding behind", "padding before"])
def test_the_sampler_notes_the_experts_of_each_row_alone(inputs, window):
    """A sliding window keeps a cache of transformers' own, for which padding comes first."""
    tokenizer = load_tokenizer(inputs.model)
    config = AutoConfig.from_pretrained(inputs.model)
    if window is not None:
        config.sliding_window, config.layer_types = window, ["sliding_attention"] * config.num_hidden_layers
    model = AutoModelForCausalLM.from_pretrained(inputs.model, config=config, attn_implementation="eager").eval()
    prompts = [[5, 6, 7, 8, 9, 10], [11, 12], [13, 14, 15, 16]]
    sampling = Sampling(max_response_tokens=8, temperature=1.0, seed=3)
    routers = Routers(model)
    # A token that is drawn ends a response, so that rows leave the batch at different times.
    whole = TransformersBackend(model, tokenizer).generate(prompts, sampling)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(whole[1].token_ids[3])
    completions = TransformersBackend(model, tokenizer).generate(prompts, sampling, routers=routers)
    assert len({len(completion.token_ids) for completion in completions}) > 1
    for prompt, completion in zip(prompts, completions, strict=True):
        with routers.observed(), torch.no_grad():
            model(input_ids=torch.tensor([prompt + completion.token_ids[:-1]]), use_cache=False)
            assert torch.equal(completion.experts, routers.take(1)[0])


def test_shares_by_hand(inputs):
    """Two layers of two experts: 7 of 8 choices of four tokens are the same sets, and one token differs in a layer."""
    model = AutoModelForCausalLM.from_pretrained(inputs.model)
    routed = RoutedRollouts(model, replays=True)
    sampled = torch.tensor([[0, 1, 2, 3], [3, 1, 0, 1], [0, 2, 0, 2], [1, 2, 1, 3]], dtype=torch.int16)
    routed.begin([RoutedCompletion([1], "stop", experts=of_row) for of_row in (sampled[:1], sampled[1:])])
    # The first row has two tokens behind a place of padding, the second four; each last token was not read.
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]])
    wanted = routed._aligned([0, 1], mask)
    assert wanted[0].tolist() == [[-1] * 4, sampled[0].tolist(), [-1] * 4, [-1] * 4]
    assert wanted[1].tolist() == [*sampled[1:].tolist(), [-1] * 4]
    found = torch.zeros(2, 4, 4, dtype=torch.int16)
    found[0, 1] = torch.tensor([1, 0, 3, 2])
    found[1, :3] = torch.tensor([[1, 3, 1, 0], [0, 2, 0, 3], [1, 2, 1, 3]])
    routed._count(wanted, found)
    assert routed.settle() == {"routers/agreement": 7 / 8, "routers/tokens_differing": 1 / 4}
    assert routed.settle() == {}


@pytest.mark.parametrize("replays", [False, True], ids=["routers", "replay"])
def test_a_verified_mixture_has_the_metrics_of_one_that_is_not(inputs, tmp_path, replays):
    """A rehearsed micro-batch counts once: under noise the routers of its tokens differ from those of others."""
    specs = [training_spec(NOISE, **BY_TOKENS), training_spec(NOISE, **BY_TOKENS, verify={"every": 1})]
    tables = [
        metrics(run(replaying(spec) if replays else spec, inputs, tmp_path / str(number)))
        for number, spec in enumerate(specs)
    ]
    assert tables[0].equals(tables[1])
    assert replays or 0 < tables[0]["router_agreement"][0] < 1
