"""`aqnpipe doctor --try`: what passed, what did not and what was not tried are on the page, each with its reason."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from typed import typed

from aqnpipe.cli.doctor import command, first_hour
from aqnpipe.cli.doctor.first_hour import Attempt, Outcome, try_out
from aqnpipe.config.study import load_study_file
from aqnpipe.device import Device
from aqnpipe.errors import ConfigError

ROOT = Path(__file__).parents[2]
CPU = Device("cpu", 1, ("cpu",))


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """An attempt with one minute, in a working directory without tests and benchmarks."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    return Attempt(tmp_path / "out", CPU, 2, time.monotonic() + 60)


def test_without_a_clone_kernels_and_costs_are_not_tried(attempt):
    for step in (first_hour._kernels, first_hour._costs):
        found = step(attempt)
        assert (found.status, found.found) == ("not tried", ["needs a clone of the repository, and pytest there"])


def kernels(monkeypatch, attempt, body):
    Path("test_kernels.py").write_text(f"import pytest\n{body}")
    monkeypatch.setattr(first_hour, "_KERNEL_TESTS", ("test_kernels.py",))
    return first_hour._kernels(attempt)


def test_kernels_that_pass_and_reasons_of_skipped_tests(monkeypatch, attempt):
    skipped = '@pytest.mark.skip(reason="needs a CUDA device")\n@pytest.mark.parametrize("a", [1, 2])\n'
    found = kernels(monkeypatch, attempt, f"def test_a():\n    pass\n\n{skipped}def test_b(a):\n    pass\n")
    assert (found.status, found.not_tried) == ("passed", ["2 tests: needs a CUDA device"])
    assert "1 passed, 2 skipped" in found.found[0]


@pytest.mark.parametrize("body", ["def test_a():\n    assert 1 == 2\n", "import no_such_module\n"])
def test_kernels_that_fail_are_named(body, monkeypatch, attempt):
    found = kernels(monkeypatch, attempt, body)
    assert found.status == "did not pass"
    assert any("test_kernels.py" in line for line in found.found)


def costs(monkeypatch, attempt, script):
    Path("costs.py").write_text(f"import json, pathlib, sys, time\n{script}")
    monkeypatch.setattr(first_hour, "_COSTS", {"cpu": ("costs.py",)})
    return first_hour._costs(attempt)


def row(what, median, target, rate=None):
    return {
        **{"what": what, "against": "clean", "median": median, "lowest": median, "highest": median},
        **{"target": target, "tokens_per_second": rate},
    }


@pytest.mark.parametrize(("median", "status"), [(1.1, "passed"), (1.3, "did not pass")])
def test_a_cost_above_its_target_does_not_pass(median, status, monkeypatch, attempt):
    rows = [row("prefill", median, 1.2, 4321.6), row("naive", 9.0, None)]
    written = f"pathlib.Path(sys.argv[2]).write_text({json.dumps({'ratios': rows})!r})\n"
    found = costs(monkeypatch, attempt, written)
    assert found.status == status
    assert found.found == (
        ["1 of 1 targets met"] if status == "passed" else ["0 of 1 targets met", "missed: prefill (1.300)"]
    )
    assert found.speeds == [("prefill", "4322")]


def test_a_benchmark_that_fails_or_has_no_time_left_does_not_pass(monkeypatch, attempt):
    assert "exit code 3" in costs(monkeypatch, attempt, "sys.exit(3)\n").found[0]
    late = Attempt(attempt.folder, CPU, 2, time.monotonic() + 0.5)
    found = costs(monkeypatch, late, "time.sleep(60)\n")
    assert (found.status, found.found[0].partition(";")[0]) == ("did not pass", "not finished in time")


def test_a_kill_reaches_the_children(attempt):
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    before = set(psutil.Process().children(recursive=True))
    started = []

    def running():
        started[:] = set(psutil.Process().children(recursive=True)) - before
        return len(started) == 2

    assert attempt.run([sys.executable, "-c", child], "log", kill_when=running) is None
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in started)


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("vllm", [False, True])
@pytest.mark.parametrize("kind", ["cpu", "cuda", "npu"])
def test_the_study_is_valid_for_any_number_of_devices(workers, vllm, kind, attempt):
    of_kind = Attempt(attempt.folder, Device(kind, workers, ("A",)), workers, attempt.deadline)
    path = attempt.folder / "study.yaml"
    path.write_text(yaml.safe_dump(first_hour._settings(of_kind, vllm)))
    study = load_study_file(path)
    assert study.config.training.num_workers == workers
    assert study.config.training.parallelism == ("fsdp" if workers > 1 else "data")
    assert study.config.training.prompts_per_step % workers == 0


def test_the_page_and_the_exit_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "broken.log"
    log.write_text("\n".join(f"line {number}" for number in range(100)))
    outcomes = {
        "_kernels": Outcome("kernels", "passed", ["3 passed"], ["2 tests: needs a CUDA device"]),
        "_study": Outcome("study", "did not pass", ["exit code 1"], log=log, speeds=[("training", "77")]),
        "_costs": Outcome("costs", "not tried", ["no clone"]),
    }
    for name, outcome in outcomes.items():
        monkeypatch.setattr(first_hour, name, lambda attempt, outcome=outcome: outcome)
    assert not try_out(Path("out"), [], None, 1, print)
    page = Path("out", first_hour.PAGE).read_text()
    parts = dict(re.findall(r"(?ms)^## (.*?)\n(.*?)(?=^## |\Z)", page))
    tried = parts["What passed, and what did not"]
    assert "| kernels | passed | 0.0 | 3 passed |" in tried
    assert f"commit {first_hour._commit(first_hour._CLONE)}, " in page
    assert "| study | did not pass | 0.0 | exit code 1 |" in tried
    left = parts["What was not tried, and why"]
    assert "| costs | no clone |" in left
    assert "| kernels | 2 tests: needs a CUDA device |" in left
    assert "| training | 77 |" in parts["Tokens per second"]
    assert "line 99" in parts["The end of broken.log"]
    assert "line 9\n" not in parts["The end of broken.log"]
    outcomes["_study"].status = "not tried"
    assert try_out(Path("out"), [], None, 1, print)


def test_the_page_names_the_commit(tmp_path):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    assert first_hour._commit(tmp_path) == "unknown (the package runs from no clone)"
    git("init", "--initial-branch", "main")
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "--message", "first")
    git("tag", "v1")
    commit = git("rev-parse", "HEAD")
    assert first_hour._commit(tmp_path) == commit
    (tmp_path / "file").write_text("b")
    assert first_hour._commit(tmp_path) == f"{commit}-dirty"


def test_a_page_is_no_json():
    done = typed("doctor", "--try", "--json")
    assert isinstance(done.exception, ConfigError)


@pytest.mark.slow
def test_on_a_cpu_with_two_workers(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(command, "TRIED", tmp_path / "tried")
    # All other tests of kernels run with the suite anyway.
    monkeypatch.setattr(first_hour, "_KERNEL_TESTS", ("tests/gpu", "tests/noise/kernels/test_shards.py"))
    smallest = ("benchmarks/noise_overhead.py", "--smallest")
    monkeypatch.setattr(first_hour, "_COSTS", {"cpu": smallest, "cuda": smallest})
    done = typed("doctor", "--try", "--minutes", "60")
    page = (tmp_path / "tried" / first_hour.PAGE).read_text()
    assert "| noise kernels against their references | passed |" in page, done.output
    assert re.search(r"\| a study, \d+ (sharded workers|worker), killed and resumed \| passed \|", page), page
    assert re.search(r"killed, then resumed after step [1-3]\b", page)
    assert re.search(r"generated tokens, all phases \| \d+ \|", page)
    assert re.search(r"\| generation, matmul \| clean \| [\d.]+ \|", page)
