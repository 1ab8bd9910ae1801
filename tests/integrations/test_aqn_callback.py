"""AQN in stock trainers of TRL: noise in every rollout, nowhere else, and one line where it cannot be."""

from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from random_models import random_model_of
from tiny_tokenizer import build_tokenizer
from transformers import AutoModelForCausalLM, GPT2Config, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer

import aqnpipe
from aqnpipe.config.custom_code import CustomSchedule
from aqnpipe.config.noise import ConstantSigma, EpochAwareRanges, LinearDecay
from aqnpipe.errors import ConfigError, ModelError, ReceiptError
from aqnpipe.models.layout import rms_norms

DECAY = LinearDecay(sigma_start=0.08, sigma_end=0.0)
TEXTS = [f"What is {i} plus {i} ?" for i in range(16)]


def policy(**settings):
    tokenizer = build_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return random_model_of("qwen2", num_layers=2, vocab_size=len(tokenizer), **ends, **settings)


def reward(completions, **_):
    return [float(len(completion) % 7) for completion in completions]


def train(folder, callbacks, model=None, kind=GRPOTrainer, peft=None, resume=None, **settings):
    """Two steps of a stock trainer, four rollouts of two questions in each; returns the network."""
    model = policy() if model is None else model
    common = {"max_steps": 2, "report_to": "none", "use_cpu": True, "save_strategy": "no", "bf16": False}
    draws = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 4, "learning_rate": 1e-2}
    config = {GRPOTrainer: GRPOConfig, RLOOTrainer: RLOOConfig}[kind]
    trainer = kind(
        model,
        reward,
        config(str(folder), **{**common, **draws, "disable_tqdm": True, **settings}),
        train_dataset=Dataset.from_dict({"prompt": TEXTS}),
        eval_dataset=Dataset.from_dict({"prompt": TEXTS[:2]}),
        processing_class=build_tokenizer(),
        callbacks=callbacks,
        peft_config=peft,
    )
    trainer.train(resume_from_checkpoint=resume)
    return model


class NormsSeen(TrainerCallback):
    """Notes of every pass whether it has gradients, whether the model trains, and whether the norms are the clean ones.

    The clean ones are those at the beginning of a step, and at its end those that the optimiser left.
    """

    def __init__(self):
        self.passes = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        network = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.norms = [norm.weight for norm in rms_norms(network).values()]
        self.note_clean()
        network.register_forward_pre_hook(lambda *_: self.note(network))

    def note_clean(self):
        self.clean = [weight.detach().clone() for weight in self.norms]

    def note(self, network):
        is_clean = all(torch.equal(*pair) for pair in zip(self.norms, self.clean, strict=True))
        self.passes.append((torch.is_grad_enabled(), network.training, is_clean))

    def on_step_end(self, args, state, control, **kwargs):
        self.note_clean()


RIGHT_USES = {
    "plain": ({}, [0, 1]),
    "lora": ({"peft": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")}, [0, 1]),
    "gradient accumulation": ({"gradient_accumulation_steps": 2}, [0, 1]),
    "several generations per step": ({"gradient_accumulation_steps": 2, "steps_per_generation": 1}, [0, 0, 1, 1]),
    "two updates with a rollout": ({"num_iterations": 2, "max_steps": 4}, [0, 2]),
    "four steps with a rollout": ({"steps_per_generation": 4, "max_steps": 5}, [0, 4]),
    "bfloat16": ({"bf16": True}, [0, 1]),
    "checkpoints of activations": ({"gradient_checkpointing": True}, [0, 1]),
    "another trainer": ({"kind": RLOOTrainer, "beta": 0.0}, [0, 1]),
}


@pytest.mark.parametrize(("settings", "steps"), RIGHT_USES.values(), ids=RIGHT_USES)
def test_noise_is_in_rollouts_and_nowhere_else(tmp_path, settings, steps):
    callback, seen = aqnpipe.AQNCallback(DECAY), NormsSeen()
    model = train(tmp_path, [callback, seen], **settings)
    num_steps = settings.get("max_steps", 2)
    assert [sync.step for sync in callback.receipt.weight_syncs for _ in range(sync.calls)] == steps
    for sync in callback.receipt.weight_syncs:
        # From 0.08 to 0 in equal steps; 5 norms of 96 weights, so the standard error is 3 %.
        assert sync.sigma_requested == pytest.approx(0.08 * (1 - sync.step / num_steps))
        assert sync.sigma_measured == pytest.approx(sync.sigma_requested, rel=5 / (2 * 5 * 96) ** 0.5)
        assert sync.is_restored
    # A rollout is the passes without gradients, and TRL needs no other ones; old log-probabilities are clean ones.
    rollouts = [is_clean for has_gradients, _, is_clean in seen.passes if not has_gradients]
    assert sum(not is_clean for is_clean in rollouts) == 4 * len(steps)
    assert all(is_clean for has_gradients, _, is_clean in seen.passes if has_gradients)
    assert "generate" not in vars(model)


def test_the_summary_says_what_was_requested_measured_and_restored(tmp_path):
    callback = aqnpipe.AQNCallback(DECAY)
    train(tmp_path, [callback])
    head, first, second, last = callback.summary().splitlines()
    assert head.split() == ["step", "requested", "measured"]
    assert [first.split()[:2], second.split()[:2]] == [["0", "0.0800"], ["1", "0.0400"]]
    assert 0.06 < float(first.split()[2]) < 0.1
    assert last == "norm weights were restored bit for bit after 2 of 2 rollouts"


def test_a_sigma_of_zero_changes_no_byte_of_the_training_and_the_seed_is_the_key(tmp_path):
    def weights(*callbacks):
        return train(tmp_path, list(callbacks)).state_dict()

    def noised(seed):
        return weights(aqnpipe.AQNCallback(ConstantSigma(sigma=0.5), seed=seed))

    def are_equal(first, second):
        return all(torch.equal(first[name], second[name]) for name in first)

    plain, first = weights(), noised(0)
    assert are_equal(plain, weights(aqnpipe.AQNCallback(ConstantSigma(sigma=0.0))))
    assert are_equal(first, noised(0))
    assert not are_equal(first, noised(1))
    assert not are_equal(first, plain)


def test_evaluations_and_what_is_generated_between_steps_are_clean(tmp_path):
    class Samples(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            with torch.no_grad():
                model.train().generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3)

    callback, seen = aqnpipe.AQNCallback(DECAY), NormsSeen()
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2}
    train(tmp_path, [callback, seen, Samples()], **evaluation)
    assert [sync.step for sync in callback.receipt.weight_syncs] == [0, 1]
    in_evaluation = [is_clean for _, is_training, is_clean in seen.passes if not is_training]
    assert in_evaluation
    assert all(in_evaluation)
    assert sum(not is_clean for _, _, is_clean in seen.passes) == 2 * 4


def test_a_training_that_goes_on_has_the_sigmas_of_its_steps(tmp_path):
    train(tmp_path, [aqnpipe.AQNCallback(DECAY)], max_steps=4, save_strategy="steps", save_steps=2)
    callback = aqnpipe.AQNCallback(DECAY)
    train(tmp_path, [callback], max_steps=4, resume=str(tmp_path / "checkpoint-2"))
    syncs = callback.receipt.weight_syncs
    assert [(sync.step, round(sync.sigma_requested, 12)) for sync in syncs] == [(2, 0.04), (3, 0.02)]


def test_a_callback_can_be_used_again_after_a_training_that_broke_off(tmp_path):
    class Breaks(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise RuntimeError("broken off")

    callback, model = aqnpipe.AQNCallback(DECAY), policy()
    with pytest.raises(RuntimeError, match="broken off"):
        train(tmp_path, [callback, Breaks()], model)
    train(tmp_path, [callback], model)
    assert [sync.step for sync in callback.receipt.weight_syncs] == [0, 1]
    assert "generate" not in vars(model)


@pytest.mark.parametrize("targets", ["post_attention", "hidden_states"])
def test_other_targets_of_a_study(tmp_path, targets):
    callback = aqnpipe.AQNCallback(ConstantSigma(sigma=0.05), targets=targets)
    train(tmp_path, [callback])
    # One in each of two layers.
    assert [sync.targets for sync in callback.receipt.weight_syncs] == [2, 2]


def test_a_trainer_that_draws_no_rollouts_is_refused_at_its_end(tmp_path):
    settings = SFTConfig(str(tmp_path), max_steps=1, report_to="none", use_cpu=True, save_strategy="no", bf16=False)
    texts = Dataset.from_dict({"text": TEXTS})
    callback, model = aqnpipe.AQNCallback(DECAY), policy()
    trainer = SFTTrainer(model, settings, train_dataset=texts, processing_class=build_tokenizer(), callbacks=[callback])
    with pytest.raises(ReceiptError, match="0 of 1 rollouts came from the policy's generate"):
        trainer.train()
    assert "generate" not in vars(model)


def test_rollouts_behind_the_callbacks_back_are_refused(tmp_path):
    class ByTheClass(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == 1:
                model.generate = type(model).generate.__get__(model)

    with pytest.raises(ReceiptError, match="1 of 2 rollouts came from the policy's generate"):
        train(tmp_path, [aqnpipe.AQNCallback(DECAY), ByTheClass()])


def test_noise_that_was_not_added_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("aqnpipe.noise.aqn.add_absolute_gaussian_", lambda *_: None)
    with pytest.raises(ReceiptError, match=r"AQN step 0: measured sigma 0, requested 0\.08"):
        train(tmp_path, [aqnpipe.AQNCallback(DECAY)])


def test_noise_that_is_gone_before_the_policy_reads_its_weights_is_refused(tmp_path):
    class Cleans(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            norms = [norm.weight for norm in rms_norms(model).values()]
            clean = [weight.detach().clone() for weight in norms]

            def restore(*_):
                with torch.no_grad():
                    for weight, value in zip(norms, clean, strict=True):
                        weight.copy_(value)

            model.register_forward_pre_hook(restore)

    with pytest.raises(ReceiptError, match="rollout: computed with noise on the norm weights in 0 of 1 forward passes"):
        train(tmp_path, [aqnpipe.AQNCallback(DECAY), Cleans()], max_steps=1)


def test_two_callbacks_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="found Qwen2ForCausalLM without its class's generate") as error:
        train(tmp_path, [aqnpipe.AQNCallback(DECAY), aqnpipe.AQNCallback(DECAY)])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": 0.05}, "AQNCallback: schedule"),
        ({"schedule": DECAY, "targets": "norms"}, "AQNCallback: targets"),
        ({"schedule": CustomSchedule(function="a.b:c", sigma_max=1)}, "schedule own and seed 0, expected"),
        ({"schedule": DECAY, "seed": "0"}, "schedule linear and seed '0', expected"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message):
    with pytest.raises(ConfigError, match=message) as error:
        aqnpipe.AQNCallback(**arguments)
    assert "\n" not in str(error.value)


def begin(model, schedule=DECAY, **settings):
    state = SimpleNamespace(max_steps=4, num_train_epochs=1, global_step=0)
    aqnpipe.AQNCallback(schedule).on_train_begin(SimpleNamespace(**settings), state, None, model=model)


@pytest.mark.parametrize("name", ["use_vllm", "use_transformers_continuous_batching", "deepspeed", "fsdp"])
def test_rollouts_by_others_than_the_policy_are_refused_before_the_first_step(name):
    begin(policy(), **{name: False})
    with pytest.raises(ConfigError, match=f"found {name}, expected a policy that generates with whole weights"):
        begin(policy(), **{name: True})


def test_a_policy_that_cannot_have_the_noise_is_refused_before_the_first_step():
    with pytest.raises(ConfigError, match="found Linear without its class's generate"):
        begin(torch.nn.Linear(2, 2))
    layer_norms = AutoModelForCausalLM.from_config(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50))
    with pytest.raises(ModelError, match="it has no RMSNorm with a weight"):
        begin(layer_norms)
    two_epochs = EpochAwareRanges(ranges=[{"sigma_start": 0.05, "sigma_end": 0.01}] * 2)
    with pytest.raises(ConfigError, match="epoch"):
        begin(policy(), two_epochs)


def test_on_a_noisy_machine_products_and_rollouts_have_their_noise(tmp_path):
    callback, seen, model = aqnpipe.AQNCallback(DECAY), NormsSeen(), policy()
    with aqnpipe.noisy(model, scale=0.05, backward=True) as receipt:
        train(tmp_path, [callback, seen], model)
    assert "accepted" in str(receipt.check())
    assert [sync.step for sync in callback.receipt.weight_syncs] == [0, 1]
    assert sum(not is_clean for _, _, is_clean in seen.passes) == 2 * 4
