"""Throughput of evaluation against lm-evaluation-harness with its transformers backend, on one thread of a CPU.

`OMP_NUM_THREADS=1 python benchmarks/evaluation_speed.py [--vllm-python .venv-vllm/bin/python]` lets each backend answer
the same questions by the same model, greedily and with the same limit, and compares the answers. Each runs in a process
of its own, in its own environment, and they take turns, round by round. What is timed goes from the texts of prompts to
the texts of responses: tokens, batches, generation, end of response. Ours is the code of the evaluate stage, receipts
included, without noise, which the harness has not. Every backend gets the batch size that is fastest for it; the
harness is also measured at that of the others, and at 1, which is its default.

`tiny` is the built-in model; `widened` is the same with zero channels added to its MLPs: the same answers, at the cost
of a larger model, whose products weigh more than the calls around them. Questions are put bare and after 5 worked
examples, as the harness's gsm8k task does by default; responses to the latter end where that ends them. Needs lm_eval
(extra dev), no network.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
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
from aqnpipe.data.examples import Example
from aqnpipe.data.generated import generate_problems
from aqnpipe.data.prompts import end_of_response, prompt_token_ids
from aqnpipe.evaluation.local_runner import load_generator
from aqnpipe.evaluation.shards import assembled_passes, run_shard, shards_of
from aqnpipe.models.loading import load_tokenizer

CONSOLE = Console(width=200)
HARNESS = "lm-evaluation-harness (hf)"
OURS = {
    "transformers": ("transformers", "sdpa"),
    "transformers, eager attention": ("transformers", "eager"),
    "vllm": ("vllm", "sdpa"),
}
"""What is requested of `generation.backend` and a model's `attention`; the harness attends by sdpa."""
BATCH_SIZES = (64, 128, 256, 512)
DEFAULT_BATCH_SIZE = 1
MAX_CONTEXT = 2048


@dataclass(frozen=True)
class Task:
    """Questions and how they are put; what every backend is given, as JSON."""

    questions: list[str]
    examples: list[tuple[str, str]]
    response_tokens: int

    @property
    def prompt_format(self) -> PromptFormat:
        """Bare questions, or worked examples before each."""
        if not self.examples:
            return PromptFormat()
        return PromptFormat(layout="question_answer", num_examples=len(self.examples))

    def prompts(self, tokenizer: Any) -> list[list[int]]:
        """Return the prompts as token ids."""
        examples = [Example(*one) for one in self.examples]
        return prompt_token_ids(self.questions, self.prompt_format, tokenizer, examples)


def generated_task(num_questions: int, num_examples: int, response_tokens: int) -> Task:
    """Return generated questions with so many worked ones of the training split before each."""
    dataset = GeneratedDataset(num_test=num_questions)
    return Task(
        [problem.question for problem in generate_problems(dataset, "test")],
        [(one.question, one.answer) for one in generate_problems(dataset, "train")[:num_examples]],
        response_tokens,
    )


def harness_answers(folder: Path, task: Task) -> Callable[[int], list[str]]:
    """Return a function that answers all questions by the harness's HFLM in batches of a given size."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    tokenizer = load_tokenizer(folder)
    prompts = [tokenizer.decode(ids) for ids in task.prompts(tokenizer)]
    stop_text = task.prompt_format.stop_text
    settings = {"until": [stop_text] if stop_text else [], "max_gen_toks": task.response_tokens, "do_sample": False}
    model = HFLM(pretrained=str(folder), device="cpu", dtype="float32", max_length=MAX_CONTEXT)

    def answers(batch_size: int) -> list[str]:
        model.batch_size_per_gpu = batch_size
        requests = [
            Instance("generate_until", {}, (prompt, dict(settings)), number) for number, prompt in enumerate(prompts)
        ]
        found: list[str] = model.generate_until(requests, disable_tqdm=True)
        return found

    return answers


def our_answers(name: str, folder: Path, task: Task) -> Callable[[int], list[str]]:
    """Return a function that answers all questions as the evaluate stage does, in batches of a given size."""
    backend, attention = OURS[name]
    tokenizer = load_tokenizer(folder)

    def spec(batch_size: int) -> EvaluationSpec:
        return EvaluationSpec.model_validate(
            {
                **{"model_role": "base", "arm_id": "speed", "seed": 0, "step": 0, "device": "cpu"},
                **{"dtype": "float32", "attention": attention, "generation": {"backend": backend}},
                "prompt": task.prompt_format.model_dump(),
                "evaluation": {
                    "noise_levels": (0.0,),
                    "max_response_tokens": task.response_tokens,
                    "batch_size": batch_size,
                },
            }
        )

    longest = max(map(len, task.prompts(tokenizer)))
    generator = load_generator(spec(max(BATCH_SIZES)), folder, longest + task.response_tokens)

    def answers(batch_size: int) -> list[str]:
        requested = spec(batch_size)
        shards = shards_of(requested, task.prompts(tokenizer))
        (done,) = assembled_passes(requested, shards, (run_shard(generator, requested, shard) for shard in shards))
        done.receipt.check()
        texts = tokenizer.batch_decode([one.token_ids for one in done.samples[0]], skip_special_tokens=True)
        return [end_of_response(text, task.prompt_format.stop_text) for text in texts]

    return answers


def cpu_seconds() -> float:
    """CPU time of this process and all that it started."""
    process = psutil.Process()
    return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))


def serve(backend: str, folder: Path, task: Task) -> None:
    """Be one backend: read batch sizes from standard input, answer all questions, write what it took as JSON lines."""
    torch.set_num_threads(1)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no reply
    answers = harness_answers(folder, task) if backend == HARNESS else our_answers(backend, folder, task)
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


def ratios(rounds: Sequence[Mapping[tuple[str, int], Any]], of: tuple[str, int], to: tuple[str, int], what: str) -> str:
    """Return the median ratio of two runs over the rounds that had both, with the lowest and the highest."""
    found = sorted(one[of][what] / one[to][what] for one in rounds if of in one and to in one)
    return f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"


def measure(name: str, folder: Path, task: Task, arguments: argparse.Namespace) -> None:
    """Print the rows of one model and way to put the questions."""
    name = f"{name}, {len(task.examples)}-shot"
    tokenizer = load_tokenizer(folder)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(asdict(task), file)
        file.flush()
        rest = ["--model", str(folder), "--task", file.name]
        pythons = {one: arguments.vllm_python if one == "vllm" else sys.executable for one in (HARNESS, *OURS)}
        served = {backend: Served(backend, python, rest) for backend, python in pythons.items() if python}
        fastest = {}
        for backend, one in served.items():
            one.run(BATCH_SIZES[0])  # what is only done once
            seconds = {size: min(one.run(size)["cpu"] for _ in range(2)) for size in BATCH_SIZES}
            fastest[backend] = min(seconds, key=lambda size: seconds[size])
        runs = sorted({(HARNESS, size) for size in fastest.values()} | set(fastest.items()))
        rounds = [{run: served[run[0]].run(run[1]) for run in runs} for _ in range(arguments.rounds)]
        default = (HARNESS, DEFAULT_BATCH_SIZE)
        rounds[-1][default] = served[HARNESS].run(DEFAULT_BATCH_SIZE)  # once: it takes longer than all others
        for one in served.values():
            one.close()
    best = (HARNESS, fastest[HARNESS])
    reference = rounds[0][best]["answers"]
    tokens = sum(len(tokenizer(text)["input_ids"]) + 1 for text in reference)
    for run in (default, *runs):
        same_size = (HARNESS, run[1])
        equal = sum(ours == theirs for ours, theirs in zip(rounds[-1][run]["answers"], reference, strict=True))
        wall = statistics.median(one[run]["wall"] for one in rounds if run in one)
        cells = [name, *run, f"{equal} of {len(reference)}", f"{tokens / wall:.0f}"]
        cells += [ratios(rounds, best, run, "cpu"), ratios(rounds, best, run, "wall")]
        cells += [ratios(rounds, other, run, "cpu") for other in (same_size, default)]
        CONSOLE.print(f"| {' | '.join(map(str, cells))} |")
    for backend in pythons.keys() - served.keys():
        CONSOLE.print(f"| {name} | {backend} | not measured: no --vllm-python |")


def main() -> None:
    """Measure the tiny model and a widened one, or be one of the backends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=("tiny", "widened"), default=("tiny", "widened"))
    parser.add_argument("--questions", type=int, default=1024)
    parser.add_argument("--examples", type=int, nargs="+", default=(0, 5), help="worked examples before a question")
    parser.add_argument("--tokens", type=int, default=48, help="limit of a response")
    parser.add_argument("--intermediate-size", type=int, default=4096, help="of the widened model's MLPs")
    parser.add_argument("--vllm-python", help="python of the environment that `make vllm` makes")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--task", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.model, Task(**json.loads(arguments.task.read_text())))
        return
    CONSOLE.print(
        "| model | backend | batch size | same answers | tokens/s | CPU time, harness at its fastest / this "
        "| wall, the same | CPU time, harness at this batch size / this | CPU time, harness at 1 / this |"
    )
    CONSOLE.print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as widened:
        save_widened(Path(widened), arguments.intermediate_size)
        folders = {"tiny": builtin_folder("tiny"), "widened": Path(widened)}
        for name, num_examples in itertools.product(arguments.models, arguments.examples):
            task = generated_task(arguments.questions, num_examples, arguments.tokens)
            measure(name, folders[name], task, arguments)
    CONSOLE.print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
