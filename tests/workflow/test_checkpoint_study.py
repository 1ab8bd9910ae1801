"""A study of a user's own checkpoints, driven by plain `snakemake`: evaluated, compared and reported, nothing trained.

The checkpoints are folders of three families: a Qwen2, a Llama with the weights of another model, and a random GPT-2.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from faulted_study import WarmPython, planned_jobs
from safetensors.torch import load_file, save_file
from tiny_tokenizer import build_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from aqnpipe.artifacts.evaluations import EvaluationTable
from aqnpipe.artifacts.files import read_json, read_table
from aqnpipe.config.model import builtin_folder
from aqnpipe.noise.receipts.receipt import EvaluationReceipts

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LEVELS = [0.0, 0.05, 0.1]
NUM_QUESTIONS = 30
STUDY = {
    "study": "mine",
    "checkpoints": {"qwen": "./qwen", "llama": "./llama"},
    "dataset": {"source": "generated", "num_test": NUM_QUESTIONS},
    "evaluation": {"noise_levels": LEVELS, "max_response_tokens": 16, "batch_size": NUM_QUESTIONS},
    "report": {"title": "Mine", "question": "Which one tolerates more noise?"},
}
AFTER_A_CHANGE = {"prepare_model": 1, "evaluate": 1, "compare": 1, "report": 1}


@dataclass(frozen=True)
class Folder:
    """A folder with the workflow, a study and its checkpoints."""

    path: Path
    python: WarmPython

    def snakemake(self, *arguments: str) -> str:
        """Run `snakemake --configfile mine.yaml` to its end; return what it printed."""
        done = self.python.snakemake(self.path, "--configfile", "mine.yaml", *arguments, timeout=300)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def planned(self) -> dict[str, int]:
        """Jobs per rule that a dry run would execute."""
        return planned_jobs(self.snakemake("--dry-run"))

    @property
    def results(self) -> Path:
        return self.path / "results"

    def evaluation(self, name: str, suffix: str) -> Path:
        return self.results / "eval" / "checkpoints" / name / "seed0" / f"step0.{suffix}"

    def responses(self, name: str) -> list[str]:
        return read_table(self.evaluation(name, "parquet"), EvaluationTable)["response"].to_list()


def write_llama(folder: Path) -> None:
    """Write a Llama that computes what the built-in Qwen2 `tiny-large` computes."""
    qwen = builtin_folder("tiny-large")
    settings = json.loads((qwen / "config.json").read_text())
    kept = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim rms_norm_eps "
        "vocab_size tie_word_embeddings eos_token_id pad_token_id bos_token_id max_position_embeddings rope_parameters"
    )
    model = LlamaForCausalLM(LlamaConfig(**{name: settings[name] for name in kept.split()}, attention_bias=True))
    missing, unexpected = model.load_state_dict(load_file(qwen / "model.safetensors"), strict=False)
    assert all(name.endswith(("o_proj.bias", "lm_head.weight")) for name in missing)
    assert not unexpected
    for name, parameter in model.named_parameters():
        if name.endswith("o_proj.bias"):
            parameter.data.zero_()
    save(model, folder)


def write_gpt2(folder: Path) -> None:
    """Write a random GPT-2."""
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512, "vocab_size": len(build_tokenizer())}
    save(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)), folder)


def save(model, folder: Path) -> None:
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


@pytest.fixture(scope="module")
def finished(python, made_once):
    """The study of two checkpoints, run once from nothing."""

    def run(folder):
        for name in ("workflow", "profiles"):
            shutil.copytree(ROOT / name, folder / name)
        shutil.copy(ROOT / "Snakefile", folder)
        shutil.copytree(builtin_folder("tiny"), folder / "qwen")
        write_llama(folder / "llama")
        (folder / "mine.yaml").write_text(yaml.safe_dump(STUDY))
        Folder(folder, python).snakemake()

    return Folder(made_once("study of checkpoints", run), python)


@pytest.fixture
def changed(finished, tmp_path):
    """A finished study that a test may change; times are kept."""
    shutil.copytree(finished.path, tmp_path / "study", symlinks=True)
    return Folder(tmp_path / "study", finished.python)


def test_every_checkpoint_has_its_evaluation_with_a_receipt(finished):
    for name in ("qwen", "llama"):
        table = read_table(finished.evaluation(name, "parquet"), EvaluationTable)
        assert len(table) == NUM_QUESTIONS * len(LEVELS)
        assert sorted(set(table["noise_level"])) == LEVELS
        receipts = read_json(finished.evaluation(name, "receipt.json"), EvaluationReceipts)
        assert receipts.problems() == []
        for each in receipts.passes:
            assert each.receipt.requested_scale("evaluation") == each.noise_level
            scale, numbers = each.receipt.measured_scale("evaluation")
            assert abs(scale - each.noise_level) <= 5 * each.noise_level / max(1, 2 * numbers) ** 0.5
    assert not (finished.results / "runs").exists()


def test_the_pair_is_compared_at_every_level_and_reported(finished):
    claims = json.loads((finished.results / "claims.json").read_text())["claims"]
    assert len(claims) == len(LEVELS) + 2 * (len(LEVELS) - 1) + 1
    assert not [claim for claim in claims if claim["verdict"] == "invalid"]
    page = (finished.results / "report.html").read_text()
    assert all(name in page for name in ("qwen", "llama", STUDY["report"]["question"]))
    assert finished.planned() == {}


def test_one_more_checkpoint_is_evaluated_alone(changed):
    before = {name: changed.evaluation(name, "parquet").stat().st_mtime_ns for name in ("qwen", "llama")}
    write_gpt2(changed.path / "gpt2")
    more = STUDY["checkpoints"] | {"gpt2": "./gpt2"}
    (changed.path / "mine.yaml").write_text(yaml.safe_dump(STUDY | {"checkpoints": more}))
    assert changed.planned() == AFTER_A_CHANGE
    changed.snakemake()
    receipts = read_json(changed.evaluation("gpt2", "receipt.json"), EvaluationReceipts)
    assert receipts.problems() == []
    assert {name: changed.evaluation(name, "parquet").stat().st_mtime_ns for name in before} == before
    page = (changed.results / "report.html").read_text()
    assert "gpt2" in page
    assert changed.planned() == {}


def test_other_weights_in_the_same_file_are_evaluated_again(changed):
    """Also if the run is interrupted between the copy of the weights and their evaluation."""
    before = {name: changed.responses(name) for name in ("qwen", "llama")}
    replace_weights(changed.path / "qwen" / "model.safetensors")
    assert changed.planned() == AFTER_A_CHANGE
    changed.snakemake("--until", "prepare_model")
    assert changed.planned() == {name: count for name, count in AFTER_A_CHANGE.items() if name != "prepare_model"}
    changed.snakemake()
    assert changed.responses("llama") == before["llama"]
    assert changed.responses("qwen") != before["qwen"]
    assert changed.planned() == {}


def replace_weights(path: Path) -> None:
    """Write other weights of the same shapes, as further training would; the size of the file stays the same."""
    size = path.stat().st_size
    weights = load_file(path)
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        changed = weight * (1 + 0.3 * torch.randn(weight.shape, generator=generator))
        weights[name] = changed.to(weight.dtype)
    save_file(weights, path.with_suffix(".new"), metadata={"format": "pt"})
    os.replace(path.with_suffix(".new"), path)
    assert path.stat().st_size == size
