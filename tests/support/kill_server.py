"""Training runs that are killed at a chosen moment, each in a process forked from one that has done all imports.

`KillServer` starts this file as a script, which reads one JSON request per line and answers with one JSON line.
"""

import contextlib
import functools
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tiny_training import AQN, NOISE, scattered_rewards, training_spec

from aqnpipe.config.run import TrainingSpec
from aqnpipe.errors import AqnpipeError
from aqnpipe.runtime.warm_start import import_all
from aqnpipe.training.run import TrainingInputs

FAULT = {"type": "saturation", "layer": 1, "magnitude": 0.3, "sparsity": 0.5, "threshold": "cached"}
RESUME_EVERY = 2


def whole_spec(**changes):
    """Return a run of 8 steps in 2 epochs: noise, AQN, a fault with a cached threshold, validations, checkpoints."""
    settings = {
        "num_steps": 8,
        "epochs": 2,
        "resume_every": RESUME_EVERY,
        "checkpoint_every": 4,
        "validate_every": 4,
        "learning_rate_schedule": "linear",
        "warmup_steps": 2,
        "max_response_tokens": 4,
    }
    spec = training_spec(NOISE, AQN, **{**settings, **changes})
    return TrainingSpec.model_validate(spec.model_dump() | {"faults": (FAULT,)})


POINTS = {
    "start": "aqnpipe.training.stage.open_workspace",
    "rollout": "aqnpipe.training.trainer.NoisyGRPOTrainer._generate_single_turn",
    "decoding": "transformers.Qwen2Model.forward",
    "log-probabilities": "aqnpipe.training.trainer.NoisyGRPOTrainer._computed",
    "backward": "accelerate.Accelerator.backward",
    "optimiser step": "torch.optim.AdamW.step",
    "validation": "aqnpipe.training.callbacks.ValidationCallback.on_step_end",
    "checkpoint weights": "transformers.PreTrainedModel.save_pretrained",
    "checkpoint tokenizer": "transformers.PreTrainedTokenizerBase.save_pretrained",
    "resume copies": "aqnpipe.training.trainer.own_tensors",
    "resume tensors": "aqnpipe.training.resume.save_file",
    "resume receipt": "aqnpipe.training.trainer.save_rank_state",
    "resume manifest": "aqnpipe.training.resume.write_durably",
    "resume flush": "aqnpipe.training.resume.sync_files",
    "resume rename": "aqnpipe.training.resume.rename",
    "removal": "shutil.rmtree",
    "receipt": "aqnpipe.training.run.write_json",
    "metrics": "aqnpipe.training.run.write_table",
    "record": "aqnpipe.training.stage.write_json",
    "finish": "aqnpipe.training.workspace.write_durably",
    "promotion": "aqnpipe.training.stage.promote",
    "link": "aqnpipe.training.workspace._link",
    "promotion rename": "aqnpipe.training.workspace.rename",
}
"""Functions of the train stage by their purpose; a run is killed before or after their n-th call."""


CALLED_OFTEN = {
    "rollout",
    "decoding",
    "log-probabilities",
    "backward",
    "optimiser step",
    "validation",
    "removal",
    "link",
}


@dataclass(frozen=True)
class Outcome:
    """The end of a process: exit code (negative: signal), seconds, messages, and step and prompts of every rollout."""

    code: int
    seconds: float
    said: list[str]
    steps: list[int]
    prompts: list[list[str]]


class KillServer:
    """The client: starts the process that forks the runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=environment,
        )

    def train(self, spec: TrainingSpec, inputs: TrainingInputs, output: Path, scratch: Path, **how) -> Outcome:
        """Run a training job to its end.

        how: `kill` (point, number of the call, "before" or "after") or `kill_after` (seconds) ends it earlier; `signal`
        names a signal other than SIGKILL; `code` stands for another version of the code.
        """
        (outcome,) = self.train_together([(spec, inputs, output, scratch)], **how)
        return outcome

    def train_together(self, runs: list[tuple[TrainingSpec, TrainingInputs, Path, Path]], **how) -> list[Outcome]:
        """Run several training jobs at the same time, each in its own process, started in this order."""
        requests = [self._request(*run, index, **how) for index, run in enumerate(runs)]
        print(json.dumps(requests), file=self._process.stdin, flush=True)
        return [Outcome(**answer) for answer in json.loads(self._process.stdout.readline())]

    def _request(
        self, spec: TrainingSpec, inputs: TrainingInputs, output: Path, scratch: Path, index: int, **how
    ) -> dict:
        return {
            "spec": spec.model_dump(mode="json"),
            "inputs": {name: str(value) for name, value in vars(inputs).items() if value is not None},
            "output": str(output),
            "scratch": str(scratch),
            "log": str(self._folder / f"log{index}.jsonl"),
            **how,
        }

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()


def tree(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file under `folder`."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def random_kill(generator: random.Random, seconds: float) -> dict:
    """Return when to kill a run that takes `seconds`: at a random time, or at a random call of a random point."""
    if generator.random() < 0.5:
        return {"kill_after": generator.uniform(0, seconds)}
    point = generator.choice(sorted(POINTS))
    most_calls = 12 if point in CALLED_OFTEN else 1
    return {"kill": (point, generator.randint(1, most_calls), generator.choice(["before", "after"]))}


def _serve() -> None:
    for module in {path.rsplit(".", 2)[0] for path in POINTS.values()}:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    import_all(("aqnpipe.runtime.training", "aqnpipe.training.trainer", "aqnpipe.noise.kernels.gaussian:load_kernels"))
    for line in sys.stdin:
        children = [_fork(request) for request in json.loads(line)]
        answers = [_wait(*child) for child in children]
        sys.stdout.write(json.dumps(answers) + "\n")
        sys.stdout.flush()


def _fork(request: dict) -> tuple[dict, int, float]:
    log = Path(request["log"])
    log.write_text("")
    child = os.fork()
    if child == 0:
        os._exit(_run(request, log))
    return request, child, time.monotonic()


def _wait(request: dict, child: int, began: float) -> dict:
    if "kill_after" in request:
        time.sleep(request["kill_after"])
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    lines = [json.loads(line) for line in Path(request["log"]).read_text().splitlines()]
    return {
        "code": os.waitstatus_to_exitcode(status),
        "seconds": time.monotonic() - began,
        "said": [line["said"] for line in lines if "said" in line],
        "steps": [line["step"] for line in lines if "step" in line],
        "prompts": [line["prompts"] for line in lines if "step" in line],
    }


def _run(request: dict, log: Path) -> int:
    from aqnpipe.runtime.training import run_training_job
    from aqnpipe.training import run, stage
    from aqnpipe.training.audit import rollouts
    from aqnpipe.training.trainer import NoisyGRPOTrainer

    def note(**entry) -> None:
        with log.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    null = os.open(log.with_name("stderr"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(null, 1)
    os.dup2(null, 2)
    tokenize_prompts = NoisyGRPOTrainer._tokenize_prompts

    def noted_prompts(self, prompts):
        note(step=self.state.global_step, prompts=prompts)
        return tokenize_prompts(self, prompts)

    NoisyGRPOTrainer._tokenize_prompts = noted_prompts
    # A model that solves nothing has a gradient only if rewards differ within groups.
    run.reward_correct = scattered_rewards
    rollouts.strict_rewards = lambda texts, golds: scattered_rewards(texts)
    # All runs use the code that the server imported at its start, even if sources are edited meanwhile.
    stage.code_digest = lambda _: request.get("code", "imported")
    if "kill" in request:
        _arm(*request["kill"], getattr(signal, request.get("signal", "SIGKILL")))
    inputs = TrainingInputs(**{name: Path(value) for name, value in request["inputs"].items()})
    try:
        run_training_job(
            TrainingSpec.model_validate(request["spec"]),
            inputs,
            Path(request["output"]),
            Path(request["scratch"]),
            lambda line: note(said=line),
        )
    except AqnpipeError as error:
        note(said=f"ERROR: {error}")
        return error.exit_code
    except BaseException as error:  # noqa: BLE001 - the process ends here and must report why
        import traceback

        note(said=f"BUG: {error!r} {traceback.format_exc()}")
        return 1
    return 0


def _arm(point: str, call: int, when: str, number: signal.Signals) -> None:
    """Make the process send itself the signal before or after a call of `point`."""
    owner_name, name = POINTS[point].rsplit(".", 1)
    try:
        owner = importlib.import_module(owner_name)
    except ModuleNotFoundError:
        module_name, attribute = owner_name.rsplit(".", 1)
        owner = getattr(importlib.import_module(module_name), attribute)
    function, calls = getattr(owner, name), 0

    @functools.wraps(function)
    def killing(*args, **kwargs):
        nonlocal calls
        calls += 1
        due = calls == call
        if due and when == "before":
            os.kill(os.getpid(), number)
        result = function(*args, **kwargs)
        if due and when == "after":
            os.kill(os.getpid(), number)
        return result

    setattr(owner, name, killing)


if __name__ == "__main__":
    _serve()
