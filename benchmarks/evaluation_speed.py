"""Throughput of evaluation against lm-evaluation-harness with its transformers backend, on one thread of a CPU.

`OMP_NUM_THREADS=1 python benchmarks/evaluation_speed.py [--vllm-python .venv-vllm/bin/python]` lets each backend answer
the same questions by the same model, greedily and with the same limit, and compares the answers. Each runs in a process
of its own, in its own environment, and they take turns, round by round. What is timed goes from the texts of prompts to
the texts of responses: tokens, batches, generation, end of response. Ours is the code of the evaluate stage, receipts
included, without noise, which the harness has not. Every backend gets the batch size that is fastest for it.

`tiny` is the built-in model; `widened` is the same with zero channels added to its MLPs: the same answers, at the cost
of a larger model, whose products weigh more than the calls around them. Needs lm_eval (extra dev), no network.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import psutil
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from aqnpipe.config.dataset import GeneratedDataset, PromptFormat
from aqnpipe.config.model import builtin_folder
from aqnpipe.config.run import EvaluationSpec
from aqnpipe.data.generated import generate_problems
from aqnpipe.data.prompts import prompt_token_ids
from aqnpipe.evaluation.actors import load_generator
from aqnpipe.evaluation.pieces import answer, answered_passes, pieces_of
from aqnpipe.models.loading import load_tokenizer

CONSOLE = Console(width=200)
HARNESS, OURS = "lm-evaluation-harness (hf)", ("transformers", "vllm")
BATCH_SIZES = (16, 32, 64, 128)
MAX_CONTEXT = 1024


def harness_answers(folder: Path, questions: list[str], response_tokens: int) -> Callable[[int], list[str]]:
    """Return a function that answers all questions by the harness's HFLM in batches of a given size."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    tokenizer = load_tokenizer(folder)
    prompts = [tokenizer.decode(ids) for ids in prompt_token_ids(questions, PromptFormat(), tokenizer, ())]
    settings = {"until": [], "max_gen_toks": response_tokens, "do_sample": False}
    model = HFLM(pretrained=str(folder), device="cpu", dtype="float32", max_length=MAX_CONTEXT)

    def answers(batch_size: int) -> list[str]:
        model.batch_size_per_gpu = batch_size
        requests = [
            Instance("generate_until", {}, (prompt, dict(settings)), number) for number, prompt in enumerate(prompts)
        ]
        found: list[str] = model.generate_until(requests, disable_tqdm=True)
        return found

    return answers


def our_answers(backend: str, folder: Path, questions: list[str], response_tokens: int) -> Callable[[int], list[str]]:
    """Return a function that answers all questions as the evaluate stage does, in batches of a given size."""
    tokenizer = load_tokenizer(folder)

    def spec(batch_size: int) -> EvaluationSpec:
        return EvaluationSpec.model_validate(
            {
                **{"model_role": "base", "arm_id": "speed", "seed": 0, "step": 0, "device": "cpu", "prompt": {}},
                **{"dtype": "float32", "attention": "sdpa", "generation": {"backend": backend}},
                "evaluation": {
                    "noise_levels": (0.0,),
                    "max_response_tokens": response_tokens,
                    "batch_size": batch_size,
                },
            }
        )

    prompts = prompt_token_ids(questions, PromptFormat(), tokenizer, ())
    generator = load_generator(spec(max(BATCH_SIZES)), folder, max(map(len, prompts)) + response_tokens)

    def answers(batch_size: int) -> list[str]:
        asked = spec(batch_size)
        pieces = pieces_of(asked, prompt_token_ids(questions, asked.prompt, tokenizer, ()))
        (done,) = answered_passes(asked, pieces, (answer(generator, asked, piece) for piece in pieces))
        done.receipt.check()
        texts: list[str] = tokenizer.batch_decode([one.token_ids for one in done.samples[0]], skip_special_tokens=True)
        return texts

    return answers


def cpu_seconds() -> float:
    """CPU time of this process and all that it started."""
    process = psutil.Process()
    return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))


def serve(backend: str, folder: Path, questions: list[str], response_tokens: int) -> None:
    """Be one backend: read batch sizes from standard input, answer all questions, write what it took as JSON lines."""
    torch.set_num_threads(1)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no reply
    if backend == HARNESS:
        answers = harness_answers(folder, questions, response_tokens)
    else:
        answers = our_answers(backend, folder, questions, response_tokens)
    for line in sys.stdin:
        wall, cpu = time.perf_counter(), cpu_seconds()
        texts = answers(int(line))
        reply = {"wall": time.perf_counter() - wall, "cpu": cpu_seconds() - cpu, "answers": [t.strip() for t in texts]}
        replies.write(json.dumps(reply) + "\n")


class Served:
    """A backend in a process of its own."""

    def __init__(self, backend: str, python: str, arguments: Sequence[str]) -> None:
        self.backend = backend
        self._process = subprocess.Popen(  # noqa: S603 - this script
            [python, str(Path(__file__).absolute()), "--serve", backend, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )

    def run(self, batch_size: int) -> dict[str, Any]:
        """Let it answer all questions; return wall and CPU seconds and the answers."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("started without pipes")
        self._process.stdin.write(f"{batch_size}\n")
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self.backend} ended with {self._process.wait()}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def save_widened(folder: Path, intermediate_size: int) -> None:
    """Write the tiny model with zero channels added to its MLPs, which change no answer."""
    source = builtin_folder("tiny")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for layer in model.model.layers:
        for name, rows, columns in (
            ("gate_proj", intermediate_size, None),
            ("up_proj", intermediate_size, None),
            ("down_proj", None, intermediate_size),
        ):
            weight = getattr(layer.mlp, name).weight.data
            wide = torch.zeros(rows or weight.shape[0], columns or weight.shape[1])
            wide[: weight.shape[0], : weight.shape[1]] = weight
            getattr(layer.mlp, name).weight = torch.nn.Parameter(wide)
    model.config.intermediate_size = intermediate_size
    model.save_pretrained(folder)
    load_tokenizer(source).save_pretrained(folder)


def measure(name: str, folder: Path, arguments: argparse.Namespace) -> None:
    """Print the rows of one model."""
    questions = [
        problem.question for problem in generate_problems(GeneratedDataset(num_test=arguments.questions), "test")
    ]
    tokenizer = load_tokenizer(folder)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(questions, file)
        file.flush()
        rest = ["--model", str(folder), "--texts", file.name, "--tokens", str(arguments.tokens)]
        pythons = {HARNESS: sys.executable, "transformers": sys.executable, "vllm": arguments.vllm_python}
        backends = [Served(backend, python, rest) for backend, python in pythons.items() if python]
        tried = {one.backend: {size: one.run(size)["cpu"] for size in (16, *BATCH_SIZES)} for one in backends}
        fastest = {backend: min(sizes, key=lambda size: sizes[size]) for backend, sizes in tried.items()}
        rounds = [{one.backend: one.run(fastest[one.backend]) for one in backends} for _ in range(arguments.rounds)]
        for one in backends:
            one.close()
    reference = rounds[0][HARNESS]["answers"]
    tokens = sum(len(tokenizer(text)["input_ids"]) + 1 for text in reference)
    for backend in pythons:
        taken = [one[backend] for one in rounds if backend in one]
        if not taken:
            CONSOLE.print(f"| {name} | {backend} | not measured: no --vllm-python |")
            continue
        equal = sum(ours == theirs for ours, theirs in zip(taken[0]["answers"], reference, strict=True))
        cells = [name, backend, fastest[backend], f"{equal} of {len(reference)}"]
        cells += [f"{tokens / statistics.median(one['wall'] for one in taken):.0f}"]
        for what in ("cpu", "wall"):
            ratios = sorted(one[HARNESS][what] / one[backend][what] for one in rounds)
            cells += [f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"]
        CONSOLE.print(f"| {' | '.join(map(str, cells))} |")


def main() -> None:
    """Measure the tiny model and a widened one, or be one of the backends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--questions", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=48, help="limit of a response")
    parser.add_argument("--intermediate-size", type=int, default=4096, help="of the widened model's MLPs")
    parser.add_argument("--vllm-python", help="python of the environment that `make vllm` makes")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--texts", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.model, json.loads(arguments.texts.read_text()), arguments.tokens)
        return
    CONSOLE.print(
        "| model | backend | batch size | same answers | tokens/s | CPU time, harness/this | wall, harness/this |"
    )
    CONSOLE.print("|---|---|---|---|---|---|---|")
    measure("tiny", builtin_folder("tiny"), arguments)
    with tempfile.TemporaryDirectory() as folder:
        save_widened(Path(folder), arguments.intermediate_size)
        measure("widened", Path(folder), arguments)
    CONSOLE.print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
