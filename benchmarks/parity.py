"""The parity of the built-in models over the configurations that a CPU has, and what a capture costs.

`OMP_NUM_THREADS=1 python benchmarks/parity.py` measures the pairs of transformers and writes their section of
docs/parity.md, in some minutes; the other section stays as it is. `--with-vllm` does the same for the pairs with vLLM,
which needs its environment: `make vllm && OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/parity.py --with-vllm`.

`--speed` measures a random model of 1.5B's proportions, smaller, and prints times as multiples of one forward pass over
the same tokens. `--layers 28 --hidden 1536 --vocabulary 151936 --megabytes 200` is the whole shape (float32: 6 GB of
weights, about twice that of memory).
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from smallest import not_here, parse
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

from aqnpipe.artifacts.files import write_text
from aqnpipe.artifacts.parities import CaptureConfig, ParityFile
from aqnpipe.cli.two_machines import make_capture
from aqnpipe.config.dataset import GeneratedDataset, PromptFormat
from aqnpipe.config.model import ModelConfig
from aqnpipe.data.loader import load_problems
from aqnpipe.data.prompts import prompt_token_ids
from aqnpipe.generation.vllm.launch import vllm_version
from aqnpipe.models.loading import describe_model, load_tokenizer, source_folder
from aqnpipe.parity.capture import capture, model_facts
from aqnpipe.parity.capture_file import Capture, seal, write_capture
from aqnpipe.parity.compare import parity_of
from aqnpipe.parity.effects import Substitutions

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "parity.md"
MODELS = ("tiny", "tiny-comparison", "tiny-large")
LIBRARIES = ("torch", "transformers")
NUM_TEXTS, NUM_TOKENS = 16, 32
NUM_ROWS = 128
CONSOLE = Console(soft_wrap=True)
Pair = tuple[str, dict[str, Any], dict[str, Any]]
LOW, VLLM = {"dtype": "bfloat16"}, {"backend": "vllm"}
TRANSFORMERS_PAIRS: tuple[Pair, ...] = (
    ("bfloat16, the same twice", LOW, LOW),
    ("float32, eager and sdpa", {}, {"attention": "sdpa"}),
    ("float32, batches of 8 and 1", {}, {"batch_size": 1}),
    ("float32, 1 and 2 threads", {"decode": 0}, {"threads": 2, "decode": 0}),
    ("float32 and bfloat16", {}, LOW),
    ("bfloat16, eager and sdpa", LOW, {**LOW, "attention": "sdpa"}),
    ("bfloat16, batches of 8 and 1", LOW, {**LOW, "batch_size": 1}),
)
VLLM_PAIRS: tuple[Pair, ...] = (
    ("float32, transformers and vLLM", {}, VLLM),
    ("bfloat16, transformers and vLLM", LOW, {**LOW, **VLLM}),
    ("float32, vLLM with 1 and 2 workers", VLLM, {**VLLM, "tensor_parallel": 2}),
    ("bfloat16, vLLM with 1 and 2 workers", {**LOW, **VLLM}, {**LOW, **VLLM, "tensor_parallel": 2}),
)
HEADINGS = (
    *("model", "configurations", "verdict", "beyond rounding"),
    *("RMS, nats", "RMS of decoded", "99 %, nats", "other argmax"),
)


@dataclass(frozen=True)
class Section:
    """One section of the page, which one run measures."""

    title: str
    command: str
    pairs: tuple[Pair, ...]
    reading: str = ""


def main() -> None:
    """Write a section of docs/parity.md, or measure the speed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--with-vllm", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="default: all")
    parser.add_argument("--pairs", type=int, help="only so many pairs of configurations (default: all)")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write (default: %(default)s)")
    options = parse(parser, models=["tiny"], pairs=1, page=None)
    torch.set_num_threads(1)
    if options.speed:
        measure_speed(options.layers, options.hidden, options.vocabulary, options.megabytes)
        return
    if options.with_vllm and find_spec("vllm") is None:
        not_here("vLLM (`make vllm`)")
    section = WITH_VLLM if options.with_vllm else TRANSFORMERS
    rows = []
    for model in options.models:
        rows += [parity_row(model, pair) for pair in section.pairs[: options.pairs]]
        if options.page:
            others = sections_in(options.page.read_text())
            write_text(options.page, page_of({**others, section.title: section_of(section, rows)}))
    if options.page is None:
        CONSOLE.print(section_of(section, rows))


def parity_row(model: str, pair: Pair) -> tuple[str, ...]:
    """Return a row of the table: the parity of two configurations."""
    title, first, second = pair
    one, _ = seal(make_capture(model, config_of(first), token_ids_of(model)))
    other, _ = seal(make_capture(model, config_of(second), one.sequences, one))
    found = parity_of(one, other)
    kinds = dict.fromkeys(row.kind for row in found.operators if row.verdict in ("different algorithm", "fault"))
    scores = found.log_probabilities
    row = (
        model,
        title,
        found.verdict,
        ", ".join(kinds) or "none",
        f"{scores.rms:.2g}",
        "none" if scores.decode_rms is None else f"{scores.decode_rms:.2g}",
        f"{scores.p99:.2g}",
        f"{100 * scores.argmax_changes:.1f} %",
    )
    CONSOLE.print(" | ".join(row))
    return row


def config_of(settings: dict[str, Any]) -> CaptureConfig:
    """Return a configuration with these settings."""
    return CaptureConfig(max_rows=NUM_ROWS, **settings)


def token_ids_of(model: str) -> list[list[int]]:
    """Return the token ids of questions of the default data set."""
    tokenizer = load_tokenizer(source_folder(ModelConfig(source=model)))
    problems = load_problems(GeneratedDataset(), "test")["question"].to_list()[:NUM_TEXTS]
    return [ids[:NUM_TOKENS] for ids in prompt_token_ids(problems, PromptFormat(), tokenizer)]


def section_of(section: Section, rows: list[tuple[str, ...]]) -> str:
    """Return a section of the page, with the date and the versions of what was measured."""
    versions = [*([vllm_version()] if section is WITH_VLLM else []), *(f"{name} {version(name)}" for name in LIBRARIES)]
    measured = f"Measured on {datetime.now(UTC):%Y-%m-%d} with {', '.join(versions)}, by `{section.command}`."
    table = [HEADINGS, tuple("---" for _ in HEADINGS), *rows]
    lines = [f"| {' | '.join(row)} |" for row in table]
    return "\n\n".join(filter(None, (f"## {section.title}", measured, section.reading, "\n".join(lines))))


def sections_in(page: str) -> dict[str, str]:
    """Return the sections of a page by their titles."""
    parts = [f"## {part.strip()}" for part in page.split("\n## ")[1:]]
    return {part.splitlines()[0].removeprefix("## "): part for part in parts}


def page_of(sections: Mapping[str, str]) -> str:
    """Return docs/parity.md from its sections; one that was never measured is missing from it."""
    found = [sections[section.title] for section in (TRANSFORMERS, WITH_VLLM) if section.title in sections]
    return "\n\n".join((TEXT, *found)) + "\n"


TRANSFORMERS = Section(
    "transformers",
    "OMP_NUM_THREADS=1 python benchmarks/parity.py",
    TRANSFORMERS_PAIRS,
)
WITH_VLLM = Section(
    "vLLM",
    "OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/parity.py --with-vllm",
    VLLM_PAIRS,
    """Read on 2026-11-23:

- In float32, vLLM differs from transformers (eager attention) by rounding only, about as much as transformers' own
  attention kernels differ from each other.
- In bfloat16 six kinds of operators round at other places, the same in all three models. The first is `rotary_q` of
  layer 0: transformers rounds every step of a rotation, vLLM multiplies with rounded cos and sin in float32. vLLM's
  attention keeps scores and probabilities in float32, and its norms are of the residual stream before that is rounded.
  In `tiny` all other operators have the same bits on the same input.
- What that does: log-probabilities differ by 0.02 nats (RMS), in prefill and in decoding, and in up to 1 % of the
  places another token is the most likely. This is about what bfloat16 itself does in transformers (0.016 to 0.019):
  without any fault, the two engines come no closer in bfloat16. In `tiny`, vLLM's rotations of queries, those of keys,
  and its attention each change them by 0.027 to 0.028 nats alone in transformers' place (31 tokens, which differ by
  0.026): rounding does not add up.
- Two tensor-parallel workers in bfloat16 round `o_proj` and `down_proj` more often than one, first in layer 0,
  probably because each rounds its share of the sum before the shares are added. In `tiny` all other operators have the
  same bits. Log-probabilities differ by 0.017 to 0.018 nats. In float32 the difference is rounding.""",
)
TEXT = """# Parity of the built-in models on a CPU

Made by `benchmarks/parity.py`. A run measures one section and leaves the other as it was, because vLLM has an
environment of its own: compare the dates and versions beneath the headings before you compare their rows.

For every row it makes two captures and compares them, on the first 16 test questions of the default data set: at most
32 tokens of each, operators on 128. The second side's operators are fed the first side's values.

How to read it:

- *equal* is every bit of every operator, *rounding* is within the forward error bounds of both sides. *different
  algorithm* is within them too; the operators named beside it, in the order in which they run, round at other places.
  None of these is a fault.
- float32 against bfloat16 is *rounding*: that is the format that was asked for. Its differences of log-probabilities
  are what a user of bfloat16 lives with.
- The built-in models are tiny. Their log-probabilities differ less than those of deep models, and a CPU's kernels are
  not a GPU's.
- The last columns are over all tokens with a prediction, fewer than 500. The last four of each text are decoded, unless
  the row says nothing of them."""


def measure_speed(num_layers: int, hidden: int, vocabulary: int, megabytes: int) -> None:
    """Print what capture and parity cost, as multiples of one forward pass over the same tokens, in CPU seconds.

    Forward passes are measured before, between and behind the steps, because other work on the machine slows all of
    them down; the median counts. A step has everything that it does to a loaded model. The digest of the model's files
    is in the first step: one process reads them once, three commands three times.
    """
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=int(hidden * 8960 / 1536),
        num_hidden_layers=num_layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config).eval()
        model.config._attn_implementation = "sdpa"
        model.save_pretrained(folder)
        settings = CaptureConfig(attention="sdpa", max_bytes=megabytes * 1_000_000, num_decoded=0)
        ids = torch.randint(config.vocab_size, (32, 32)).tolist()
        forwards = [forward_seconds(model, ids, settings.batch_size)]

        def timed(step: str, run: Callable[[], Any]) -> Any:
            started = time.process_time()
            result = run()
            steps[step] = time.process_time() - started
            forwards.append(forward_seconds(model, ids, settings.batch_size))
            return result

        steps: dict[str, float] = {}
        first, _ = timed("capture", lambda: seal(capture(model, folder, str(folder), ids, settings)))
        # Without differences no operator would be substituted.
        planted = [
            module.register_forward_hook(lambda module, args, output: output * (1 + 1e-6))
            for module in model.modules()
            if isinstance(module, torch.nn.Linear) or "Norm" in type(module).__name__
        ]
        target = folder / "b.capture"
        second = timed(
            "replay", lambda: write_capture(target, capture(model, folder, str(folder), ids, settings, first))
        )
        for hook in planted:
            hook.remove()
        found = timed("parity", lambda: substituted_parity(model, folder, first, second))
        started = time.process_time()
        describe_model(folder, str(folder))
        digest = time.process_time() - started
        size = target.stat().st_size / 1e6
        parameters = sum(parameter.numel() for parameter in model.parameters())
    forward = median(forwards)
    CONSOLE.print(
        f"{num_layers} layers, {parameters / 1e6:.0f} M parameters, 1,024 tokens, {first.sample.num_rows} recorded, "
        f"{len(found.substitution.alone)} kinds of operators substituted"
    )
    spread = f"{min(forwards):.1f} to {max(forwards):.1f}"
    CONSOLE.print(
        f"one forward pass: {forward:.1f} s ({spread}); second capture {size:.0f} MB; verdict {found.verdict}"
    )
    for step, seconds in steps.items():
        CONSOLE.print(f"{step}: {seconds:.1f} s, {seconds / forward:.2f} forward passes")
    whole = sum(steps.values())
    CONSOLE.print(f"in all, in one process: {whole / forward:.2f} forward passes")
    CONSOLE.print(
        f"as three commands, each of which reads the model's files for their digest, {digest:.1f} s: "
        f"{(whole + 2 * digest) / forward:.2f} forward passes"
    )


def substituted_parity(model: Qwen2ForCausalLM, folder: Path, first: Capture, second: Capture) -> ParityFile:
    """Return the parity of two captures, as `aqnpipe parity --model` makes it."""
    model_facts(folder, str(folder))
    return parity_of(first, second, lambda sides: Substitutions(model, sides).measured())


def forward_seconds(model: Qwen2ForCausalLM, ids: list[list[int]], batch_size: int) -> float:
    """Return the time of a forward pass over all sequences, in batches."""
    started = time.process_time()
    with torch.no_grad():
        for first in range(0, len(ids), batch_size):
            model(
                input_ids=torch.tensor(ids[first : first + batch_size]),
                past_key_values=DynamicCache(config=model.config),
                use_cache=True,
            )
    return time.process_time() - started


if __name__ == "__main__":
    main()
