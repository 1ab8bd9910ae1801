"""Micro-batches by tokens train on the same sequences as padded ones, with the same gradient and less padding."""

import polars as pl
import pytest
import torch
from safetensors.torch import load_file
from tiny_training import AQN, run, training_spec, write_builtin_inputs
from torch import Tensor
from trl.trainer.utils import selective_log_softmax
from two_workers import logs, run_together

from aqnpipe.artifacts.files import read_json
from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.errors import ConfigError
from aqnpipe.noise.receipts.receipt import Receipt
from aqnpipe.training import micro_batches
from aqnpipe.training.micro_batches import groups_by_tokens
from aqnpipe.training.trainer import NoisyGRPOTrainer

E5 = {"operators": "all", "error": {"kind": "relative_gaussian", "scale": 0.05}}
SETTINGS = {
    "rollouts_per_prompt": 4, "max_response_tokens": 40, "num_steps": 4, "steps_per_rollout": 2, "learning_rate": 1e-4,
    "checkpoint_every": 4, "resume_every": 2,
}  # fmt: skip
BY_TOKENS = {**SETTINGS, "micro_batch_size": None, "tokens_per_micro_batch": 280}


def ragged(rows=12, seed=0) -> dict[str, Tensor]:
    """Return a batch in TRL's layout: padding before the prompts and behind the completions."""
    rng = torch.Generator().manual_seed(seed)
    prompts, completions = (torch.randint(1, most, (rows,), generator=rng) for most in (9, 14))
    prompt_mask = (torch.arange(8).flip(0) < prompts[:, None]).long()
    completion_mask = (torch.arange(13) < completions[:, None]).long()
    return {
        "prompt_ids": torch.randint(2, 40, prompt_mask.shape, generator=rng) * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": torch.randint(2, 40, completion_mask.shape, generator=rng) * completion_mask,
        "completion_mask": completion_mask,
        "advantages": torch.randn(rows, generator=rng),
        "num_items_in_batch": completions.sum(),
    }


@pytest.mark.parametrize("most", [24, 60, 1000])
def test_every_row_is_in_one_group_and_no_group_is_larger_than_asked(most):
    for seed in range(20):
        rng = torch.Generator().manual_seed(seed)
        prompts, completions = (torch.randint(1, 12, (30,), generator=rng).tolist() for _ in range(2))
        groups = groups_by_tokens(prompts, completions, most)
        assert sorted(row for group in groups for row in group.rows) == list(range(30))
        assert max(len(group.rows) * (group.prompt + group.completion) for group in groups) <= most
        for group in groups:
            assert group.prompt == max(prompts[row] for row in group.rows)
            assert group.completion == max(completions[row] for row in group.rows)


def test_the_longest_completions_share_a_group():
    groups = groups_by_tokens([2, 2, 2, 2], [3, 10, 9, 4], 24)
    assert [group.rows for group in groups] == [[1, 2], [3, 0]]
    assert [(group.prompt, group.completion) for group in groups] == [(2, 10), (2, 4)]


def test_a_row_that_is_too_long_is_alone():
    assert [group.rows for group in groups_by_tokens([1, 1, 1], [9, 2, 20], 12)] == [[2], [0], [1]]


def test_workers_have_groups_of_equal_numbers_of_rows_that_fit_on_each(monkeypatch):
    others = [(1, 11), (1, 1), (1, 1), (1, 1)]
    monkeypatch.setattr(micro_batches, "gathered", lambda lengths: [lengths, others])
    assert [group.rows for group in groups_by_tokens([1] * 4, [2] * 4, 12)] == [[0], [1, 2, 3]]
    others[:] = [(1, 1)] * 4
    assert [group.rows for group in groups_by_tokens([1] * 4, [2] * 4, 12)] == [[0, 1, 2, 3]]


def test_only_padding_is_cut_off():
    batch = ragged()
    cut = micro_batches.micro_batches(batch, 60)
    assert len(cut) > 2
    assert sum(part["completion_ids"].numel() for part in cut) < 0.8 * batch["completion_ids"].numel()
    for name in ("prompt", "completion"):
        kept, whole = (
            [part[f"{name}_ids"][part[f"{name}_mask"].bool()].tolist() for part in p] for p in (cut, [batch])
        )
        assert sorted(token for part in kept for token in part) == sorted(whole[0])
    for part in cut:
        assert part["prompt_mask"][:, 0].any()
        assert part["completion_mask"][:, -1].any()
        assert part["num_items_in_batch"] == batch["num_items_in_batch"]


@pytest.mark.parametrize(
    ("attention", "dtype", "bound"), [("sdpa", torch.float64, 1e-8), ("eager", torch.float32, 1e-5)], ids=str
)
def test_the_gradient_is_that_of_the_padded_batch(make_model, attention, dtype, bound):
    """Without padding before them, prompts begin at earlier positions, whose rotary angles are float32 in any case."""
    model = make_model(num_layers=2, vocab_size=40).to(dtype)
    model.set_attn_implementation(attention)

    def gradient(parts):
        model.zero_grad()
        for part in parts:
            ids = torch.cat([part["prompt_ids"], part["completion_ids"]], dim=1)
            mask = torch.cat([part["prompt_mask"], part["completion_mask"]], dim=1)
            columns = part["completion_ids"].shape[1]
            logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=columns + 1, use_cache=False).logits
            found = selective_log_softmax(logits[:, :-1], part["completion_ids"])
            (found * part["advantages"][:, None] * part["completion_mask"]).sum().backward()
        return torch.cat([weight.grad.flatten() for weight in model.parameters()])

    padded = gradient([ragged()])
    difference = (gradient(micro_batches.micro_batches(ragged(), 60)) - padded).norm()
    assert padded.norm() > 1
    assert difference < bound * padded.norm()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """The built-in model: its responses have different lengths."""
    return write_builtin_inputs(tmp_path_factory.mktemp("inputs"))


def outcome(folder):
    weights = load_file(folder / "checkpoints" / "step4" / "model.safetensors")
    return pl.read_parquet(folder / "metrics.parquet"), weights


def assert_learned_the_same(folder, other):
    """Same rollouts; loss and gradient differ by the order of float32 sums.

    A step of Adam moves weights by at most the learning rate, and by far less where only the last digits of a gradient
    change.
    """
    (mine, my_weights), (theirs, their_weights) = outcome(folder), outcome(other)
    assert (theirs["grad_norm"] > 0.1).any()
    for column in ("reward_mean", "response_tokens_mean", "validation_accuracy"):
        assert mine[column].to_list() == theirs[column].to_list(), column
    for column, bound in (("loss", 1e-5), ("grad_norm", 1e-3)):
        assert mine[column].to_list() == pytest.approx(theirs[column].to_list(), rel=bound, abs=1e-6), column
    assert max((my_weights[name] - their_weights[name]).abs().max() for name in my_weights) < SETTINGS["learning_rate"]


@pytest.fixture(scope="module")
def padded(inputs, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        seen = tokens_of_forwards(patch)
        return run(training_spec(**SETTINGS), inputs, tmp_path_factory.mktemp("padded") / "run"), seen


def tokens_of_forwards(patch) -> list[int]:
    """Return a list that gets the number of tokens of every forward of the trainer, with padding."""
    seen: list[int] = []
    original = NoisyGRPOTrainer._computed

    def spied(self, model, input_ids, *args, **kwargs):
        seen.append(input_ids.numel())
        return original(self, model, input_ids, *args, **kwargs)

    patch.setattr(NoisyGRPOTrainer, "_computed", spied)
    return seen


@pytest.mark.slow
def test_a_run_learns_what_a_padded_one_learns_from_fewer_tokens(inputs, padded, tmp_path, monkeypatch):
    seen = tokens_of_forwards(monkeypatch)
    folder = run(training_spec(**BY_TOKENS), inputs, tmp_path / "run")
    assert_learned_the_same(folder, padded[0])
    assert max(seen) <= BY_TOKENS["tokens_per_micro_batch"]
    assert sum(seen) < 0.9 * sum(padded[1])


@pytest.mark.slow
def test_means_of_a_step_are_over_its_tokens(inputs, tmp_path):
    """One micro-batch has all tokens of a step, so TRL's mean over it is that of the step."""
    tables = [
        pl.read_parquet(run(training_spec(**{**SETTINGS, **size}), inputs, tmp_path / name / "run") / "metrics.parquet")
        for name, size in (("one", {"micro_batch_size": 16}), ("by tokens", BY_TOKENS))
    ]
    for column in ("kl", "entropy", "clip_fraction"):
        assert tables[0][column].to_list() == pytest.approx(tables[1][column].to_list(), rel=1e-3, abs=1e-5), column


@pytest.mark.slow
def test_two_workers_with_unequal_lengths_average_their_gradients_and_resume(inputs, tmp_path):
    """They learn what padded ones do, also with shared weights; E5 and AQN pass the receipt, after a kill too."""

    def job(name, noisy, settings=BY_TOKENS, **extra):
        spec = training_spec(E5 if noisy else None, AQN if noisy else None, **settings, num_workers=2)
        return {
            "kind": "train", "folder": str(tmp_path / name), "inputs": str(inputs.model.parent),
            "spec": spec.model_dump(mode="json"), "teach": False, **extra,
        }  # fmt: skip

    jobs = [job("padded", False, SETTINGS), job("clean", False), job("noisy", True)]
    jobs += [job("shared", False, {**BY_TOKENS, "parallelism": "fsdp"}), job("killed", True, kill_after=2)]
    codes = run_together(jobs, tmp_path / "a")
    assert codes[0] == -9, logs(tmp_path / "a")
    assert run_together([job("killed", True)], tmp_path / "b") == [0, 0], logs(tmp_path / "b")
    for name in ("clean", "shared"):
        assert_learned_the_same(tmp_path / name / "run", tmp_path / "padded" / "run")
    receipt = read_json(tmp_path / "noisy" / "run" / "receipt.json", Receipt).check()
    assert receipt.num_workers == 2
    for file in ("metrics.parquet", "receipt.json", "checkpoints/step4/model.safetensors"):
        again, once = (sha256_of_file(tmp_path / name / "run" / file) for name in ("killed", "noisy"))
        assert again == once, file


def test_a_micro_batch_too_small_for_the_longest_sequence_is_refused_at_the_start(inputs, tmp_path):
    spec = training_spec(micro_batch_size=None, tokens_per_micro_batch=41, max_response_tokens=40)
    with pytest.raises(
        ConfigError, match=r"tokens_per_micro_batch is 41: the longest prompt .* expected at least \d+$"
    ):
        run(spec, inputs, tmp_path / "run")
