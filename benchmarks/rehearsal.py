"""Rehearse a shipped study of a real model on a CPU: its own settings and widths, two layers, few questions.

    python benchmarks/rehearsal.py config/qwen2.5-1.5b.yaml --questions FOLDER --output FOLDER

`--questions` is a folder with GSM8K as train.jsonl and test.jsonl. The model has the true widths and vocabulary, two
layers and random weights with biases as large as Qwen2.5's; a short supervised warm-up teaches it the answer format, as
a model that never earns a reward cannot be trained. What a CPU cannot do is made smaller and printed; everything else
is as shipped: number formats, arms, phases, schedules, receipts, comparisons. The report says nothing about the study
itself.

With 1.5B widths each of two workers takes about 8 GB (weights, gradients, two moments, the buckets of data parallelism
and the reference, 1.3 GB each); `--workers 1` halves that. Without vLLM in the environment transformers generates.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from aqnpipe.generation.vllm.plugin import is_vllm_installed
from aqnpipe.models.tokenizer import build_tokenizer

CONSOLE = Console()
ROOT = Path(__file__).resolve().parent.parent
WIDTHS = {
    "Qwen/Qwen2.5-1.5B-Instruct": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-7B-Instruct": {
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
        "tie_word_embeddings": False,
    },
}
QUERY_BIAS, FIRST_KEY_BIAS = 20.0, 100.0
"""Sizes of biases in Qwen2.5: those of queries, and those of the first layer's keys."""

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SINGLE_DIGIT = re.compile(r"#### \d$")
WARM_UP_STEPS, WARM_UP_ROWS, WARM_UP_PROMPT_TOKENS = 40, 16, 24


def main() -> None:
    """Make the small study and run it to its report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--arms", help="arms of the study, with commas between them (default: all)")
    parser.add_argument("--num-train", type=int, default=16)
    parser.add_argument("--num-test", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--response-tokens", type=int, default=8)
    options = parser.parse_args()
    options.output.mkdir(parents=True)
    study = yaml.safe_load(options.study.read_text(encoding="utf-8"))
    questions = write_questions(options)
    for role, model in study["models"].items():
        folder = options.output / role
        make_model(WIDTHS[model["source"]], options.layers, questions, folder)
        model["source"] = str(folder.resolve())
    changes = make_smaller(study, options)
    path = options.output / "study.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False), encoding="utf-8")
    for key, (shipped, rehearsed) in changes.items():
        CONSOLE.print(f"{key}: {rehearsed} (shipped: {shipped})")
    started = time.monotonic()
    command = [sys.executable, "-m", "snakemake", "--cores", "2", "--configfile", str(path.resolve())]
    finished = subprocess.run(command, cwd=ROOT, check=False)  # noqa: S603
    CONSOLE.print(f"exit code {finished.returncode} after {(time.monotonic() - started) / 60:.0f} min")
    sys.exit(finished.returncode)


def write_questions(options: argparse.Namespace) -> list[dict[str, str]]:
    """Write the first real questions with a one-digit answer; return those for the warm-up, which come after them."""
    folder = options.output / "questions"
    folder.mkdir()
    chosen = {}
    for split in ("train", "test"):
        lines = (options.questions / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [row for row in map(json.loads, lines) if SINGLE_DIGIT.search(row["answer"])]
        chosen[split], count = rows, options.num_train if split == "train" else options.num_test
        written = "".join(f"{json.dumps(row)}\n" for row in rows[:count])
        (folder / f"{split}.jsonl").write_text(written, encoding="utf-8")
    return chosen["train"][options.num_train :]


def make_smaller(study: dict[str, Any], options: argparse.Namespace) -> dict[str, tuple[Any, Any]]:
    """Change `study` in place to what a CPU can do; return key -> (shipped, rehearsed)."""
    training, evaluation = study["training"], study["evaluation"]
    sequences = 4 * training["rollouts_per_prompt"] // options.workers
    smaller = {
        "device": "cpu",
        "results_dir": str((options.output / "results").resolve()),
        "dataset": {
            "source": "local",
            "path": str((options.output / "questions").resolve()),
            "num_train": options.num_train,
            "num_test": options.num_test,
        },
        "arms": options.arms.split(",") if options.arms else study["arms"],
        "seeds": [0],
        "training.prompts_per_step": 4,
        "training.micro_batch_size": max(n for n in range(1, training["micro_batch_size"] + 1) if sequences % n == 0),
        "training.num_workers": options.workers,
        "training.max_response_tokens": options.response_tokens,
        "training.checkpoint_every": 2,
        "training.validate_every": 4,
        "training.validation_questions": options.num_test,
        "evaluation.max_response_tokens": options.response_tokens,
        "evaluation.batch_size": options.num_test,
    }
    if not is_vllm_installed():
        smaller["generation"] = {"backend": "transformers"}
    study["arms_file"] = str(ROOT / "config" / study["arms_file"])
    if isinstance(study.get("statistics", {}).get("published"), str):
        study["statistics"]["published"] = str(ROOT / study["statistics"]["published"])
    changes = {}
    for machine, settings in study.get("machines", {}).items():
        for fault in settings.get("faults", []):
            if fault["layer"] >= options.layers:
                changes[f"machines.{machine}: layer of the fault"] = fault["layer"], options.layers - 1
                fault["layer"] = options.layers - 1
    for key, value in smaller.items():
        section, _, name = key.rpartition(".")
        place = {"training": training, "evaluation": evaluation}.get(section, study)
        changes[key] = place.get(name), value
        place[name] = value
    return changes


def make_model(widths: dict[str, Any], num_layers: int, rows: list[dict[str, str]], folder: Path) -> None:
    """Save a random model of these widths that knows the answer format, with a tokenizer that has a chat template."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = Qwen2Config(
        **widths,
        num_hidden_layers=num_layers,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        max_position_embeddings=32_768,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.q_proj.bias.normal_(std=QUERY_BIAS)
            layer.self_attn.k_proj.bias.normal_(std=QUERY_BIAS if index else FIRST_KEY_BIAS)
            layer.self_attn.v_proj.bias.normal_(std=0.1)
    warm_up(model, tokenizer, rows)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def warm_up(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]]) -> None:
    """Teach the model to answer a prompt's end with `#### ` and a digit, so that some groups earn a reward."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(WARM_UP_STEPS):
        batch = [rows[(step * WARM_UP_ROWS + index) % len(rows)] for index in range(WARM_UP_ROWS)]
        prompts, answers = [], []
        for row in batch:
            ids = tokenizer.encode(f"{row['question'][-60:]}<|im_end|>\n<|im_start|>assistant\n")
            prompts.append(ids[-WARM_UP_PROMPT_TOKENS:])
            answers.append([*tokenizer.encode(row["answer"][-6:]), tokenizer.eos_token_id])
        length = min(map(len, answers))
        ids = torch.tensor([p + a[:length] for p, a in zip(prompts, answers, strict=True) if len(a) == length])
        hidden = model.model(ids).last_hidden_state[:, -length - 1 : -1]
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden).flatten(0, 1), ids[:, -length:].flatten())
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        CONSOLE.print(f"warm-up step {step + 1} of {WARM_UP_STEPS}: loss {loss.item():.2f}")


if __name__ == "__main__":
    main()
