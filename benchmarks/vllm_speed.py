"""Throughput of evaluation on a CPU: transformers and vLLM, clean and noised, in turn in one run.

`make vllm && OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/vllm_speed.py` prints tokens per second of wall time,
CPU seconds of all processes of a backend, and ratios of CPU time per token: median, lowest and highest round. Every
receipt is checked, so every noised pass contains its noise.
"""

import argparse
import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch
from rich.console import Console
from smallest import not_here, parse
from transformers import Qwen2Config, Qwen2ForCausalLM

from aqnpipe.config.dataset import GeneratedDataset
from aqnpipe.config.model import builtin_folder
from aqnpipe.config.noise import OperatorNoise, RelativeGaussian
from aqnpipe.data.generated import generate_problems
from aqnpipe.generation.backend import Sampling
from aqnpipe.generation.noisy_passes import NoisyGenerator, PassNoise, TransformersPasses, pass_receipt
from aqnpipe.generation.vllm.engine import VllmEngine
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.models.loading import load_model

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from tiny_tokenizer import build_tokenizer

CONSOLE = Console(width=200)
NOISES = {
    "clean": PassNoise(),
    "matmul": PassNoise(
        operator_noise=OperatorNoise(error=RelativeGaussian(scale=0.05), phases=("evaluation",), attention="fused")
    ),
}


def cpu_seconds() -> float:
    """Return the CPU time of this process and its children."""
    parent = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (parent, *parent.children(recursive=True)))


def evaluation(
    generator: NoisyGenerator, prompts: list[list[int]], batch_size: int, response_tokens: int, noise: PassNoise
) -> tuple[float, float, int]:
    """Run a pass over all prompts, by length as in the evaluate stage; return wall and CPU seconds and tokens."""
    prompts = sorted(prompts, key=len)
    wall, cpu, tokens = time.perf_counter(), cpu_seconds(), 0
    generator.begin_pass(noise)
    for number, start in enumerate(range(0, len(prompts), batch_size)):
        batch = prompts[start : start + batch_size]
        completions = generator.generate(batch, Sampling(response_tokens), NoiseKey(seed=0, step=number))
        tokens += sum(len(completion.token_ids) for completion in completions)
    pass_receipt(noise, [generator.end_pass()]).check()
    return time.perf_counter() - wall, cpu_seconds() - cpu, tokens


def save_wide_model(folder: Path) -> None:
    """Write a random model, 6 layers of 384 channels, whose products take longer than the calls around them."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def measure(name: str, folder: Path, arguments: argparse.Namespace) -> None:
    """Print the rows of one model."""
    tokenizer = build_tokenizer()
    problems = generate_problems(GeneratedDataset(num_test=arguments.questions), "test")
    prompts = [tokenizer(problem.question)["input_ids"] for problem in problems]
    longest = max(map(len, prompts)) + arguments.tokens
    engine = VllmEngine(
        folder,
        end_token=tokenizer.eos_token_id,
        dtype="float32",
        max_tokens=longest,
        batch_size=arguments.batch_size,
        device="cpu",
    )
    backends: dict[str, NoisyGenerator] = {
        "transformers": TransformersPasses(load_model(folder, dtype="float32", attention="sdpa"), tokenizer),
        "vllm": engine,
    }
    runs: dict[tuple[str, str], list[tuple[float, float, int]]] = {}
    with engine:
        for round_number in range(arguments.rounds + 1):
            for noise_name, noise in NOISES.items():
                for backend_name, backend in backends.items():
                    measured = evaluation(backend, prompts, arguments.batch_size, arguments.tokens, noise)
                    if round_number:  # the first round warms up
                        runs.setdefault((backend_name, noise_name), []).append(measured)
    for (backend_name, noise_name), rounds in runs.items():
        rate = statistics.median(tokens / wall for wall, _, tokens in rounds)
        cpu = statistics.median(seconds for _, seconds, _ in rounds)
        CONSOLE.print(f"| {name} | {backend_name} | {noise_name} | {rate:.0f} | {cpu:.2f} |")
    for label, above, below in (
        ("vLLM clean against transformers clean", ("vllm", "clean"), ("transformers", "clean")),
        ("vLLM noised against transformers noised", ("vllm", "matmul"), ("transformers", "matmul")),
        ("vLLM noised against clean", ("vllm", "matmul"), ("vllm", "clean")),
        ("transformers noised against clean", ("transformers", "matmul"), ("transformers", "clean")),
    ):
        ratios = sorted((a[1] / a[2]) / (b[1] / b[2]) for a, b in zip(runs[above], runs[below], strict=True))
        CONSOLE.print(f"| {name} | {label} | {statistics.median(ratios):.2f} | {ratios[0]:.2f} | {ratios[-1]:.2f} |")


def main() -> None:
    """Measure the built-in model and a wider one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds, after one to warm up (default 5)")
    parser.add_argument("--questions", type=int, default=64, help="number of generated questions (default 64)")
    parser.add_argument("--batch-size", type=int, default=32, help="prompts per batch (default 32)")
    parser.add_argument("--tokens", type=int, default=24, help="limit of tokens per response (default 24)")
    arguments = parse(parser, rounds=1, questions=4, tokens=4)
    if find_spec("vllm") is None:
        not_here("vLLM (`make vllm`)")
    torch.set_num_threads(1)
    measure("tiny", builtin_folder("tiny"), arguments)
    with tempfile.TemporaryDirectory() as folder:
        save_wide_model(Path(folder))
        measure("wide", Path(folder), arguments)


if __name__ == "__main__":
    main()
