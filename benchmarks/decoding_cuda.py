"""Decoding speed of the transformers backend on a CUDA GPU, clean and noisy, at the shapes of Qwen2.5-1.5B.

    python benchmarks/decoding_cuda.py [--json FILE]

Random weights in bfloat16, 64 new tokens after prompts of 128, by the `TransformersBackend` of runs and evaluations.
Clean and noisy generations alternate. Besides tokens per second it reports the time of one decoding step, and how much
of it the GPU computes: where that is far below the whole, the GPU waits for Python.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from noise_overhead_cuda import DEVICE, SHAPES, noise_spec
from rich.console import Console
from rich.table import Table
from smallest import not_here, parse
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen2ForCausalLM

from aqnpipe.generation.backend import Sampling
from aqnpipe.generation.transformers_backend import TransformersBackend
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

BATCHES, ROUNDS = (1, 32, 128), 3
PROMPT_TOKENS, NEW_TOKENS = 128, 64


@dataclass(frozen=True)
class Speed:
    """Medians over the rounds; `gpu_ms_per_step` is the time in kernels, from one profiled generation."""

    attention: str
    batch: int
    noise: bool
    tokens_per_second: float
    ms_per_step: float
    gpu_ms_per_step: float


def main() -> None:
    """Measure, print the table, and write it as JSON where requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--attention", choices=("eager", "sdpa"), nargs="+", default=["eager", "sdpa"])
    arguments = parse(parser)
    if not torch.cuda.is_available():
        not_here("a CUDA device that torch finds")
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(SHAPES).to(DEVICE, torch.bfloat16).eval()
    console, speeds = Console(), []
    for attention, batch in itertools.product(arguments.attention, BATCHES):
        for speed in speeds_of(model, attention, batch):
            speeds.append(speed)
            console.print(speed, highlight=False)
    table = Table("attention", "batch", "noise", "tokens/s", "ms per step", "of these on the GPU")
    for speed in speeds:
        figures = (speed.tokens_per_second, speed.ms_per_step, speed.gpu_ms_per_step)
        noise = "5 %" if speed.noise else "none"
        table.add_row(speed.attention, str(speed.batch), noise, *(f"{figure:.1f}" for figure in figures))
    console.print(torch.cuda.get_device_name(), table)
    if arguments.json:
        machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
        arguments.json.write_text(
            json.dumps(machine | {"speeds": [asdict(speed) for speed in speeds]}, indent=2) + "\n"
        )


def speeds_of(model: Qwen2ForCausalLM, attention: str, batch: int) -> list[Speed]:
    """Measure clean and noisy decoding of `batch` rows; the receipt of the noise is checked."""
    model.set_attn_implementation(attention)
    backend = TransformersBackend(model, SimpleNamespace(eos_token_id=-1, pad_token_id=0))
    prompts = torch.randint(SHAPES.vocab_size, (batch, PROMPT_TOKENS)).tolist()
    spec, steps = noise_spec(attention, "evaluation"), itertools.count()
    num_layers = SHAPES.num_hidden_layers
    recorder = ReceiptRecorder(
        spec, expected_phases=("evaluation",), num_layers=num_layers, num_norms=2 * num_layers + 1
    )

    def clean() -> None:
        backend.generate(prompts, Sampling(max_response_tokens=NEW_TOKENS))

    def noisy() -> None:
        with phase_noise(model, spec, "evaluation", NoiseKey(seed=0, step=next(steps)), recorder):
            clean()

    works: tuple[Callable[[], None], ...] = (clean, noisy)
    for work in works:
        work()
    seconds: list[list[float]] = [[], []]
    for _ in range(ROUNDS):
        for work, taken in zip(works, seconds, strict=True):
            taken.append(seconds_of(work))
    recorder.receipt().check()
    return [
        Speed(
            attention,
            batch,
            work is noisy,
            batch * NEW_TOKENS / statistics.median(taken),
            1000 * statistics.median(taken) / NEW_TOKENS,
            1000 * gpu_seconds_of(work) / NEW_TOKENS,
        )
        for work, taken in zip(works, seconds, strict=True)
    ]


def seconds_of(work: Callable[[], None]) -> float:
    """Return the time of one call on the clock, until the GPU has finished."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def gpu_seconds_of(work: Callable[[], None]) -> float:
    """Return the time that the GPU spends in kernels during one call."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6


if __name__ == "__main__":
    main()
