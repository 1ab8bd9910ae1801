"""How well the first-order estimate ranks layers: against the measured loss, on models of several kinds.

`OMP_NUM_THREADS=1 python benchmarks/sensitivity.py` measures the three built-in models, two models of other
architectures that it trains on the same questions, and two with random weights. For each it prints Spearman's rank
correlation over layers between the loss measured with noise in one layer at a time and (a) the estimate, (b) the
metrics of the published scans. Loss only; the receipts of all passes are checked.
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from smallest import parse
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from aqnpipe.artifacts.diagnoses import Sensitivity
from aqnpipe.config.dataset import GeneratedDataset, PromptFormat
from aqnpipe.config.diagnosis import DiagnosisConfig, SigmaRule
from aqnpipe.config.model import ModelConfig
from aqnpipe.data.loader import load_problems
from aqnpipe.diagnosis.api import diagnose_model
from aqnpipe.diagnosis.sensitivity.first_order import ScoredText, summed_losses, text_batches, texts_of_problems
from aqnpipe.diagnosis.sensitivity.layers import rank_correlation, sensitivity
from aqnpipe.diagnosis.sigmas import layer_sigmas
from aqnpipe.models.loading import load_model, load_tokenizer, source_folder

BUILTIN = ("tiny", "tiny-large", "tiny-comparison")
SHOWN = ("gain", "kurtosis", "published sigma")
PUBLISHED = ("gain", "kurtosis", "instability")
SHAPE = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "attn_implementation": "eager",
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, tuple[type, type]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def texts_for(task: str, tokenizer: Any, split: str, number: int) -> list[ScoredText]:
    """Return questions of a generated task with gold solutions."""
    data = GeneratedDataset(task=task, num_train=max(number, 10), num_test=max(number, 10))
    return texts_of_problems(load_problems(data, split).head(number), PromptFormat(), tokenizer)


def new_model(family: str, vocabulary_size: int, seed: int) -> Any:
    """Return a model of 6 layers and 96 channels with random weights."""
    config, model = FAMILIES[family]
    torch.manual_seed(seed)
    return model(config(vocab_size=vocabulary_size, **SHAPE)).eval()


def train(model: Any, texts: list[ScoredText], steps: int, seed: int) -> None:
    """Train all weights with AdamW on batches of 32 gold solutions."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20)
        chosen = [texts[i] for i in torch.randint(len(texts), (32,), generator=generator)]
        losses = [summed_losses(model, batch).sum() for batch in text_batches(chosen, vocabulary, torch.device("cpu"))]
        loss = torch.stack(losses).sum() / sum(text.num_scored for text in chosen)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def builtin_models() -> Iterator[tuple[str, Any, Any, str]]:
    """Yield name, model, tokenizer and task of the built-in models."""
    for name in BUILTIN:
        folder = source_folder(ModelConfig(source=name))
        model = load_model(folder, dtype="float32", attention="eager", device="cpu")
        yield name, model, load_tokenizer(folder), "comparison" if name == "tiny-comparison" else "word_problems"


def other_models(steps: int) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield name, model, tokenizer and task of models that are trained for `steps`, and of random ones."""
    tokenizer = load_tokenizer(source_folder(ModelConfig(source="tiny")))
    texts = texts_for("word_problems", tokenizer, "train", 2000)
    for seed, family in enumerate(("llama", "gemma2")):
        model = new_model(family, len(tokenizer), seed)
        train(model, texts, steps, seed)
        yield f"{family}, {steps} steps", model.eval(), tokenizer, "word_problems"
    for seed, family in enumerate(("llama", "qwen3"), start=2):
        yield f"{family}, random", new_model(family, len(tokenizer), seed), tokenizer, "word_problems"


def published_correlations(model: Any, texts: list[ScoredText], measured: Sensitivity) -> dict[str, float | None]:
    """Return the rank correlation of the measured loss with the published metrics and the sigmas of their rule."""
    prompts = [torch.tensor(text.token_ids[: text.prompt_tokens]) for text in texts[:5]]
    diagnosed = diagnose_model(model, prompts, DiagnosisConfig())
    increases = [layer.loss_increase for layer in measured.layers if layer.layer is not None]
    if (table := diagnosed.table) is None:
        raise SystemExit(f"no scan of {type(model).__name__}: {diagnosed.verdict.reason}")
    columns = {name: table[name].to_list() for name in PUBLISHED}
    sigmas = layer_sigmas(table, diagnosed.verdict, SigmaRule(), "published").aqn.layer_sigmas
    columns["published sigma"] = [sigmas[layer] for layer in sorted(sigmas)]
    return {name: rank_correlation(values, increases) for name, values in columns.items()}


def ordered_pairs(measured: Sensitivity) -> tuple[int, int]:
    """Return how many pairs of layers the estimate orders as the loss does, and how many the loss tells apart.

    The loss tells two layers apart if it differs by more than two standard errors, taken as independent.
    """
    right = told_apart = 0
    for one, other in itertools.combinations(measured.layers[:-1], 2):
        difference = one.loss_increase - other.loss_increase
        error = math.hypot(one.loss_standard_error or 0.0, other.loss_standard_error or 0.0)
        if abs(difference) > 2 * error:
            told_apart += 1
            right += (one.estimate > other.estimate) == (difference > 0)
    return right, told_apart


def main() -> None:
    """Print a row per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--noise-seeds", type=int, default=4)
    parser.add_argument("--scale", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=150, help="training steps of the two briefly trained models")
    parser.add_argument("--only", choices=["builtin", "others"], help="measure only some of the models")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    arguments = parse(parser, texts=4, noise_seeds=1, steps=1, only="builtin")
    torch.set_num_threads(1)
    chosen = itertools.chain(
        builtin_models() if arguments.only != "others" else (),
        other_models(arguments.steps) if arguments.only != "builtin" else (),
    )
    header = ("model", "layers", "loss", "estimate", "pairs", "estimate / measured", "fragile", *SHOWN, "s")
    _say(f"| {' | '.join(header)} |")
    _say("|---|---|---|---|---|---|---|---|---|---|---|")
    results = []
    for name, model, tokenizer, task in chosen:
        started = time.process_time()
        texts = texts_for(task, tokenizer, "test", arguments.texts)
        measured = sensitivity(model, texts, scale=arguments.scale, noise_seeds=range(arguments.noise_seeds))
        others = published_correlations(model, texts, measured)
        _say(_row(name, measured, others, time.process_time() - started))
        results.append({"model": name, "measured": measured.model_dump(), "published": others})
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


def _say(line: str) -> None:
    Console(soft_wrap=True).print(line, highlight=False, markup=False)


def _row(name: str, measured: Sensitivity, others: dict[str, float | None], seconds: float) -> str:
    layers = measured.layers[:-1]
    ratio = sum(layer.estimate for layer in layers) / sum(layer.loss_increase for layer in layers)
    fragile = ", ".join(map(str, measured.fragile_layers)) or "none shown"
    cells = [
        name,
        str(len(layers)),
        f"{measured.loss:.3f}",
        _signed(measured.rank_correlation),
        "{} of {}".format(*ordered_pairs(measured)),
        f"{ratio:.2f}",
        fragile,
        *(_signed(others[column]) for column in SHOWN),
        f"{seconds:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def _signed(value: float | None) -> str:
    return "same in all" if value is None else f"{value:+.2f}"


if __name__ == "__main__":
    main()
