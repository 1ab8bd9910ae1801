"""Honest evaluations are accepted: architectures, number formats, prompts, samples, faults; their facts are right."""

import json

import pytest
import torch
from random_models import random_mixture_of, random_model_of
from tiny_tokenizer import build_tokenizer

from aqnpipe.artifacts.evaluations import EvaluationTable
from aqnpipe.artifacts.files import read_json, read_table
from aqnpipe.artifacts.runs import StageFiles
from aqnpipe.config.model import builtin_folder
from aqnpipe.config.run import EvaluationSpec
from aqnpipe.data.stage import prepare_data
from aqnpipe.evaluation.stage import evaluate
from aqnpipe.noise.receipts.receipt import EvaluationReceipts

FEW = {"num_questions": 9, "noise_seeds": (0,)}
"""Two batches, one of a single row."""

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for split in ("train", "test"):
        prepare_data({"source": "generated", "num_train": 6, "num_test": 20}, split, folder / split)
    return folder


@pytest.fixture
def run(data, tmp_path):
    def evaluated(model, prompt=None, dtype="float32", attention="sdpa", faults=(), **evaluation):
        settings = {"noise_levels": (0.0, 0.1), "noise_seeds": (0, 1), "max_response_tokens": 12, "batch_size": 8}
        spec = EvaluationSpec(
            model_role="base", arm_id="a", seed=0, step=1, dtype=dtype, attention=attention, prompt=prompt or {},
            faults=faults, evaluation=settings | evaluation,
        )  # fmt: skip
        outputs = StageFiles(tmp_path / "t.parquet", tmp_path / "r.json", tmp_path / "run.json")
        evaluate(spec, model, data / "test", outputs, lambda _: None, data / "train")
        receipts = read_json(outputs.receipt, EvaluationReceipts)
        assert receipts.problems() == []
        assert list(receipts.facts.row_problems(read_table(outputs.table, EvaluationTable))) == []
        return receipts.facts

    return evaluated


def saved(folder, make, template=None, **overrides):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    # Large weights, so that an untrained model has clear preferences.
    make(vocab_size=len(tokenizer), initializer_range=0.2, **ends, **overrides).save_pretrained(folder)
    return folder


def mistral(**overrides):
    """Its layers attend to the last 8 tokens only."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MistralConfig(**sizes, num_key_value_heads=2, head_dim=8, sliding_window=8, **overrides)
    return MistralForCausalLM(config).eval()


@pytest.mark.parametrize(
    "architecture", ["gemma2", *(pytest.param(other, marks=pytest.mark.slow) for other in ("llama", "qwen3"))]
)
def test_architectures(run, tmp_path, architecture):
    facts = run(saved(tmp_path / "model", lambda **kw: random_model_of(architecture, num_layers=2, **kw)))
    clean = facts.passes[0]
    assert clean.rows_again >= 9
    assert clean.largest_difference < 0.2


def test_a_mixture_of_experts(run, tmp_path):
    facts = run(saved(tmp_path / "model", lambda **kw: random_mixture_of("qwen3_moe", **kw)), noise_levels=(0.0,))
    assert facts.passes[0].largest_difference < 0.2


@pytest.mark.parametrize("attention", ["eager", pytest.param("sdpa", marks=pytest.mark.slow)])
def test_a_sliding_window(run, tmp_path, attention):
    facts = run(saved(tmp_path / "model", mistral), attention=attention)
    assert facts.passes[0].largest_difference < 0.2


@pytest.mark.parametrize(
    ("dtype", "attention"),
    [
        ("bfloat16", "eager"),
        ("float16", "sdpa"),
        pytest.param("bfloat16", "sdpa", marks=pytest.mark.slow),
        pytest.param("float16", "eager", marks=pytest.mark.slow),
    ],
)
def test_number_formats(run, dtype, attention):
    facts = run(builtin_folder("tiny"), dtype=dtype, attention=attention, **FEW)
    assert facts.passes[0].largest_difference < 0.7


@pytest.mark.parametrize(
    "prompt",
    [
        {"layout": "question_answer"},
        {"layout": "question_answer", "num_examples": 2, "instruction": "Solve it.", "example_seed": 3},
        {"style": "chat"},
        {"style": "chat", "num_examples": 2, "instruction": "Think."},
        {"style": "chat", "layout": "question_answer", "num_examples": 1, "instruction": "Think."},
        {"instruction": "Solve it."},
    ],
    ids=str,
)
def test_prompts(run, tmp_path, prompt):
    model = saved(
        tmp_path / "model",
        lambda **kw: random_model_of("qwen2", num_layers=2, max_position_embeddings=1024, **kw),
        TEMPLATE,
    )
    run(model, prompt=prompt, noise_levels=(0.0,), max_response_tokens=4)


def test_samples(run):
    facts = run(builtin_folder("tiny"), sampling={"temperature": 1.3, "num_samples": 3}, **FEW)
    clean, *_ = facts.passes
    assert clean.rows_again >= 3
    assert (
        clean.rows
        != run(builtin_folder("tiny"), sampling={"temperature": 1e-4, "num_samples": 3}, **FEW).passes[0].rows
    )


def test_samples_at_a_temperature_near_zero(run):
    facts = run(builtin_folder("tiny"), sampling={"temperature": 1e-4, "num_samples": 2}, noise_levels=(0.0,))
    greedy = run(builtin_folder("tiny"), noise_levels=(0.0,)).passes[0].rows
    assert facts.passes[0].rows.startswith(greedy)


def test_a_faulty_machine(run):
    fault = {"type": "dead_zone", "layer": 0, "magnitude": 0.3, "threshold": "cached"}
    facts = run(builtin_folder("tiny"), faults=(fault,))
    # Responses with faults cannot be computed again; some prompts are decoded without the fault instead.
    assert [one.rows_again for one in facts.passes] == [3, 0, 0]


def test_noise_in_every_pass(run):
    facts = run(builtin_folder("tiny"), noise_levels=(0.1, 0.2), num_questions=9)
    assert [one.rows_again for one in facts.passes] == [3, 0, 0, 0]


@pytest.mark.slow
def test_batches_of_one_row_and_of_all(run):
    singly = run(builtin_folder("tiny"), batch_size=1, num_questions=5, noise_seeds=(0,))
    together = run(builtin_folder("tiny"), batch_size=5, num_questions=5, noise_seeds=(0,))
    assert singly.passes[0].rows == together.passes[0].rows
    assert len(singly.passes[0].first_logits) == 5


def test_facts_are_small(run):
    facts = run(builtin_folder("tiny"))
    rows = sum(len(one.rows) // 8 for one in facts.passes)
    assert rows == 60
    fixed = 3000
    assert (len(json.dumps(facts.model_dump())) - fixed) / rows * 1319 * 7 < 300_000
