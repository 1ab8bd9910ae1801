"""One process per device: crashes, refusals and interrupts of pretended workers, and which outcome wins."""

import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest
from made_up_diagnoses import HARDWARE, diagnosis, located

from aqnpipe.artifacts.diagnoses import Collectives, worst
from aqnpipe.artifacts.files import write_json
from aqnpipe.cli.diagnose import node
from aqnpipe.cli.diagnose.worker import Order
from aqnpipe.cli.options import ModelSource
from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.diagnosis.node_reports import INTERRUPTED, RunsOfDevice, record_of

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(autouse=True)
def pretend(monkeypatch, tmp_path_factory):
    reports = tmp_path_factory.mktemp("reports")
    for name, file in (("healthy", diagnosis()), ("fault", diagnosis(located(1)))):
        runs = RunsOfDevice("cpu", HARDWARE, repeated=True)
        runs.add(file, record_of(file, DiagnosisConfig(), 64))
        write_json(reports / f"{name}.json", runs.report())
    write_json(reports / "rank.json", Collectives(verdict="healthy", reason="", calls=5))
    monkeypatch.setattr(node, "_MODULE", "pretend_worker")
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    monkeypatch.setenv("PRETENDED_REPORTS", str(reports))
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return temporary


def run(act, logs=None, duration=None, show_progress=lambda line: None):
    """Return the reports of the devices."""
    return run_node(act, logs, duration, show_progress)[0]


def run_node(act, logs=None, duration=None, show_progress=lambda line: None, devices=("cpu", "cpu")):
    order = Order(
        device="cpu",
        model=ModelSource(name=act, folder=Path(), random_weights=False, dtype="float32", attention="eager"),
        method="exact",
        config=DiagnosisConfig(),
        duration_seconds=duration,
    )
    return node.diagnose_devices(order, devices, logs, show_progress)


def interrupt_when(condition):
    """Send SIGINT to this process as soon as `condition` holds."""

    def wait():
        while not condition():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()


def verdicts(reports):
    return [report.verdict for report in reports]


def test_two_healthy_devices_leave_nothing_behind(pretend):
    reports = run("healthy")
    assert verdicts(reports) == ["healthy", "healthy"]
    assert [report.log for report in reports] == [None, None]
    assert list(pretend.iterdir()) == []


def test_every_device_has_its_own_log(tmp_path):
    reports = run("fault", logs=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("0.cpu.log", "1.cpu.log"),
        *("rank0.cpu.log", "rank1.cpu.log"),
    ]
    assert Path(reports[1].log).read_text().startswith("process ")
    assert verdicts(reports) == ["fault", "healthy"]
    assert worst(verdicts(reports)) == "fault"


def test_a_crash_is_an_error_with_its_last_words_and_its_log_is_kept():
    first, second = run("crash")
    assert first.verdict == "error"
    assert "SIGKILL: CUDA error: an illegal memory access" in first.reason
    assert "illegal memory access" in Path(first.log).read_text()
    assert second.verdict == "healthy"


def test_a_fault_found_before_a_crash_is_a_fault():
    first, _ = run("fault crash")
    assert first.verdict == "fault"
    assert "; then: its process was ended by signal SIGKILL" in first.reason
    assert len(first.faults) == 1


def test_healthy_runs_before_a_crash_are_an_error():
    first, _ = run("healthy crash")
    assert first.verdict == "error"
    assert first.reason.startswith("1 runs: 1 healthy; then: ")


def test_a_refusal_is_its_line():
    first, second = run("refuse")
    assert (first.verdict, first.reason) == ("error", "--device cuda:9: not usable here (no such device)")
    assert worst(verdicts([first, second])) == "error"


def at_work(folder, number):
    return _starts(folder / f"{number}.cpu.log", "process")


def test_an_interrupt_ends_with_what_was_found(tmp_path):
    interrupt_when(lambda: at_work(tmp_path, 0) and at_work(tmp_path, 1))
    before = signal.getsignal(signal.SIGINT)
    first, second = run("fault wait", logs=tmp_path, duration=3600.0)
    assert (first.verdict, len(first.repetition.runs)) == ("fault", 1)
    assert second.verdict == "healthy"
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_before_the_first_result_is_no_verdict(tmp_path):
    interrupt_when(lambda: at_work(tmp_path, 0) and at_work(tmp_path, 1))
    first, second = run("deaf wait", logs=tmp_path)
    assert (first.verdict, first.reason) == ("abstain", INTERRUPTED)
    assert second.verdict == "healthy"


def test_a_process_that_a_scheduler_ended_with_this_one_keeps_its_runs(tmp_path):
    interrupt_when(lambda: at_work(tmp_path, 0) and at_work(tmp_path, 1))
    first, _ = run("healthy deaf wait", logs=tmp_path)
    assert (first.verdict, first.repetition.interrupted) == ("healthy", True)


def test_an_exception_here_ends_the_processes(tmp_path):
    def fail(line):
        if at_work(tmp_path, 0):
            raise KeyError("anything")

    with pytest.raises(KeyError):
        run("wait", logs=tmp_path, show_progress=fail)
    process = int((tmp_path / "0.cpu.log").read_text().split()[1])
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_healthy_ranks_leave_nothing_behind(pretend):
    _, found = run_node("healthy")
    assert (found.verdict, found.calls) == ("healthy", 5)
    assert found.reason == "5 calls on each of 2 ranks compared, wrong: none"
    assert list(pretend.iterdir()) == []


def test_ranks_of_faulty_devices_are_compared_too():
    reports, found = run_node("fault")
    assert (verdicts(reports), found.verdict) == (["fault", "healthy"], "healthy")


@pytest.mark.parametrize(
    ("act", "devices", "reason"),
    [
        ("healthy", ("cpu",), "one device"),
        ("healthy", ("cpu", "cuda:0"), "devices of different types"),
        ("crash", ("cpu", "cpu"), "cpu could not be diagnosed"),
    ],
)
def test_collectives_that_cannot_be_compared_change_no_verdict(act, devices, reason, tmp_path):
    _, found = run_node(act, logs=tmp_path, devices=devices)
    assert (found.verdict, found.reason) == (None, reason)
    assert not list(tmp_path.glob("rank*"))


def test_a_rank_that_dies_is_named_and_the_others_do_not_wait_for_it(tmp_path):
    began = time.monotonic()
    _, found = run_node("healthy rank-dies", logs=tmp_path)
    assert found.verdict == "error"
    assert found.reason == "rank 1: its process was ended by signal SIGKILL: all_reduce of 7 elements, call 1"
    assert time.monotonic() - began < 60
    assert sorted(path.name for path in tmp_path.glob("rank*")) == ["rank0.cpu.log", "rank1.cpu.log"]


def test_an_error_of_a_rank_is_its_line():
    _, found = run_node("healthy rank-errs")
    assert (found.verdict, found.reason) == ("error", "rank 1: cpu: Connection closed by peer")


def test_ranks_that_hang_end_in_one_line_with_their_places(monkeypatch):
    monkeypatch.setattr(node, "_SECONDS_WITHOUT_PROGRESS", 2.0)
    _, found = run_node("healthy rank-hangs")
    assert found.verdict == "error"
    place = "all_reduce of 7 elements, call 1"
    assert found.reason == f"no rank went on for 2 s: rank 0 in {place}, rank 1 in {place}"


def test_an_interrupt_of_ranks_keeps_the_devices(tmp_path):
    interrupt_when(lambda: (tmp_path / "rank1.cpu.log").is_file())
    reports, found = run_node("fault rank-hangs", logs=tmp_path)
    assert verdicts(reports) == ["fault", "healthy"]
    assert (found.verdict, found.reason) == (None, "interrupted")


def test_an_interrupt_of_devices_starts_no_ranks(tmp_path):
    interrupt_when(lambda: at_work(tmp_path, 0) and at_work(tmp_path, 1))
    _, found = run_node("fault wait", logs=tmp_path, duration=3600.0)
    assert (found.verdict, found.reason) == (None, "interrupted")
    assert not list(tmp_path.glob("rank*"))


def _starts(path, text):
    return path.is_file() and path.read_text().startswith(text) and path.read_text().endswith("\n")
