"""Cost of operator noise on one CPU thread, as ratios measured alternately in one run.

    OMP_NUM_THREADS=1 python benchmarks/noise_overhead.py [--json FILE]

Prints medians of CPU-time ratios over `ROUNDS` rounds: noise on one tensor relative to the naive formula; and a
generation and a training step of the tiny model relative to the same without noise. These run with noise, on a fixed
machine, with everything except the noise kernel, and with the naive formula instead of the kernel. Then the peak memory
of a training step. The CPU time is that of this process. Other work on the machine affects it less than wall time, but
not zero (shared caches). Quote the ratios, not the seconds.
"""

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Literal
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from smallest import parse
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from aqnpipe.config.model import builtin_folder
from aqnpipe.config.noise import NoiseSpec, OperatorNoise, OperatorSet, Phase, RelativeGaussian
from aqnpipe.generation.backend import Sampling
from aqnpipe.generation.transformers_backend import TransformersBackend
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.models.loading import load_model, load_tokenizer
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.kernels.gaussian import NoiseStream, add_relative_gaussian_
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

PROMPT_TOKENS, RESPONSE_TOKENS = 36, 24
"""As long as the longest ones of the default study."""

Kind = OperatorSet | Literal["fixed machine"]
"""Operators with noise that is new in every call, or matrix products with the error of a fixed machine."""

TARGETS = {
    "generation, matmul": 1.25,
    "training step, matmul": 1.3,
    "generation, all": 1.4,
    "training step, all": 1.4,
}
"""Highest ratios to the same without noise that are aimed at."""


def seconds(work: Callable[[], object]) -> float:
    """Return the CPU time of one call."""
    started = time.process_time()
    work()
    return time.process_time() - started


def ratios(rounds: int, ours: Callable[[], object], reference: Callable[[], object]) -> list[float]:
    """Return the time of `ours` over the time of `reference`, measured alternately after one warm-up of each."""
    ours(), reference()
    return [seconds(ours) / seconds(reference) for _ in range(rounds)]


def noise_spec(kind: Kind | None, phases: tuple[Phase, ...]) -> NoiseSpec:
    """Return 5 % noise of a kind in `phases`, or no noise."""
    if kind is None:
        return NoiseSpec()
    is_fixed = kind == "fixed machine"
    error = RelativeGaussian(scale=0.05, redraw="never" if is_fixed else "always")
    operators: OperatorSet = "matmul" if is_fixed else kind
    return NoiseSpec(operator_noise=OperatorNoise(operators=operators, error=error, phases=phases))


def recorder_of(spec: NoiseSpec, phase: Phase) -> ReceiptRecorder:
    """Return a recorder that expects `spec` in `phase` of the tiny model."""
    return ReceiptRecorder(spec, expected_phases=(phase,), num_layers=6, num_norms=13)


def naive(tensor: Tensor, scale: float, source: NoiseStream) -> Tensor:
    """Add noise by the naive formula."""
    return tensor.copy_(tensor + torch.randn_like(tensor) * tensor.abs() * scale)


def no_kernel(tensor: Tensor, scale: float, source: NoiseStream) -> Tensor:
    """Add nothing, to measure the cost of everything but the kernel."""
    return tensor


@contextlib.contextmanager
def in_place_of_the_kernel(replacement: Callable[[Tensor, float, NoiseStream], Tensor]) -> Iterator[None]:
    """Replace the noise kernel of injections by `replacement`."""
    with mock.patch("aqnpipe.noise.kernels.error_models.add_relative_gaussian_", replacement):
        yield


def peak_bytes(operators: Kind | None, sequences: int) -> int:
    """Return the peak bytes of all tensors in a training step, including weights and gradients.

    torch's allocator is asked: a dispatch mode does not see what the kernels of a simulated machine allocate.
    """
    work = Work(sequences)
    work.train_step(operators)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        work.train_step(operators)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    allocated = max(event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]")
    return int(allocated) + sum(weight.nbytes for weight in work.model.parameters())


class Work:
    """The tiny model and the two pieces of work; recorders live as long as in a run of many steps."""

    def __init__(self, sequences: int) -> None:
        folder = builtin_folder("tiny")
        self.model = load_model(folder, dtype="float32", attention="eager")
        tokenizer = load_tokenizer(folder)
        # All answers have the same length; otherwise noise would change the amount of work.
        self.backend = TransformersBackend(self.model, SimpleNamespace(eos_token_id=-1, pad_token_id=0))
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(5, len(tokenizer), (sequences, PROMPT_TOKENS), generator=generator)
        self.step = 0
        self.recorders: dict[tuple[Phase, Kind | None], ReceiptRecorder] = {}

    def _recorder(self, spec: NoiseSpec, phase: Phase, operators: Kind | None) -> ReceiptRecorder:
        return self.recorders.setdefault((phase, operators), recorder_of(spec, phase))

    def generate(self, operators: Kind | None) -> None:
        """Answer the prompts under noise on `operators`."""
        self.step += 1
        spec = noise_spec(operators, ("evaluation",))
        recorder = self._recorder(spec, "evaluation", operators)
        with phase_noise(self.model, spec, "evaluation", NoiseKey(seed=0, step=self.step), recorder):
            self.backend.generate(self.ids.tolist(), Sampling(max_response_tokens=RESPONSE_TOKENS))

    def train_step(self, operators: Kind | None) -> None:
        """Forward and backward under noise on `operators`."""
        self.step += 1
        ids = self.ids
        spec = noise_spec(operators, ("actor_forward", "backward"))
        recorder = self._recorder(spec, "actor_forward", operators)
        key = NoiseKey(seed=0, step=self.step)
        with phase_noise(self.model, spec, "actor_forward", key, recorder, backward=True):
            self.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        recorder.add("backward", passes=1)
        recorder.settle()
        self.model.zero_grad()

    def check(self) -> None:
        """Check the receipts, so that no times are reported for missing noise."""
        for recorder in self.recorders.values():
            recorder.receipt().check()


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21, help="of each measurement (default: %(default)s)")
    parser.add_argument(
        "--sequences", type=int, default=128, help="(default: 16 prompts with 8 answers each, as the default study)"
    )
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    arguments = parse(parser, rounds=1, sequences=4)
    torch.set_num_threads(1)
    work = Work(arguments.sequences)
    output, source = torch.randn(arguments.sequences * PROMPT_TOKENS, 320), NoiseStream(key=1)
    rows: list[tuple[str, str, list[float]]] = [
        (
            "noise on one tensor",
            "naive x + randn_like(x)*x.abs()*s",
            ratios(
                arguments.rounds,
                lambda: add_relative_gaussian_(output, 0.05, source),
                lambda: output + torch.randn_like(output) * output.abs() * 0.05,
            ),
        )
    ]
    pieces: tuple[tuple[str, Callable[[Kind | None], None]], ...] = (
        ("generation", work.generate),
        ("training step", work.train_step),
    )
    for operators in ("matmul", "all", "fixed machine"):
        for name, piece in pieces:
            found = ratios(arguments.rounds, partial(piece, operators), partial(piece, None))
            rows.append((f"{name}, {operators}", "clean", found))
    work.check()
    for what, replacement in (("without the kernel", no_kernel), ("naive", naive)):
        with in_place_of_the_kernel(replacement):
            for name, piece in pieces:
                found = ratios(arguments.rounds, partial(piece, "matmul"), partial(piece, None))
                rows.append((f"{name}, matmul, {what}", "clean", found))
    table = Table("what", "against", "median ratio", "lowest", "highest", title="CPU time")
    for what, against, found in rows:
        table.add_row(what, against, *(f"{value:.2f}" for value in (statistics.median(found), min(found), max(found))))
    console = Console(width=100)
    console.print(table)
    if arguments.json:
        figures = [
            {
                "what": what,
                "against": against,
                "median": statistics.median(found),
                "lowest": min(found),
                "highest": max(found),
                "target": TARGETS.get(what),
                "tokens_per_second": None,
            }
            for what, against, found in rows
        ]
        arguments.json.write_text(json.dumps({"ratios": figures}, indent=2) + "\n")

    peaks = {operators: peak_bytes(operators, arguments.sequences) for operators in (None, "matmul", "all")}
    memory = Table("training step", "peak of all tensors, MiB", "ratio to clean", title="memory")
    for name, peak in peaks.items():
        memory.add_row(str(name or "clean"), f"{peak / 2**20:.1f}", f"{peak / peaks[None]:.3f}")
    console.print(memory)


if __name__ == "__main__":
    main()
