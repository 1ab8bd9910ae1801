"""Cost of operator noise on a CUDA GPU at the shapes of Qwen2.5-1.5B, as ratios measured alternately in one run.

    python benchmarks/noise_overhead_cuda.py [--json FILE]

Random weights in bfloat16. Each round runs the clean work, the noisy one and the naive formula
`x + randn_like(x)*x.abs()*s` one after the other, so a busy machine slows all of them: quote the ratios. Prefill, a
training step (forward and backward, no gradient checkpointing) and a generation, each with eager attention (noise in
its products) and with sdpa (one operator); then the kernels alone. Memory is the peak of the step, weights included.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from smallest import not_here, parse
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from aqnpipe.config.noise import NoiseSpec, OperatorNoise, Phase, RelativeGaussian
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.kernels.gaussian import NoiseStream, add_relative_gaussian_
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

DEVICE = "cuda"
ROUNDS, GENERATION_ROUNDS, WARM_UPS = 10, 4, 2
SCALE = 0.05
SHAPES = Qwen2Config(
    vocab_size=151936,
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)
PREFILL, TRAINING, GENERATION = (4, 1024), (4, 512), (32, 128)
"""Sequences and tokens in each."""
Noise = Callable[[], AbstractContextManager[ReceiptRecorder | None]]
"""Turns noise on; yields the recorder that has to audit the backward pass, None where there is none."""

NEW_TOKENS = 64
KERNEL_ROWS, KERNEL_COLUMNS = 4096, (1536, 8960)

TARGETS = {"prefill": 1.20, "training step": 1.15, "noise in the epilogue": 1.05}
"""Highest ratios to the same without noise that are aimed at, by what is measured."""

MEMORY_TARGETS = {"training step": 1.02}
TOKENS = {"prefill": math.prod(PREFILL), "training step": math.prod(TRAINING), "generation": GENERATION[0] * NEW_TOKENS}


@dataclass(frozen=True)
class Ratio:
    """`what` against `against`: time ratios over the rounds, and the ratio of peak memory.

    `milliseconds`: median time of `what`.
    """

    what: str
    against: str
    milliseconds: float
    median: float
    lowest: float
    highest: float
    memory: float

    def figures(self) -> list[dict[str, Any]]:
        """Return the time, and the memory where it has a target, each with its target; naive noise has none."""
        kind, *details = self.what.split(", ")
        ours = "naive" not in details
        rate = 1000 * TOKENS[kind] / self.milliseconds if kind in TOKENS else None
        found = [{**asdict(self), "target": TARGETS.get(kind) if ours else None, "tokens_per_second": rate}]
        if ours and kind in MEMORY_TARGETS:
            of_memory = {"median": self.memory, "lowest": self.memory, "highest": self.memory}
            target = {"target": MEMORY_TARGETS[kind], "tokens_per_second": None}
            found.append({"what": f"{self.what}, peak memory", "against": self.against, **of_memory, **target})
        return found


def main() -> None:
    """Measure, print the table, and write it as JSON where requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    arguments = parse(parser)
    if not torch.cuda.is_available():
        not_here("a CUDA device that torch finds")
    torch.manual_seed(0)
    console, ratios = Console(), []
    for ratio in itertools.chain(kernel_ratios(), model_ratios()):
        ratios.append(ratio)
        console.print(
            f"{ratio.what}: {ratio.median:.3f} of {ratio.against}, {ratio.milliseconds:.2f} ms", highlight=False
        )
    table = Table("what", "against", "ms", "median ratio", "lowest", "highest", "peak memory")
    for ratio in ratios:
        figures = (ratio.median, ratio.lowest, ratio.highest, ratio.memory)
        table.add_row(ratio.what, ratio.against, f"{ratio.milliseconds:.2f}", *(f"{figure:.3f}" for figure in figures))
    console.print(torch.cuda.get_device_name(), table)
    if arguments.json:
        machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
        arguments.json.write_text(
            json.dumps(machine | {"ratios": [figure for ratio in ratios for figure in ratio.figures()]}, indent=2)
            + "\n"
        )


# -- the work ----------------------------------------------------------------------------------------------------------


def model_ratios() -> Iterator[Ratio]:
    """Measure prefill, training step and generation of the whole model, noisy and naive against clean."""
    model = Qwen2ForCausalLM(SHAPES).to(DEVICE, torch.bfloat16).eval()
    for attention in ("eager", "sdpa"):
        for measure in (prefill_ratios, training_ratios, generation_ratios):
            yield from measure(model, attention)


def prefill_ratios(model: Qwen2ForCausalLM, attention: str) -> list[Ratio]:
    """Measure one forward pass over a batch of prompts."""
    spec, ids = noise_spec(attention, "evaluation"), random_ids(*PREFILL)

    @torch.no_grad()
    def prefill(noise: Noise) -> None:
        with noise():
            model(input_ids=ids, use_cache=False, logits_to_keep=1)

    return in_each_way(f"prefill, {attention}", model, attention, spec, "evaluation", prefill)


def training_ratios(model: Qwen2ForCausalLM, attention: str) -> list[Ratio]:
    """Measure forward and backward; gradients of the weights are dropped afterwards."""
    spec, ids = noise_spec(attention, "actor_forward", "backward"), random_ids(*TRAINING)

    def step(noise: Noise) -> None:
        with noise() as recorder:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        if recorder is not None:
            recorder.add("backward", passes=1)
        model.zero_grad()

    return in_each_way(f"training step, {attention}", model, attention, spec, "actor_forward", step)


def generation_ratios(model: Qwen2ForCausalLM, attention: str) -> list[Ratio]:
    """Measure greedy decoding with a key-value cache."""
    spec, ids = noise_spec(attention, "evaluation"), random_ids(*GENERATION)

    @torch.no_grad()
    def generate(noise: Noise) -> None:
        with noise():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )

    return in_each_way(f"generation, {attention}", model, attention, spec, "evaluation", generate, GENERATION_ROUNDS)


def in_each_way(
    what: str,
    model: Qwen2ForCausalLM,
    attention: str,
    spec: NoiseSpec,
    phase: Phase,
    work: Callable[[Noise], None],
    rounds: int = ROUNDS,
) -> list[Ratio]:
    """Run `work` clean, with our noise and with the naive one; the receipt of ours is checked."""
    model.set_attn_implementation(attention)
    num_layers = SHAPES.num_hidden_layers
    phases = spec.operator_noise.phases if spec.operator_noise else ()
    recorder = ReceiptRecorder(spec, expected_phases=phases, num_layers=num_layers, num_norms=2 * num_layers + 1)
    # Fresh noise in every call: the receipt's bounds are those of independent samples.
    steps, trains = itertools.count(), phase == "actor_forward"

    @contextmanager
    def ours() -> Iterator[ReceiptRecorder]:
        with phase_noise(model, spec, phase, NoiseKey(seed=0, step=next(steps)), recorder, backward=trains):
            yield recorder

    found = ratios_to_first(
        {"clean": lambda: work(nullcontext), what: lambda: work(ours), f"{what}, naive": lambda: work(naive)}, rounds
    )
    recorder.receipt().check()
    return found


def kernel_ratios() -> Iterator[Ratio]:
    """Measure noise on one tensor, and a product with noise by each method against the clean product."""
    from gemm_cuda import matmul_with_relative_error

    source = NoiseStream(key=1)
    for columns in KERNEL_COLUMNS:
        y = torch.randn(KERNEL_ROWS, columns, device=DEVICE, dtype=torch.bfloat16)
        size = f"{KERNEL_ROWS} x {columns}"
        yield from ratios_to_first(
            {
                f"y.mul_(1), {size}": lambda y=y: y.mul_(1),
                f"noise on one tensor, {size}": lambda y=y: add_relative_gaussian_(y, SCALE, source),
                f"noise on one tensor, {size}, naive": lambda y=y: naive_error(y),
            }
        )
        a = torch.randn(KERNEL_ROWS, SHAPES.hidden_size, device=DEVICE, dtype=torch.bfloat16)
        b = torch.randn(columns, SHAPES.hidden_size, device=DEVICE, dtype=torch.bfloat16).t()
        yield from ratios_to_first(
            {
                f"a @ b, {size}": lambda a=a, b=b: a @ b,
                f"product, then noise, {size}": lambda a=a, b=b: add_relative_gaussian_(a @ b, SCALE, source),
                f"noise in the epilogue, {size}": lambda a=a, b=b: matmul_with_relative_error(a, b, SCALE, source),
                f"product, then noise, {size}, naive": lambda a=a, b=b: naive_error(a @ b),
            }
        )


def noise_spec(attention: str, *phases: Phase) -> NoiseSpec:
    """Return relative noise on all matrix products in `phases`."""
    noise = OperatorNoise(
        error=RelativeGaussian(scale=SCALE),
        phases=phases,
        attention="fused" if attention == "sdpa" else "decomposed",
    )
    return NoiseSpec(operator_noise=noise)


def random_ids(sequences: int, tokens: int) -> Tensor:
    """Return token ids of shape (sequences, tokens)."""
    return torch.randint(SHAPES.vocab_size, (sequences, tokens), device=DEVICE)


# -- the naive formula of the published experiments --------------------------------------------------------------------


def naive_error(x: Tensor) -> Tensor:
    """Return `x` with relative noise by separate operations."""
    return x + torch.randn_like(x) * x.abs() * SCALE


class _NaiveError(torch.autograd.Function):
    """Noise on the way forward, on the way back, or both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, on_value: bool, on_gradient: bool) -> Tensor:
        ctx.on_gradient = on_gradient
        return naive_error(x) if on_value else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return naive_error(gradients[0]) if ctx.on_gradient else gradients[0], None, None


class _NaiveMode(TorchFunctionMode):
    """Naive noise on every matrix product and on the gradients of its operands."""

    FUNCTIONS = (F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, F.scaled_dot_product_attention)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func not in self.FUNCTIONS:
            return func(*args, **(kwargs or {}))
        operands = [_NaiveError.apply(x, False, True) if isinstance(x, Tensor) and x.requires_grad else x for x in args]
        return _NaiveError.apply(func(*operands, **(kwargs or {})), True, False)


@contextmanager
def naive() -> Iterator[None]:
    """Turn naive noise on."""
    with _NaiveMode():
        yield


# -- measuring ---------------------------------------------------------------------------------------------------------


def ratios_to_first(works: Mapping[str, Callable[[], object]], rounds: int = ROUNDS) -> list[Ratio]:
    """Run all works in turn, round by round; return time and peak memory of each as ratios to the first work's."""
    for work in works.values():
        for _ in range(WARM_UPS):
            work()
    seconds: dict[str, list[float]] = {what: [] for what in works}
    memory = dict.fromkeys(works, 0)
    for _ in range(rounds):
        for what, work in works.items():
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            started = time.perf_counter()
            work()
            torch.cuda.synchronize()
            seconds[what].append(time.perf_counter() - started)
            memory[what] = max(memory[what], torch.cuda.max_memory_allocated())
    first, *others = works
    found = []
    for what in others:
        times = [ours / reference for ours, reference in zip(seconds[what], seconds[first], strict=True)]
        milliseconds = 1000 * statistics.median(seconds[what])
        memory_ratio = memory[what] / memory[first]
        found.append(Ratio(what, first, milliseconds, statistics.median(times), min(times), max(times), memory_ratio))
    return found


if __name__ == "__main__":
    main()
