"""The pre-training recipe of the built-in models: `python benchmarks/builtin_models.py tiny --output DIR`.

One thread and a fixed seed reproduce the same bytes on the same machine with the same library versions. Elsewhere
floating-point results may differ, so the weights are part of the package. `--probe-every` measures the accuracy on the
selection pool during training; the number of steps was chosen this way. The recorded accuracy is that of the stored
weights (rounded to bfloat16) on fresh problems of the test pool.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from rich.console import Console
from safetensors.torch import load_file, save_file
from smallest import parse

from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.config.base import FrozenModel
from aqnpipe.config.dataset import GeneratedTask
from aqnpipe.config.model import BuiltinModel
from aqnpipe.data.generated import NAMES, Difficulty, Pool, Problem, problem_stream, take_problems
from aqnpipe.data.scoring import extract_answer, is_correct
from aqnpipe.errors import DataError
from aqnpipe.models.loading import load_model, load_tokenizer
from aqnpipe.seeding import derive_seed, keyed_generator

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from tiny_tokenizer import build_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

RECIPE_FILE = "recipe.json"
IGNORED_LABEL = -100
MAX_NEW_TOKENS = 40
HEAD_DIM = 32
NUM_CHOSEN = 2
# Not 0, so that the measurement shares no random stream with a study at its default seed.
MEASURING_SEED = 20_000


@dataclass(frozen=True)
class Recipe:
    """Shape and training of a built-in model; learning rates rise linearly over the warm-up, then stay constant."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_steps: int
    task: GeneratedTask = "word_problems"
    num_layers: int = 6
    num_key_value_heads: int = 2
    # Of a mixture, whose intermediate size is that of an expert; two experts compute each token.
    num_experts: int | None = None
    seed: int = 0
    batch_size: int = 32
    warmup_steps: int = 20
    muon_learning_rate: float = 0.01
    adamw_learning_rate: float = 3e-3
    difficulty: Difficulty = field(default_factory=Difficulty)
    # The difficulty of the shipped studies: shorter problems than in pre-training, to keep training runs affordable.
    measured_difficulty: Difficulty = field(default_factory=lambda: Difficulty(max_steps=2, distractor_probability=0.0))
    # Solutions about a quarter of the people mostly lack the `####` line, like many real texts. Training then has an
    # answer format to learn besides arithmetic, as with real models.
    unmarked_names: tuple[str, ...] = tuple(NAMES[::4])
    unmarked_share: float = 0.7


RECIPES: dict[BuiltinModel, Recipe] = {
    "tiny": Recipe(hidden_size=128, intermediate_size=320, num_heads=4, num_steps=300),
    "tiny-large": Recipe(hidden_size=192, intermediate_size=480, num_heads=6, num_steps=275),
    "tiny-comparison": Recipe(hidden_size=128, intermediate_size=320, num_heads=4, num_steps=238, task="comparison"),
    "tiny-mixture": Recipe(hidden_size=128, intermediate_size=96, num_heads=4, num_steps=350, num_experts=8),
}


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """Return all settings of a recipe but the number of steps, as the record keeps them (lists, not tuples)."""
    settings = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(recipe).items()}
    del settings["num_steps"]
    return {key: value for key, value in settings.items() if value is not None}


class Accuracy(FrozenModel):
    """Greedy accuracy under the strict scorer; the standard error is the binomial one."""

    pool: Pool
    seed: int
    num_problems: int = Field(ge=1)
    num_correct: int = Field(ge=0)

    @property
    def share(self) -> float:
        """Return the share of problems answered correctly."""
        return self.num_correct / self.num_problems

    @property
    def standard_error(self) -> float:
        """Return the standard error of the share."""
        return math.sqrt(self.share * (1 - self.share) / self.num_problems)


class RecipeRecord(FrozenModel):
    """The recipe of a folder of weights, and their accuracy."""

    model: BuiltinModel
    settings: dict[str, Any]
    steps: int
    num_parameters: int
    weights_sha256: str
    torch_version: str
    accuracy: Accuracy


def build_model(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedModel":
    """Return an untrained Qwen2 model, or Qwen3-MoE for a mixture, initialised with the recipe's seed."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = recipe.num_experts
    make_config, make_model = (
        (Qwen2Config, Qwen2ForCausalLM) if experts is None else (Qwen3MoeConfig, Qwen3MoeForCausalLM)
    )
    of_experts = (
        {}
        if experts is None
        else {
            "num_experts": experts,
            "num_experts_per_tok": NUM_CHOSEN,
            "moe_intermediate_size": recipe.intermediate_size,
            "router_aux_loss_coef": 0.0,
        }
    )
    config = make_config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_key_value_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        attn_implementation="eager",
        **of_experts,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(recipe.seed, "initial_weights"))
        model = make_model(config)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


def pretraining_answer(problem: Problem, recipe: Recipe, step: int, row: int) -> str:
    """Return the solution used in pre-training, keyed by step and row; some lack their last line, `#### n`."""
    about_unmarked = problem.question.split()[0] in recipe.unmarked_names
    draw = torch.rand((), generator=keyed_generator("cpu", recipe.seed, "unmarked", step, row)).item()
    return problem.answer.rpartition("\n")[0] if about_unmarked and draw < recipe.unmarked_share else problem.answer


def encode_batch(
    questions: Sequence[str], answers: Sequence[str], tokenizer: "PreTrainedTokenizerBase"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids [B, T] of `question\\nanswer<eos>`, padded on the right, and labels [B, T] of answers only."""
    rows = []
    for question, answer in zip(questions, answers, strict=True):
        prompt_ids = tokenizer(question + "\n").input_ids
        answer_ids = [*tokenizer(answer).input_ids, tokenizer.eos_token_id]
        rows.append((prompt_ids + answer_ids, [IGNORED_LABEL] * len(prompt_ids) + answer_ids))
    length = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [tokenizer.pad_token_id] * (length - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [IGNORED_LABEL] * (length - len(labels)) for _, labels in rows])
    return ids, labels


def build_optimizers(model: "PreTrainedModel", recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers and AdamW for embeddings, norms and biases."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed_tokens" not in name else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=recipe.muon_learning_rate, weight_decay=0.0),
        torch.optim.AdamW(others, lr=recipe.adamw_learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def pretrain(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", recipe: Recipe, num_steps: int
) -> Iterator[float]:
    """Train `model` in place, each step on new problems of the pretrain pool; yield the losses (nats per token)."""
    optimizers = build_optimizers(model, recipe)
    base_rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    problems = problem_stream(recipe.seed, "pretrain", recipe.difficulty, recipe.task)
    for step in range(num_steps):
        batch = [problem for problem, _ in zip(problems, range(recipe.batch_size), strict=False)]
        if len(batch) < recipe.batch_size:
            raise DataError(f"pre-training ran out of distinct problems at step {step} with {recipe.difficulty}")
        answers = [pretraining_answer(problem, recipe, step, row) for row, problem in enumerate(batch)]
        ids, labels = encode_batch([problem.question for problem in batch], answers, tokenizer)
        model.train()
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED_LABEL)
        loss.backward()
        for optimizer, base_rate in zip(optimizers, base_rates, strict=True):
            optimizer.param_groups[0]["lr"] = base_rate * min(1.0, (step + 1) / recipe.warmup_steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        yield loss.item()


@torch.no_grad()
def answer_greedily(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", questions: list[str], batch_size: int = 250
) -> list[str]:
    """Return the model's greedy answer to each question, batched with padding on the left."""
    model.eval()
    answers: list[str] = []
    for start in range(0, len(questions), batch_size):
        prompts = [question + "\n" for question in questions[start : start + batch_size]]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        output = model.generate(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
        )
        answers += tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return answers


def count_correct(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", problems: Sequence[Problem]) -> int:
    """Return the number of problems with a correct greedy answer under the strict scorer."""
    responses = answer_greedily(model, tokenizer, [problem.question for problem in problems])
    golds = [extract_answer(problem.answer, "strict") for problem in problems]
    return sum(
        gold is not None and is_correct(response, gold, "strict")
        for response, gold in zip(responses, golds, strict=True)
    )


def measure_accuracy(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", pool: Pool, recipe: Recipe, *, num_problems: int
) -> Accuracy:
    """Return the accuracy on the first problems of a pool's stream."""
    problems = take_problems(MEASURING_SEED, pool, recipe.measured_difficulty, num_problems, recipe.task)
    num_correct = count_correct(model, tokenizer, problems)
    return Accuracy(pool=pool, seed=MEASURING_SEED, num_problems=num_problems, num_correct=num_correct)


def save_model(model: "PreTrainedModel", folder: Path) -> Path:
    """Write the model, its weights rounded to bfloat16, and its tokenizer; return the weights file."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    # A new tokenizer, because one that has padded a batch writes its padding settings into tokenizer.json.
    build_tokenizer().save_pretrained(folder)
    weights = folder / "model.safetensors"
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(weights).items()}
    save_file(rounded, weights, metadata={"format": "pt"})
    return weights


def run_recipe(
    name: BuiltinModel, output: Path, *, num_steps: int | None = None, num_problems: int = 4000, probe_every: int = 0
) -> RecipeRecord:
    """Make the built-in model `name` in `output` and return its record; `num_steps` overrides the recipe's own."""
    console = Console(stderr=True)
    recipe = RECIPES[name]
    steps = recipe.num_steps if num_steps is None else num_steps
    tokenizer = build_tokenizer()
    model = build_model(recipe, tokenizer)
    started = time.process_time()
    for step, loss in enumerate(pretrain(model, tokenizer, recipe, steps), start=1):
        if step % 50 == 0 or step == steps:
            console.print(f"{name}: step {step}/{steps}, loss {loss:.3f}, {time.process_time() - started:.0f} CPU s")
        if probe_every and step % probe_every == 0:
            probe = measure_accuracy(model, tokenizer, "selection", recipe, num_problems=500)
            console.print(f"{name}: step {step}, selection pool {probe.share:.1%} +- {probe.standard_error:.1%}")
    record = store_and_measure(name, model, output, steps=steps, num_problems=num_problems)
    accuracy = record.accuracy
    console.print(f"{name}: {accuracy.share:.1%} +- {accuracy.standard_error:.1%} of {num_problems} fresh problems")
    return record


def store_and_measure(
    name: BuiltinModel, model: "PreTrainedModel", output: Path, *, steps: int, num_problems: int
) -> RecipeRecord:
    """Write the model and its record; the accuracy is that of the weights read back from `output`."""
    recipe = RECIPES[name]
    weights = save_model(model, output)
    stored = load_model(output, dtype="float32", attention="eager")
    record = RecipeRecord(
        model=name,
        steps=steps,
        settings=settings_of(recipe),
        num_parameters=sum(parameter.numel() for parameter in stored.parameters()),
        weights_sha256=sha256_of_file(weights),
        torch_version=str(torch.__version__),
        accuracy=measure_accuracy(stored, load_tokenizer(output), "test", recipe, num_problems=num_problems),
    )
    (output / RECIPE_FILE).write_text(record.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return record


def main() -> None:
    """Pre-train a built-in model and print its record."""
    parser = argparse.ArgumentParser(description="Pre-train a built-in model and record its accuracy.")
    parser.add_argument("name", choices=RECIPES, help="built-in model to make")
    parser.add_argument("--output", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--steps", type=int, help="optimiser steps; default: the recipe's own")
    parser.add_argument("--problems", type=int, default=4000, help="fresh problems for the final measurement")
    parser.add_argument("--probe-every", type=int, default=0, help="steps between measurements on the selection pool")
    asked = parse(parser, steps=2, problems=20)
    torch.set_num_threads(1)  # the order of summation depends on the number of threads
    record = run_recipe(
        asked.name, asked.output, num_steps=asked.steps, num_problems=asked.problems, probe_every=asked.probe_every
    )
    print(record.model_dump_json(indent=2))  # noqa: T201 - the result of a script


if __name__ == "__main__":
    main()
