"""Shared fixtures: one torch thread, a small random model, and folders that are filled once for all test processes."""

import gc
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from filelock import FileLock

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter
    from faulted_study import WarmPython
    from transformers import Qwen2ForCausalLM


def pytest_configure(config: pytest.Config) -> None:
    """Set the variables that libraries read when they are imported, before any test module imports them.

    TRITON_INTERPRET: transformers imports Triton. It decides whether kernels are interpreted on CPU tensors.
    """
    if getattr(config.option, "numprocesses", None):
        return  # this process only distributes tests, so it does without torch
    # Threads of two test processes and of the processes that they start would wait for each other's cores.
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    from hypothesis import settings

    # The same examples in every run; a number of examples, for longer trials, asks for others.
    # No deadline: how long an example takes says more about the other work of the machine.
    settings.register_profile("fixed", derandomize="AQNPIPE_FUZZ_EXAMPLES" not in os.environ, deadline=None)
    settings.load_profile("fixed")
    os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"
    gc.disable()  # until `pytest_collection_finish`: collecting creates no garbage worth searching for


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests so that no process ends alone with a long test.

    xdist cuts the list into one run of tests per process; an idle process then takes from the end of another's run.
    So each run begins with a share of the long tests and ends with short ones.
    """
    num_processes = getattr(config, "workerinput", {}).get("workercount", 1)
    long_files = sorted({item.path for item in items if _is_long(item)})
    queues: list[list[pytest.Item]] = [[] for _ in range(num_processes)]
    for index, path in enumerate(long_files):
        queues[index % num_processes] += [item for item in items if item.path == path]
    short = [item for item in items if item.path not in long_files]
    ordered: list[pytest.Item] = []
    for index, queue in enumerate(queues):
        share = (len(items) - len(ordered)) // (num_processes - index)
        missing = max(0, share - len(queue))
        ordered += queue + short[:missing]
        del short[:missing]
    items[:] = ordered + short


def pytest_collection_finish() -> None:
    """Exempt everything that exists now, libraries and tests, from garbage collection.

    A full collection visits every object. There are 1.6 million after the imports, so each took 0.9 s, and the trainer
    of transformers requests one per run: half of the time of a small training.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: "TerminalReporter") -> None:
    """Print what was skipped and why, in one table: number of tests, reason, files."""
    places: dict[str, list[str]] = defaultdict(list)
    for report in terminalreporter.stats.get("skipped", ()):
        if getattr(report, "wasxfail", None) is None:
            places[str(report.longrepr[2]).removeprefix("Skipped: ")].append(report.nodeid.split("::")[0])
    if not places:
        return
    terminalreporter.section("skipped")
    for reason, files in sorted(places.items(), key=lambda item: -len(item[1])):
        named = sorted(set(files))
        more = f" and {len(named) - 2} more" if len(named) > 2 else ""
        terminalreporter.write_line(f"{len(files):>5}  {reason:<70}  {', '.join(named[:2])}{more}")


def _is_long(item: pytest.Item) -> bool:
    """Return whether a test is marked slow or needs a folder that is made once: such folders take long to make."""
    return item.get_closest_marker("slow") is not None or "made_once" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this test session share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def made_once(shared_folder: Path) -> Callable[[str, Callable[[Path], None]], Path]:
    """Function (name, make) -> folder. `make(folder)` fills the folder once per test session.

    The first process that needs the folder fills it; the others wait for it. Tests must not change its files. Names
    are unique among all tests.
    """

    def folder(name: str, make: Callable[[Path], None]) -> Path:
        made, done = shared_folder / name, shared_folder / f"{name}.done"
        with FileLock(shared_folder / f"{name}.lock"):
            if not done.exists():
                shutil.rmtree(made, ignore_errors=True)  # an attempt that failed in another process
                made.mkdir()
                make(made)
                done.touch()
        return made

    return folder


@pytest.fixture(autouse=True)
def imports_of_this_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget where a test's own modules were: studies of several tests have modules of one name."""
    path, modules = sys.path.copy(), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        source = getattr(sys.modules[name], "__file__", None)
        if source and Path(source).is_relative_to(tmp_path_factory.getbasetemp()):
            del sys.modules[name]


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Function (source, suffix) -> name of a module of a user's own in the working directory, which is tmp_path.

    No other test has a module of this name: an imported module stays in the process.
    """
    monkeypatch.chdir(tmp_path)

    def write(source: str, suffix: str = "") -> str:
        name = f"own_{tmp_path.name}{suffix}"
        (tmp_path / f"{name}.py").write_text(source)
        return name

    return write


@pytest.fixture
def command_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Function (arguments) -> exit code and output of the command `aqnpipe`, which runs in this process.

    A process of its own imports the libraries anew, which takes seconds.
    """
    from aqnpipe.cli.main import main

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        words = [str(argument) for argument in arguments]
        monkeypatch.setattr(sys, "argv", ["aqnpipe", *words])
        capfd.readouterr()
        code: object = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        assert isinstance(code, int)
        printed, said = capfd.readouterr()
        return subprocess.CompletedProcess(words, code, printed, said)

    return run


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No downloads from the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tasks for lm-evaluation-harness and their questions."""
    from harness_tasks import write_tasks

    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[WarmPython]":
    """Forks Snakemake and its jobs from a process that has their imports made."""
    from faulted_study import WarmPython

    server = WarmPython(tmp_path_factory.mktemp("warm"))
    yield server
    server.close()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)  # results on the CPU depend on the number of threads


def random_qwen2(num_layers: int = 3, seed: int = 0, **overrides) -> "Qwen2ForCausalLM":
    """A Qwen2 with random weights, 32 channels wide, eager attention."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    settings = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "attn_implementation": "eager",
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**{**settings, **overrides})).eval()


@pytest.fixture
def model() -> "Qwen2ForCausalLM":
    return random_qwen2()


@pytest.fixture(scope="session")
def make_model():
    return random_qwen2


@pytest.fixture(scope="module")
def save_model(tmp_path_factory, make_model):
    """Function (num_layers) -> folder of a small random model with the built-in tokenizer."""
    from tiny_tokenizer import build_tokenizer

    def save(num_layers: int) -> Path:
        folder = tmp_path_factory.mktemp("model")
        tokenizer = build_tokenizer()
        make_model(
            num_layers=num_layers,
            vocab_size=len(tokenizer),
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        ).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return save
