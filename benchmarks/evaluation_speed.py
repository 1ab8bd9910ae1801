"""Throughput of evaluation, compared with lm-evaluation-harness and its transformers backend, on one CPU thread.

`OMP_NUM_THREADS=1 python benchmarks/evaluation_speed.py [--vllm-python .venv-vllm/bin/python]` runs the same questions
on the same model with each backend, greedily and with the same limit of tokens, and compares the responses. Each
backend runs in its own process and environment; the backends take turns, round by round. The time covers everything
from the text of the prompts to the text of the responses: tokenisation, batches, generation, end of response. Our
backends run the code of the evaluate stage, including receipts, without noise, because the harness has none. Each
backend gets its fastest batch size. The harness is also measured at the other batch sizes, and at 1, its default.

Models: `tiny` is the built-in model. `widened` is the same model with zero channels added to its MLPs: it gives the
same responses at the cost of a larger model, whose products take longer than the calls around them. Questions: without
examples, and after 5 worked examples, the default of the harness's gsm8k task; responses to the latter end at the stop
text of that task. Needs lm_eval (extra dev), no network.
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
from smallest import parse
from transformers import AutoModelForCausalLM

from aqnpipe.config.dataset import GeneratedDataset, PromptFormat
from aqnpipe.config.model import builtin_folder
from aqnpipe.config.run import EvaluationSpec
from aqnpipe.data.generated import generate_problems
from aqnpipe.data.prompts import Example, end_of_response, prompt_token_ids
from aqnpipe.evaluation.shards import assembled_passes, load_generator, run_shard, shards_of
from aqnpipe.models.loading import load_tokenizer

CONSOLE = Console(width=200)
HARNESS = "lm-evaluation-harness (hf)"
OURS = {
    "transformers": ("transformers", "sdpa"),
    "transformers, eager attention": ("transformers", "eager"),
    "vllm": ("vllm", "sdpa"),
}
"""`generation.backend` and the model's `attention` of each of our backends; the harness uses sdpa attention."""
BATCH_SIZES = (64, 128, 256, 512)
DEFAULT_BATCH_SIZE = 1
MAX_CONTEXT = 2048


@dataclass(frozen=True)
class Task:
    """Questions, worked examples and token limit: the input of every backend, passed as JSON."""

    questions: list[str]
    examples: list[tuple[str, str]]
    response_tokens: int

    @property
    def prompt_format(self) -> PromptFormat:
        """Plain questions, or questions after worked examples."""
        if not self.examples:
            return PromptFormat()
        return PromptFormat(layout="question_answer", num_examples=len(self.examples))

    def prompts(self, tokenizer: Any) -> list[list[int]]:
        """Return the prompts as token ids."""
        examples = [Example(*example) for example in self.examples]
        return prompt_token_ids(self.questions, self.prompt_format, tokenizer, examples)


def generated_task(num_questions: int, num_examples: int, response_tokens: int) -> Task:
    """Return generated questions with `num_examples` worked examples from the training split."""
    dataset = GeneratedDataset(num_test=num_questions)
    return Task(
        [problem.question for problem in generate_problems(dataset, "test")],
        [(problem.question, problem.answer) for problem in generate_problems(dataset, "train")[:num_examples]],
        response_tokens,
    )


def harness_responder(folder: Path, task: Task) -> Callable[[int], list[str]]:
    """Return a function that generates all responses with the harness's HFLM in batches of a given size."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    tokenizer = load_tokenizer(folder)
    prompts = [tokenizer.decode(ids) for ids in task.prompts(tokenizer)]
    stop_text = task.prompt_format.stop_text
    settings = {"until": [stop_text] if stop_text else [], "max_gen_toks": task.response_tokens, "do_sample": False}
    model = HFLM(pretrained=str(folder), device="cpu", dtype="float32", max_length=MAX_CONTEXT)

    def respond(batch_size: int) -> list[str]:
        model.batch_size_per_gpu = batch_size
        requests = [
            Instance("generate_until", {}, (prompt, dict(settings)), number) for number, prompt in enumerate(prompts)
        ]
        found: list[str] = model.generate_until(requests, disable_tqdm=True)
        return found

    return respond


def our_responder(name: str, folder: Path, task: Task) -> Callable[[int], list[str]]:
    """Return a function that generates all responses as the evaluate stage does, in batches of a given size."""
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

    def respond(batch_size: int) -> list[str]:
        requested = spec(batch_size)
        shards = shards_of(requested, task.prompts(tokenizer))
        (result,) = assembled_passes(requested, shards, (run_shard(generator, requested, shard) for shard in shards))
        result.receipt.check()
        token_ids = [completion.token_ids for completion in result.samples[0]]
        texts = tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        return [end_of_response(text, task.prompt_format.stop_text) for text in texts]

    return respond


def cpu_seconds() -> float:
    """Return the CPU time of this process and its children."""
    parent = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (parent, *parent.children(recursive=True)))


def serve(backend: str, folder: Path, task: Task) -> None:
    """Run one backend: read batch sizes from standard input, generate all responses, write times as JSON lines."""
    torch.set_num_threads(1)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries must not mix with the replies
    respond = harness_responder(folder, task) if backend == HARNESS else our_responder(backend, folder, task)
    for line in sys.stdin:
        wall, cpu = time.perf_counter(), cpu_seconds()
        texts = [text.strip() for text in respond(int(line))]
        reply = {"wall": time.perf_counter() - wall, "cpu": cpu_seconds() - cpu, "responses": texts}
        replies.write(json.dumps(reply) + "\n")


class Served:
    """A backend in its own process."""

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
        """Generate all responses; return wall seconds, CPU seconds and the responses."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("started without pipes")
        self._process.stdin.write(f"{batch_size}\n")
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self.backend} ended with {self._process.wait()}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def save_widened(folder: Path, intermediate_size: int) -> None:
    """Write the tiny model with zero channels added to its MLPs; they do not change its responses."""
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
    found = sorted(runs[of][what] / runs[to][what] for runs in rounds if of in runs and to in runs)
    return f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"


def measure(name: str, folder: Path, task: Task, arguments: argparse.Namespace) -> None:
    """Print the rows of one model and one number of examples."""
    name = f"{name}, {len(task.examples)}-shot"
    tokenizer = load_tokenizer(folder)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(asdict(task), file)
        file.flush()
        rest = ["--model", str(folder), "--task", file.name]
        pythons = {
            backend: arguments.vllm_python if backend == "vllm" else sys.executable
            for backend in (HARNESS, *arguments.backends)
        }
        served = {backend: Served(backend, python, rest) for backend, python in pythons.items() if python}
        fastest = {}
        for backend, process in served.items():
            process.run(BATCH_SIZES[0])  # warm-up
            seconds = {size: min(process.run(size)["cpu"] for _ in range(2)) for size in BATCH_SIZES}
            fastest[backend] = min(seconds, key=lambda size: seconds[size])
        runs = sorted({(HARNESS, size) for size in fastest.values()} | set(fastest.items()))
        rounds = [{run: served[run[0]].run(run[1]) for run in runs} for _ in range(arguments.rounds)]
        default = (HARNESS, DEFAULT_BATCH_SIZE)
        rounds[-1][default] = served[HARNESS].run(DEFAULT_BATCH_SIZE)  # once: it takes longer than all other runs
        for process in served.values():
            process.close()
    best = (HARNESS, fastest[HARNESS])
    reference = rounds[0][best]["responses"]
    tokens = sum(len(tokenizer(text)["input_ids"]) + 1 for text in reference)
    for run in (default, *runs):
        same_size = (HARNESS, run[1])
        equal = sum(ours == theirs for ours, theirs in zip(rounds[-1][run]["responses"], reference, strict=True))
        wall = statistics.median(results[run]["wall"] for results in rounds if run in results)
        cells = [name, *run, f"{equal} of {len(reference)}", f"{tokens / wall:.0f}"]
        cells += [ratios(rounds, best, run, "cpu"), ratios(rounds, best, run, "wall")]
        cells += [ratios(rounds, other, run, "cpu") for other in (same_size, default)]
        CONSOLE.print(f"| {' | '.join(map(str, cells))} |")
    for backend in pythons.keys() - served.keys():
        CONSOLE.print(f"| {name} | {backend} | not measured: no --vllm-python |")


def main() -> None:
    """Measure the tiny model and the widened one, or run one of the backends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds in which all backends take turns (default 5)")
    parser.add_argument(
        "--models", nargs="+", choices=("tiny", "widened"), default=("tiny", "widened"), help="default: both"
    )
    parser.add_argument("--questions", type=int, default=1024, help="number of generated questions (default 1024)")
    parser.add_argument(
        "--examples", type=int, nargs="+", default=(0, 5), help="worked examples before a question (default 0 5)"
    )
    parser.add_argument("--tokens", type=int, default=48, help="limit of tokens per response (default 48)")
    parser.add_argument(
        "--intermediate-size", type=int, default=4096, help="width of the widened model's MLPs (default 4096)"
    )
    parser.add_argument("--backends", nargs="+", choices=OURS, default=tuple(OURS), help="default: all")
    parser.add_argument("--vllm-python", help="python of the environment of `make vllm`; default: vLLM is not measured")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--task", type=Path, help=argparse.SUPPRESS)
    arguments = parse(parser, rounds=1, models=["tiny"], backends=["transformers"], questions=8, examples=[0], tokens=6)
    if arguments.serve:
        serve(arguments.serve, arguments.model, Task(**json.loads(arguments.task.read_text())))
        return
    CONSOLE.print(
        "| model | backend | batch size | same responses | tokens/s | CPU time, harness at its fastest / this "
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
