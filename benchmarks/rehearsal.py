"""Rehearse a shipped study of a real model on a CPU: its own settings and widths, two layers, few questions.

    python benchmarks/rehearsal.py config/qwen2.5-1.5b.yaml --questions FOLDER --output FOLDER

`--questions` is a folder with GSM8K as train.jsonl and test.jsonl. The model has the true widths, two layers and random
weights with biases as large as Qwen2.5's. A short supervised warm-up of the output projection teaches it the answer
format, as a model that never earns a reward cannot be trained. Its tokens are byte pairs learned from the questions.
What a CPU cannot do is made smaller and printed; everything else is as shipped: number formats, phases, schedules,
receipts, comparisons. The report says nothing about the study itself.

Most weights of a model with two layers belong to its vocabulary: 233 of 327 million at 1.5B, 1,090 of 1,556 million at
7B. `--vocabulary 4096` leaves 100 and 495 million. benchmarks/rehearsal.md has the memory that was measured. Without
vLLM in the environment transformers generates.
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
from smallest import parse
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from aqnpipe.config.model import KNOWN_CONFIGS
from aqnpipe.generation.vllm.plugin import is_vllm_installed

CONSOLE = Console()
ROOT = Path(__file__).resolve().parent.parent
QUERY_BIAS, FIRST_KEY_BIAS = 20.0, 100.0
"""Sizes of biases in Qwen2.5: those of queries, and those of the first layer's keys."""

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Qwen2's own split, from which transformers rebuilds the tokenizer of every qwen2 model.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PADDING, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
NUM_TOKENS = 4096
SINGLE_DIGIT = re.compile(r"#### \d$")
WARM_UP_STEPS, UPDATES_PER_STEP, WARM_UP_ROWS, WARM_UP_PROMPT_TOKENS = 12, 4, 16, 32


def main() -> None:
    """Make the small study and run it to its report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--arms", help="arms of the study, with commas between them (default: all)")
    parser.add_argument("--vocabulary", type=int, help=f"at least {NUM_TOKENS} (default: the true one)")
    parser.add_argument("--mlp-width", type=int, help="channels inside an MLP (default: the true number)")
    parser.add_argument("--num-train", type=int, default=8)
    parser.add_argument("--num-test", type=int, default=8)
    parser.add_argument("--prompts-per-step", type=int, default=2)
    parser.add_argument("--rollouts-per-prompt", type=int, help="(default: as shipped)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--response-tokens", type=int, default=8)
    parser.add_argument("--dry-run", action="store_true", help="only plan the small study")
    options = parse(parser, layers=1, vocabulary=NUM_TOKENS, mlp_width=64, num_train=8, num_test=2, dry_run=True)
    if options.vocabulary and options.vocabulary < NUM_TOKENS:
        parser.error(f"--vocabulary: found {options.vocabulary}, expected at least {NUM_TOKENS}")
    options.output.mkdir(parents=True)
    study = yaml.safe_load(options.study.read_text(encoding="utf-8"))
    questions = write_questions(options)
    changes = make_smaller(study, options)
    for role, model in study["models"].items():
        folder = options.output / role
        config = {**KNOWN_CONFIGS[model["source"]], "num_hidden_layers": options.layers}
        for name, wanted in {"vocab_size": options.vocabulary, "intermediate_size": options.mlp_width}.items():
            if wanted:
                changes[f"models.{role}: {name}"] = config[name], wanted
                config[name] = wanted
        make_model(config, questions, study["prompt"]["instruction"], folder)
        model["source"] = str(folder.resolve())
        model.pop("revision", None)
    path = options.output / "study.yaml"
    path.write_text(yaml.safe_dump(study, sort_keys=False), encoding="utf-8")
    for key, (shipped, rehearsed) in changes.items():
        CONSOLE.print(f"{key}: {rehearsed} (shipped: {shipped})")
    started = time.monotonic()
    command = [sys.executable, "-m", "snakemake", "--cores", "2", "--configfile", str(path.resolve())]
    command += ["--dry-run"] if options.dry_run else []
    finished = subprocess.run(command, cwd=ROOT, check=False)  # noqa: S603
    CONSOLE.print(f"exit code {finished.returncode} after {(time.monotonic() - started) / 60:.0f} min")
    sys.exit(finished.returncode)


def write_questions(options: argparse.Namespace) -> list[dict[str, str]]:
    """Write the shortest real questions with a one-digit answer; return those for the warm-up, which are longer."""
    folder = options.output / "questions"
    folder.mkdir()
    chosen = {}
    for split in ("train", "test"):
        lines = (options.questions / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = sorted(
            (row for row in map(json.loads, lines) if SINGLE_DIGIT.search(row["answer"])),
            key=lambda row: len(row["question"]),
        )
        chosen[split], count = rows, options.num_train if split == "train" else options.num_test
        written = "".join(f"{json.dumps(row)}\n" for row in rows[:count])
        (folder / f"{split}.jsonl").write_text(written, encoding="utf-8")
    return chosen["train"][options.num_train :]


def make_smaller(study: dict[str, Any], options: argparse.Namespace) -> dict[str, tuple[Any, Any]]:
    """Change `study` in place to what a CPU can do; return key -> (shipped, rehearsed)."""
    training, evaluation = study["training"], study["evaluation"]
    rollouts = options.rollouts_per_prompt or training["rollouts_per_prompt"]
    sequences = options.prompts_per_step * rollouts // options.workers
    num_steps = training["epochs"] * options.num_train // options.prompts_per_step
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
        "training.prompts_per_step": options.prompts_per_step,
        "training.rollouts_per_prompt": rollouts,
        "training.num_workers": options.workers,
        "training.max_response_tokens": options.response_tokens,
        "training.checkpoint_every": num_steps // 2,
        "training.validate_every": num_steps // 2,
        "training.validation_questions": options.num_test,
        "evaluation.max_response_tokens": options.response_tokens,
        "evaluation.batch_size": options.num_test,
    }
    if (rows := training.get("micro_batch_size")) is not None:
        smaller["training.micro_batch_size"] = max(n for n in range(1, rows + 1) if sequences % n == 0)
    if not is_vllm_installed():
        smaller["generation"] = {"backend": "transformers"}
    changes = write_arms(study, options)
    if isinstance(study.get("statistics", {}).get("published"), str):
        study["statistics"]["published"] = str(ROOT / study["statistics"]["published"])
    for loss_study in study.get("loss_studies", []):
        for key, value in {"num_texts": options.num_test, "noise_seeds": loss_study["noise_seeds"][:2]}.items():
            changes[f"loss_studies.{loss_study['name']}: {key}"] = loss_study[key], value
            loss_study[key] = value
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


def write_arms(study: dict[str, Any], options: argparse.Namespace) -> dict[str, tuple[Any, Any]]:
    """Write the study's arms with AQN in layers that the small model has; return key -> (shipped, rehearsed)."""
    arms = yaml.safe_load((ROOT / "config" / study["arms_file"]).read_text(encoding="utf-8"))
    changes = {}
    for name in study["arms"]:
        aqn = arms["arms"][name].get("aqn") or {}
        if layers := aqn.get("target_layers"):
            smaller = sorted({min(layer, options.layers - 1) for layer in layers})
            if smaller != layers:
                changes[f"arms.{name}: target_layers"], aqn["target_layers"] = (layers, smaller), smaller
    path = options.output / "arms.yaml"
    path.write_text(yaml.safe_dump(arms, sort_keys=False), encoding="utf-8")
    study["arms_file"] = str(path.resolve())
    return changes


def make_model(sizes: dict[str, Any], rows: list[dict[str, str]], instruction: str, folder: Path) -> None:
    """Save a random model of these sizes that knows the answer format, with a tokenizer that has a chat template."""
    tokenizer = make_tokenizer(rows)
    torch.manual_seed(0)
    config = Qwen2Config.from_dict(
        {
            **sizes,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
        }
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.q_proj.bias.normal_(std=QUERY_BIAS)
            layer.self_attn.k_proj.bias.normal_(std=QUERY_BIAS if index else FIRST_KEY_BIAS)
            layer.self_attn.v_proj.bias.normal_(std=0.1)
    warm_up(model, tokenizer, rows, instruction)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer(rows: list[dict[str, str]]) -> PreTrainedTokenizerFast:
    """Return a tokenizer built as Qwen2.5's, with merges learned from these questions and answers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True) for token in (PADDING, START, END)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=NUM_TOKENS, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator((f"{row['question']}\n{row['answer']}" for row in rows), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PADDING,
        eos_token=END,
        chat_template=TEMPLATE,
        padding_side="left",
        model_max_length=32_768,
    )


def warm_up(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, str]], instruction: str
) -> None:
    """Teach the output head to answer a prompt's end with `#### ` and a digit, so that some groups earn a reward."""
    optimiser = torch.optim.AdamW([model.lm_head.weight], lr=1e-3, weight_decay=0.0)
    for step in range(WARM_UP_STEPS):
        batch = [rows[(step * WARM_UP_ROWS + index) % len(rows)] for index in range(WARM_UP_ROWS)]
        prompts, answers = [], []
        for row in batch:
            message = [{"role": "user", "content": f"{row['question']} {instruction}"}]
            prompt = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            prompts.append(tokenizer.encode(prompt)[-WARM_UP_PROMPT_TOKENS:])
            answers.append([*tokenizer.encode(row["answer"][-6:]), tokenizer.eos_token_id])
        length = min(map(len, answers))
        ids = torch.tensor([p + a for p, a in zip(prompts, answers, strict=True) if len(a) == length])
        with torch.no_grad():
            hidden = model.model(ids).last_hidden_state[:, -length - 1 : -1]
        for _ in range(UPDATES_PER_STEP):
            loss = torch.nn.functional.cross_entropy(model.lm_head(hidden).flatten(0, 1), ids[:, -length:].flatten())
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
        CONSOLE.print(f"warm-up step {step + 1} of {WARM_UP_STEPS}: loss {loss.item():.2f}")


if __name__ == "__main__":
    main()
