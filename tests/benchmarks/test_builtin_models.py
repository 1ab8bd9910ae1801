import hashlib
import json
from dataclasses import replace

import pytest
import torch
from builtin_models import (
    IGNORED_LABEL,
    RECIPES,
    RecipeRecord,
    build_model,
    count_correct,
    encode_batch,
    pretrain,
    pretraining_answer,
    run_recipe,
    settings_of,
)
from scipy.stats import binom
from tiny_tokenizer import build_tokenizer

from aqnpipe.config.model import BUILTIN_MODELS, builtin_folder
from aqnpipe.data.generated import Difficulty, take_problems
from aqnpipe.models.loading import load_model, load_tokenizer


def record_of(name: str) -> RecipeRecord:
    return RecipeRecord.model_validate_json((builtin_folder(name) / "recipe.json").read_bytes())


@pytest.mark.parametrize("name", BUILTIN_MODELS)
def test_shipped_weights_are_those_of_the_record(name):
    record = record_of(name)
    weights = (builtin_folder(name) / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == record.weights_sha256
    assert len(weights) < 5_000_000
    assert record.model == name
    assert record.steps == RECIPES[name].num_steps
    assert record.settings == settings_of(RECIPES[name])
    assert record.accuracy.pool == "test"
    assert record.accuracy.num_problems >= 1000
    assert 0.55 <= record.accuracy.share <= 0.70


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [("tiny", 1_102_208), ("tiny-large", 2_353_344), ("tiny-comparison", 1_102_208), ("tiny-mixture", 2_139_392)],
)
def test_shipped_model_has_its_shape(name, num_parameters):
    model = load_model(builtin_folder(name), dtype="float32", attention="eager")
    config = model.config
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    assert num_parameters == record_of(name).num_parameters == by_hand(RECIPES[name], config.vocab_size)
    family = "qwen3_moe" if name == "tiny-mixture" else "qwen2"
    assert (config.model_type, config.num_hidden_layers, config.head_dim) == (family, 6, 32)
    assert config.max_position_embeddings >= 1024
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    tokenizer = load_tokenizer(builtin_folder(name))
    assert len(tokenizer) == config.vocab_size
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


def by_hand(recipe, vocab_size: int) -> int:
    """Count the parameters of a Qwen2 with tied embeddings: attention with QKV bias, gated MLP, two norms a layer.

    A Qwen3-MoE has norms of queries and keys in place of the biases, a router, and an MLP per expert.
    """
    hidden, kv_width, experts = recipe.hidden_size, recipe.num_key_value_heads * 32, recipe.num_experts
    attention = 2 * hidden * hidden + 2 * hidden * kv_width
    attention += hidden + 2 * kv_width if experts is None else 2 * 32
    mlp = 3 * hidden * recipe.intermediate_size
    layer = attention + 2 * hidden + (mlp if experts is None else experts * (mlp + hidden))
    return recipe.num_layers * layer + hidden + vocab_size * hidden


@pytest.mark.parametrize("name", BUILTIN_MODELS)
def test_shipped_tokenizer_is_what_the_code_builds(name):
    shipped = json.loads((builtin_folder(name) / "tokenizer.json").read_text())
    assert shipped["model"] == json.loads(build_tokenizer().backend_tokenizer.to_str())["model"]


@pytest.mark.parametrize("name", BUILTIN_MODELS)
def test_shipped_model_is_as_good_as_recorded(name):
    """Other problems than those of the record: bounds from both samples' sizes, missed once in 10,000 runs."""
    folder, recorded = builtin_folder(name), record_of(name).accuracy
    model = load_model(folder, dtype="float32", attention="eager")
    num_problems = 200
    problems = take_problems(0, "test", RECIPES[name].measured_difficulty, num_problems, RECIPES[name].task)
    found = count_correct(model, load_tokenizer(folder), problems)
    low, high = recorded.share - 4 * recorded.standard_error, recorded.share + 4 * recorded.standard_error
    assert binom.ppf(5e-5, num_problems, low) <= found <= binom.ppf(1 - 5e-5, num_problems, high)


def test_batches_are_padded_on_the_right_and_labels_cover_the_answer_alone():
    tokenizer = build_tokenizer()
    problems = take_problems(0, "pretrain", Difficulty(), 8)
    ids, labels = encode_batch([p.question for p in problems], [p.answer for p in problems], tokenizer)
    assert ids.shape == labels.shape
    for problem, row, targets in zip(problems, ids, labels, strict=True):
        text = tokenizer.decode(row[row != tokenizer.pad_token_id][:-1])
        assert text == f"{problem.question}\n{problem.answer}"
        answer = targets[targets != IGNORED_LABEL]
        assert tokenizer.decode(answer[:-1]) == problem.answer
        assert answer[-1] == tokenizer.eos_token_id
        assert row[0] != tokenizer.pad_token_id


def test_some_solutions_about_some_people_stop_before_the_marked_answer():
    recipe = RECIPES["tiny"]
    problems = take_problems(0, "pretrain", Difficulty(), 2000)
    shown = [pretraining_answer(problem, recipe, 0, row) for row, problem in enumerate(problems)]
    assert shown == [pretraining_answer(problem, recipe, 0, row) for row, problem in enumerate(problems)]
    about = [problem.question.split()[0] in recipe.unmarked_names for problem in problems]
    unmarked = ["####" not in answer for answer in shown]
    assert not any(mark and not person for mark, person in zip(unmarked, about, strict=True))
    assert binom.ppf(1e-6, sum(about), recipe.unmarked_share) <= sum(unmarked)
    assert sum(unmarked) <= binom.ppf(1 - 1e-6, sum(about), recipe.unmarked_share)
    for problem, answer in zip(problems, shown, strict=True):
        assert problem.answer.startswith(answer)


def test_training_is_replayable_and_the_loss_falls():
    tokenizer, recipe = build_tokenizer(), replace(RECIPES["tiny"], batch_size=6)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        first = list(pretrain(build_model(recipe, tokenizer), tokenizer, recipe, 12))
        again = list(pretrain(build_model(recipe, tokenizer), tokenizer, recipe, 3))
    finally:
        torch.set_num_threads(threads)
    assert again == first[:3]
    assert sum(first[-3:]) / 3 < first[0] - 1.0


def test_recipe_still_runs_and_its_folder_loads(tmp_path):
    record = run_recipe("tiny", tmp_path / "model", num_steps=2, num_problems=20)
    assert record.steps == 2
    assert record.accuracy.num_problems == 20
    model = load_model(tmp_path / "model", dtype="float32", attention="sdpa")
    assert len(load_tokenizer(tmp_path / "model")) == model.config.vocab_size
    stored = RecipeRecord.model_validate_json((tmp_path / "model" / "recipe.json").read_bytes())
    assert stored == record
