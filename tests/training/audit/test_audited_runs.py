"""Runs are refused where the trainer does something else than the study asks for, and pass where it does not.

Sabotages of tests/attacks are not repeated here.
"""

import dataclasses
import inspect
import textwrap

import pytest
import torch
import trl.trainer.grpo_trainer as grpo
from accelerate import Accelerator
from replacing import replaced
from tiny_training import AQN, NOISE, run, scattered_rewards, training_spec, write_inputs
from trl import GRPOTrainer

from aqnpipe.artifacts.files import read_json
from aqnpipe.artifacts.runs import RunRecord
from aqnpipe.artifacts.training_facts import fact_problems
from aqnpipe.config.run import TrainingSpec
from aqnpipe.errors import ReceiptError
from aqnpipe.generation import transformers_backend
from aqnpipe.training import run as training_run
from aqnpipe.training import trainer
from aqnpipe.training.callbacks import CheckpointCallback
from aqnpipe.training.trainer import NoisyGRPOTrainer

pytestmark = pytest.mark.usefixtures("rewards_that_teach")

LORA = {"rank": 4, "alpha": 8}
SWALLOWED = {"operators": "matmul", "error": {"kind": "relative_gaussian", "scale": 1e-4}}
BY_TOKENS = {"micro_batch_size": None, "tokens_per_micro_batch": 60}
OFF_POLICY = {"num_steps": 2, "steps_per_rollout": 2, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, make_model):
    return write_inputs(tmp_path_factory.mktemp("inputs"), make_model, num_problems=16)


def with_correction(mode):
    data = training_spec(NOISE, AQN).model_dump()
    data["arm"]["importance_sampling"] = {"mode": mode, "clip_max": 1.02}
    return TrainingSpec.model_validate(data)


HONEST = {
    "clean": training_spec(),
    "noise": training_spec(NOISE, AQN),
    "fixed machine, AQN on hidden states": training_spec(
        {"operators": "matmul", "error": {"kind": "relative_gaussian", "scale": 0.05, "redraw": "never"}},
        {**AQN, "targets": "hidden_states", "actor_forward": True},
    ),
    "all operators": training_spec({**NOISE, "operators": "all"}),
    "no KL": training_spec(kl_coefficient=0.0),
    "several steps per rollout, clipped": training_spec(NOISE, AQN, **{**OFF_POLICY, "num_steps": 4}, clip_ratio=1e-3),
    "dual clip": training_spec(**OFF_POLICY, clip_ratio=1e-3, clip_ratio_c=1.002),
    "bfloat16": training_spec(NOISE, AQN, dtype="bfloat16"),
    "noise that bfloat16 swallows": training_spec(SWALLOWED, AQN, dtype="bfloat16"),
    "bfloat16 weights": training_spec(NOISE, AQN, dtype="bfloat16", weights_dtype="bfloat16"),
    "adapters in bfloat16": training_spec(NOISE, AQN, lora={**LORA, "dropout": 0.1}, dtype="bfloat16"),
    "float16": training_spec(NOISE, AQN, dtype="float16"),
    "adapters in float16": training_spec(NOISE, AQN, lora={**LORA, "dropout": 0.1}, dtype="float16", loss_scale=2**16),
    "adapters in float16, by tokens": training_spec(
        NOISE, num_steps=3, lora=LORA, dtype="float16", gradient_checkpointing=True, **BY_TOKENS
    ),
    "checkpointing in float16": training_spec(
        {**NOISE, "operators": "all"}, AQN, dtype="float16", loss_scale=1, gradient_checkpointing=True
    ),
    "clean in float16, by tokens": training_spec(
        dtype="float16", weights_dtype="bfloat16", loss_scale=2**20, max_grad_norm=0.1, **BY_TOKENS
    ),
    "checkpointing": training_spec(NOISE, AQN, gradient_checkpointing=True),
    "optimiser": training_spec(
        learning_rate_schedule="linear", warmup_steps=1, weight_decay=0.1, adam_beta1=0.8, max_grad_norm=0.1
    ),
    "temperature": training_spec(temperature=0.7, kl_coefficient=0.1),
    "epochs": training_spec(NOISE, num_steps=8, epochs=2),
    "micro-batches by tokens": training_spec(
        {**NOISE, "operators": "all"}, AQN, **{**OFF_POLICY, "num_steps": 4}, **BY_TOKENS, gradient_checkpointing=True
    ),
    **{mode: with_correction(mode) for mode in ("token_truncate", "token_mask", "sequence_mask", "sequence_truncate")},
}


@pytest.mark.parametrize(
    "name", [name if name == "noise" else pytest.param(name, marks=pytest.mark.slow) for name in HONEST]
)
def test_an_honest_run_passes_and_its_record_holds_the_facts(name, inputs, tmp_path):
    spec = HONEST[name]
    facts = read_json(run(spec, inputs, tmp_path / "run") / "run.json", RunRecord).training
    assert facts is not None
    assert fact_problems(facts, spec) == []
    # Room to the limits, so that rounding on other machines does not refuse a run.
    assert max(entry.worst for entry in facts.recomputed.values()) < 0.5


def changed(old, new, function=GRPOTrainer._compute_loss):
    """Patch TRL's source: `old` becomes `new` in one method."""

    def patch(monkeypatch):
        source = textwrap.dedent(inspect.getsource(function)).replace("@profiling_decorator\n", "")
        found = {}
        exec(replaced(source, old, new), vars(grpo), found)
        monkeypatch.setattr(GRPOTrainer, function.__name__, found[function.__name__])

    return patch


def around(owner, name, make):
    """Replace `owner.name` by `make(original)`."""

    def patch(monkeypatch):
        monkeypatch.setattr(owner, name, make(getattr(owner, name)))

    return patch


def with_attribute(**values):
    """Change attributes of the trainer after it is built."""

    def changed(original):
        def build(self, **kwargs):
            original(self, **kwargs)
            vars(self).update(values)

        return build

    return around(NoisyGRPOTrainer, "__init__", changed)


def with_argument(**values):
    def changed(original):
        def arguments(*args):
            found = original(*args)
            vars(found).update(values)
            return found

        return arguments

    return around(training_run, "grpo_arguments", changed)


def with_policy(change):
    def changed(original):
        def load(*args):
            model = original(*args)
            change(model)
            return model

        return load

    return around(training_run, "load_policy", changed)


def every_second(original):
    calls = []

    def step(self, *args, **kwargs):
        calls.append(None)
        return original(self, *args, **kwargs) if len(calls) % 2 else None

    return step


def with_rewards(of):
    return lambda monkeypatch: monkeypatch.setattr(training_run, "reward_correct", of)


def with_draws(**values):
    return around(
        transformers_backend._Draws,
        "__init__",
        lambda o: lambda self, sampling, *a: o(self, dataclasses.replace(sampling, **values), *a),
    )


def checkpoint_of_the_step_before(original):
    kept = {}

    def save(self, args, state, control, **kwargs):
        model = kwargs["model"]
        now = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(kept or now)
        original(self, args, state, control, **kwargs)
        model.load_state_dict(now)
        kept.update(now)

    return save


def scale_weights(model):
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1.01)


KL = {"kl_coefficient": 0.05}
HALF = {"dtype": "float16"}
SABOTAGES = {
    "learning rate": (with_argument(learning_rate=2e-3), {}, "learning_rate is 0.002, the study asks for 0.001"),
    "KL sign": (
        changed("per_token_loss + self.beta * per_token_kl", "per_token_loss - self.beta * per_token_kl"),
        KL,
        "KL term has the wrong sign",
    ),
    "dual clip off": (
        changed("coef_1 = torch.clamp(coef_1, max=self.args.delta)", "pass"),
        {**OFF_POLICY, "clip_ratio": 1e-3, "clip_ratio_c": 1.002},
        "ratios are not limited to clip_ratio_c",
    ),
    "constant rewards": (
        with_rewards(lambda completions, **_: [1.0] * len(completions)),
        {},
        r"rewards of step 1: the trainer's mean is 1, the texts graded again give 0\.5",
    ),
    "rewards of other rows": (
        with_rewards(lambda completions, **_: scattered_rewards([None, *completions])[1:]),
        {},
        "sign of the advantages",
    ),
    "seed of the sampler": (with_draws(seed=1), {}, "tokens sampled in rollouts: .*another seed"),
    "update without effect": (around(torch.optim.AdamW, "step", every_second), {}, "update 2 changed no weight"),
    "other initial weights": (
        with_policy(scale_weights),
        {},
        "before training is not the weight of the prepared model",
    ),
    "checkpoint of the step before": (
        around(CheckpointCallback, "on_step_end", checkpoint_of_the_step_before),
        {},
        "in the checkpoint of step 2 is not the weight in memory",
    ),
    "loss scaled on its way": (
        around(Accelerator, "backward", lambda o: lambda self, loss, **k: o(self, 2 * loss, **k)),
        {},
        "the loss is scaled by 2",
    ),
    "loss scale not taken off": (
        around(
            NoisyGRPOTrainer, "_clip_grad_norm", lambda o: lambda self, model: GRPOTrainer._clip_grad_norm(self, model)
        ),
        {**HALF, "max_grad_norm": 1e4},
        r"the optimiser's gradient in step 1 is 1024 times the sum",
    ),
    "loss scale taken off some weights": (
        around(
            NoisyGRPOTrainer,
            "_clip_grad_norm",
            lambda o: (
                lambda self, model: (model.model.layers[0].mlp.down_proj.weight.grad.mul_(1024), o(self, model))[1]
            ),
        ),
        HALF,
        "is not the sum of its micro-batches",
    ),
    "loss not scaled": (
        around(Accelerator, "backward", lambda o: lambda self, loss, **k: o(self, loss / 1024, **k)),
        HALF,
        "the loss is scaled by",
    ),
    "another loss scale": (with_attribute(loss_scale=2), HALF, "loss_scale is 2, the study asks for 1024"),
    "a loss scale without float16": (
        with_attribute(loss_scale=2),
        {},
        "loss_scale is 2, the study asks for 1",
    ),
    "bfloat16 in place of float16": (
        around(trainer, "compute_in", lambda o: lambda model, dtype: o(model, torch.bfloat16)),
        HALF,
        "bfloat16",
    ),
    "float32 in place of float16": (around(trainer, "compute_in", lambda o: lambda *a: None), HALF, "float32"),
    "validation sampled": (
        around(transformers_backend, "_most_probable", lambda o: lambda logits, rows: logits.argmin(-1)),
        {},
        "tokens chosen in validation",
    ),
    "micro-batch dropped": (
        around(
            NoisyGRPOTrainer,
            "training_step",
            lambda o: (
                lambda self, model, batch, *a, **k: (
                    (setattr(self, "_step", self._step + 1), torch.tensor(0.0))[1]
                    if self._step % 2
                    else o(self, model, batch, *a, **k)
                )
            ),
        ),
        {},
        "gradients of 1 micro-batches|were not trained on",
    ),
    "sequence dropped": (
        around(trainer, "micro_batches", lambda o: lambda batch, most: o(batch, most)[:-1]),
        BY_TOKENS,
        "were not trained on",
    ),
    "more tokens than asked": (
        around(trainer, "micro_batches", lambda o: lambda batch, most: o(batch, 3 * most)),
        BY_TOKENS,
        r"a forward of \d+ tokens, the study asks for at most 60",
    ),
    "setting behind the last audited step": (
        around(
            NoisyGRPOTrainer,
            "training_step",
            lambda o: (
                lambda self, *args, **kwargs: (
                    setattr(self.args, "adam_beta1", 0.5 if self.state.global_step == 7 else 0.9),
                    o(self, *args, **kwargs),
                )[1]
            ),
        ),
        {"num_steps": 8, "epochs": 2},
        "adam_beta1 is 0.5, the study asks for 0.9",
    ),
    "tokens cut off": (
        around(
            trainer,
            "micro_batches",
            lambda o: (
                lambda batch, most: [
                    {name: v[:, 1:] if name.startswith("prompt") else v for name, v in part.items()}
                    for part in o(batch, most)
                ]
            ),
        ),
        BY_TOKENS,
        "a row that is no completion of the rollout",
    ),
}
FAST = {"learning rate", "KL sign", "constant rewards", "checkpoint of the step before", "seed of the sampler"}


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in SABOTAGES]
)
def test_a_sabotaged_run_is_refused_in_one_line_that_names_the_cause(name, inputs, tmp_path, monkeypatch):
    sabotage, settings, cause = SABOTAGES[name]
    sabotage(monkeypatch)
    with pytest.raises(ReceiptError, match=cause) as refused:
        run(training_spec(**settings), inputs, tmp_path / "run")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()
