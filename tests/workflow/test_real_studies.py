"""The studies of real models, run for real but small: the same architecture with random weights and made-up questions.

Shrunk are widths, layers, the vocabulary, the number of questions and of tokens, prompts per step, workers and seeds,
and the device is the CPU. Head counts, grouped queries, biases, tied embeddings, dtype, chat prompt, arms, schedules,
mini-batches, gradient checkpointing and all other settings are those of the study.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from tiny_tokenizer import build_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from aqnpipe.artifacts.evaluations import EvaluationTable
from aqnpipe.artifacts.files import read_json, read_table
from aqnpipe.artifacts.runs import StageFiles, TrainingMetrics
from aqnpipe.config.model import KNOWN_CONFIGS
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.run import EvaluationSpec, TrainingSpec
from aqnpipe.config.study import load_study
from aqnpipe.data.stage import prepare_data
from aqnpipe.evaluation.stage import evaluate
from aqnpipe.models.loading import prepare_model
from aqnpipe.models.shapes import shape_from_config
from aqnpipe.noise.receipts.receipt import Receipt
from aqnpipe.training.run import TrainingInputs
from aqnpipe.training.stage import train

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
HEAD_DIM = 8
NUM_LAYERS = 2
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def write_model(folder: Path, hub_id: str) -> str:
    """A Qwen2 with the head counts, biases and tied or untied embeddings of `hub_id`, otherwise small; random."""
    real = shape_from_config(KNOWN_CONFIGS[hub_id])
    assert real is not None
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    hidden_size = real.num_heads * HEAD_DIM
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            intermediate_size=round(hidden_size * real.intermediate_size / real.hidden_size),
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=real.num_heads,
            num_key_value_heads=real.num_kv_heads,
            tie_word_embeddings=real.tied_embeddings,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def write_questions(folder: Path, num_train: int, num_test: int) -> str:
    folder.mkdir(parents=True)
    for split, count, offset in (("train", num_train, 0), ("test", num_test, 1000)):
        rows = [
            {"question": f"Tom has {offset + i} eggs. How many?", "answer": f"#### {offset + i}"} for i in range(count)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def shrunk(name: str, folder: Path) -> dict:
    """The study `config/<name>.yaml` with small models and few questions in `folder`; its steps: two of its batches."""
    config = yaml.safe_load((ROOT / "config" / f"{name}.yaml").read_text())
    for role, model in config["models"].items():
        model.pop("revision", None)
        model["source"] = write_model(folder / "models" / role, model["source"])
    training = config["training"]
    training.update(prompts_per_step=2, num_workers=1, parallelism="data")
    training.update(max_response_tokens=5, validation_questions=2, max_prompt_tokens=256)
    if "micro_batch_size" in training:
        training["micro_batch_size"] = 5
    num_train = training["prompts_per_step"] * training["steps_per_rollout"]
    config["dataset"] = {
        "source": "local",
        "path": write_questions(folder / "questions", num_train, 4),
        "num_train": num_train,
        "num_test": 4,
    }
    config["evaluation"].update(max_response_tokens=5)
    for machine in config["machines"].values():
        for fault in machine.get("faults", []):
            fault["layer"] = NUM_LAYERS - 1
    # vLLM has an environment of its own on a CPU; its tests are in tests/training/test_training_on_vllm.py.
    config["generation"] = {"backend": "transformers"}
    config.update(device="cpu", seeds=[0], arms_file=str(ROOT / "config" / "arms.yaml"))
    return config


def run_by_stages(plan: StudyPlan, arm: str, folder: Path) -> Path:
    """Train `arm` and evaluate its last checkpoint on the prepared files in `folder`; return the run."""
    role, num_steps = plan.study.arms[arm].model, plan.num_steps
    run = folder / "runs" / arm
    train(
        TrainingSpec.model_validate(plan.training_spec(arm, 0)),
        TrainingInputs(folder / "model", folder / "train.parquet", folder / "test.parquet"),
        run,
        folder / "scratch" / arm,
        lambda _: None,
    )
    evaluate(
        EvaluationSpec.model_validate(plan.evaluation_spec(model=role, arm=arm, seed="0", step=str(num_steps))),
        run / "checkpoints" / f"step{num_steps}",
        folder / "test.parquet",
        StageFiles(run / "answers.parquet", run / "answers.receipt.json", run / "answers.run.json"),
        lambda _: None,
    )
    return run


@pytest.mark.parametrize(("name", "arms"), [("qwen2.5-1.5b", ["baseline", "E5a", "E5d"]), ("ascend", ["test3a"])])
def test_arms_of_a_real_study_train_and_are_evaluated(name, arms, tmp_path):
    """Each kind of noise and each schedule once: the other arms combine them, or have them at another size.

    Guided arms need a diagnosis; the workflow's own tests have those.
    """
    config = shrunk(name, tmp_path)
    study = load_study(config, name)
    plan = StudyPlan(study)
    assert plan.num_steps == 8
    prepare_model(study.config.models["base"], tmp_path / "model")
    for split in ("train", "test"):
        prepare_data(config["dataset"], split, tmp_path / f"{split}.parquet")
    for arm in arms:
        run = run_by_stages(plan, arm, tmp_path)
        receipt = read_json(run / "receipt.json", Receipt).check()
        noised = {record.phase for record in receipt.phases if record.calls > 0}
        expected = {"rollout", "reference", "actor_forward", "backward"} if study.arms[arm].operator_noise else set()
        assert noised == expected
        assert (receipt.aqn is None) == (study.arms[arm].aqn is None)
        assert read_table(run / "metrics.parquet", TrainingMetrics)["step"].to_list() == list(range(1, 9))
        answers = read_table(run / "answers.parquet", EvaluationTable)
        assert len(answers) == 4 * len(study.config.evaluation.passes())


def test_the_larger_model_s_study_runs_from_end_to_end(python, tmp_path):
    """Under Snakemake, with the role `large` alone."""
    config = shrunk("qwen2.5-7b", tmp_path)
    config["arms"] = ["E7a", "E7c"]
    config["evaluation"]["noise_seeds"] = [0]
    for name in ("config", "workflow", "profiles"):
        shutil.copytree(ROOT / name, tmp_path / "checkout" / name)
    shutil.copy(ROOT / "Snakefile", tmp_path / "checkout" / "Snakefile")
    (tmp_path / "checkout" / "study.yaml").write_text(yaml.safe_dump(config))
    result = python.snakemake(tmp_path / "checkout", "--configfile", "study.yaml")
    assert result.returncode == 0, result.stdout
    results = tmp_path / "checkout" / "results" / "qwen2.5-7b"
    assert "Qwen2.5-7B on GSM8K" in (results / "report.html").read_text()
    assert {path.name for path in (results / "runs").iterdir()} == {"large"}
    receipt = read_json(results / "runs" / "large" / "E7c" / "seed0" / "receipt.json", Receipt).check()
    assert [sync.step for sync in receipt.weight_syncs] == [0, 4]
    assert json.loads((results / "srdd" / "large" / "device" / "verdict.json").read_text())["verdict"] == "healthy"
