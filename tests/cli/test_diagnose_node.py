"""`aqnpipe diagnose` for a node: several devices, repeated runs, a history, a comparison, and what is refused."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import pytest
from made_up_diagnoses import diagnosis, located
from random_models import random_model_of
from transformers import MambaConfig, T5Config
from typed import typed

from aqnpipe.artifacts.diagnoses import NodeReport
from aqnpipe.artifacts.files import read_json, write_json
from aqnpipe.cli.diagnose import command
from aqnpipe.diagnosis.node_reports import node_of
from aqnpipe.errors import AqnpipeError

BETWEEN = "type=bias,site=all_reduce,magnitude=0.1"
FAULT = "type=bias,layer=1,magnitude=0.1,sparsity=0.05,site=o_proj"


def words(text):
    return " ".join(text.split())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    random_model_of("llama", num_layers=2).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_fault_on_a_node_in_the_table_the_json_and_the_history(model, tmp_path):
    path, history, logs = tmp_path / "node.json", tmp_path / "history", tmp_path / "logs"
    history.mkdir()
    logs.mkdir()
    began = datetime.now(UTC)
    result = typed(
        *("diagnose", model, "--devices", "cpu,cpu", "--method", "exact", "--fault", FAULT, "--seed", 3),
        *("--json", path, "--history", history, "--logs", logs),
    )
    assert result.exit_code == 3, result.output
    assert "0 of 2 devices healthy" in words(result.stdout)
    assert all(len(line) <= 80 for line in result.stdout.splitlines() if "log /" not in line)

    report = read_json(path, NodeReport)
    assert (report.verdict, report.exit_code, report.seed, report.attention) == ("fault", 3, 3, "eager")
    assert began <= report.time <= datetime.now(UTC)
    assert report.time.utcoffset() == timedelta(0)
    assert {"torch", "transformers"} <= report.versions.keys()
    assert [device.device for device in report.devices] == ["cpu", "cpu"]
    assert (report.collectives.verdict, report.collectives.faults) == ("healthy", ())
    assert "collectives: healthy: 205 calls on each of 2 ranks compared, wrong: none" in words(result.stdout)
    for device in report.devices:
        assert [(fault.layer, fault.site) for fault in device.faults] == [(1, "o_proj")]
        assert device.hardware.name
        assert device.log.startswith(str(logs))

    (entry,) = history.iterdir()
    assert re.fullmatch(r"[\w.-]+_\d{8}T\d{6}Z\.json", entry.name)
    assert entry.read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_a_fault_between_ranks_is_exit_3_although_every_device_is_healthy(model, tmp_path):
    path = tmp_path / "node.json"
    fault = "type=bias,site=all_gather,magnitude=0.1,sparsity=0.001,rank=1"
    result = typed("diagnose", model, "--devices", "cpu,cpu", "--method", "exact", "--fault", fault, "--json", path)
    assert result.exit_code == 3, result.output
    report = read_json(path, NodeReport)
    assert (report.verdict, [device.verdict for device in report.devices]) == ("fault", ["healthy", "healthy"])
    (wrong,) = report.collectives.faults
    assert (wrong.collective, wrong.rank, wrong.dtype) == ("all_gather", 1, "float32")
    assert f"all_gather in float32, result of rank 1 (cpu): {wrong.wrong_elements:,} elements" in words(result.stdout)
    assert "The fault is simulated; nothing follows for this node." in result.stdout


@pytest.mark.slow
def test_repeated_runs_report_rates(model, tmp_path):
    path = tmp_path / "runs.json"
    result = typed("diagnose", model, "--duration", "15s", "--method", "exact", "--json", path)
    assert result.exit_code == 0, result.output
    (device,) = read_json(path, NodeReport).devices
    runs = device.repetition.runs
    assert len(runs) > 2
    assert len({run.seed for run in runs}) == len(runs)
    assert len({run.elements_per_channel for run in runs}) > 1
    assert device.repetition.any_other_site.high == pytest.approx(1 - 0.05 ** (1 / len(runs)))
    assert f"in 0 of {len(runs)} runs (95 %: at most" in words(result.stdout)


@pytest.mark.slow
def test_ctrl_c_ends_with_the_runs_so_far(model, tmp_path):
    path = tmp_path / "interrupted.json"
    options = ("--devices", "cpu", "--duration", "1h", "--method", "exact", "--json", path, "--logs", tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", "from aqnpipe.cli.main import main; main()", "diagnose", model, *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        log = tmp_path / "0.cpu.log"
        deadline = time.monotonic() + 120
        while not (log.is_file() and "run 2" in log.read_text()):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "interrupted; the runs above were complete" in words(output)
    (device,) = read_json(path, NodeReport).devices
    assert device.repetition.interrupted
    assert len(device.repetition.runs) >= 1


@pytest.fixture
def two_files(tmp_path):
    """A healthy diagnosis of one device, and the report of a node on which the same device is faulty."""
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    write_json(before, diagnosis())
    write_json(after, node_of(diagnosis(located(4))))
    return before, after


def test_compare_takes_both_kinds_of_file_and_a_new_fault_is_exit_3(two_files):
    before, after = two_files
    result = typed("diagnose", "--compare", before, after)
    assert result.exit_code == 3
    assert result.stdout.splitlines() == [
        "H100: healthy -> fault",
        "H100: new fault: layer 4, o_proj: noise, 1 channels",
        "1 new fault",
    ]
    assert typed("diagnose", "--compare", after, before).exit_code == 0
    assert words(typed("diagnose", "--compare", before, before).stdout) == "no new fault"


def test_compare_refuses_what_it_cannot_read_and_what_it_would_ignore(two_files, tmp_path):
    before, after = two_files
    other = tmp_path / "other.json"
    other.write_text("[1]")
    gone = tmp_path / "gone.json"
    for arguments, message in (
        ((before, gone), f"{gone}: cannot be read"),
        ((before, other), "found list"),
        ((before, after, "--seed", 1), "--compare: found seed beside it"),
        ((before, after, "tiny"), "--compare: found model beside it"),
    ):
        result = typed("diagnose", "--compare", *arguments)
        assert isinstance(result.exception, AqnpipeError), result.output
        assert message in str(result.exception)
    damaged = json.loads(after.read_text())
    after.write_text(json.dumps({**damaged, "verdict": "healthy"}))
    assert isinstance(typed("diagnose", "--compare", before, after).exception, AqnpipeError)


@pytest.fixture
def no_work(monkeypatch):
    """Nothing is loaded and no process is started."""

    def fail(*arguments, **options):
        raise AssertionError("work was started")

    monkeypatch.setattr(command, "diagnose_here", fail)
    monkeypatch.setattr(command, "diagnose_node", fail)
    for variable in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "MODEL is missing"),
        (["tiny", "--device", "cpu", "--devices", "cpu"], "found --device and --devices"),
        (["tiny", "--devices", "all"], "found no GPU or NPU on this machine; `--devices cpu`"),
        (["tiny", "--devices", "cpu,cuda:7"], "requested cuda, found none"),
        (["tiny", "--devices", "cpu,gpu0"], "found 'gpu0', expected all, or a list of cuda:N, npu:N or cpu"),
        (["tiny", "--devices", "cpu,"], "found '', expected all"),
        (["tiny", "--device", "cuda:1"], "--device cuda:1: not usable here"),
        (["tiny", "--device", "mps"], "from the 'MPS' backend)"),
        (["tiny", "--duration", "2"], "--duration '2': expected a number and a unit, as in 30s, 15m or 2h"),
        (["tiny", "--duration", "0s"], "--duration '0s'"),
        (["tiny", "--duration", "two hours"], "--duration 'two hours'"),
        (["tiny", "--json", "{}/none/x.json"], "--json: {}/none: found no such folder, expected an existing folder"),
        (["tiny", "--json", "{}"], "--json {}: found a folder, expected the name of a file"),
        (["tiny", "--json", "{}/file/x.json"], "--json: {}/file: found a file, expected an existing folder"),
        (["tiny", "--json", "/proc/x.json"], "--json: /proc: cannot be written"),
        (["tiny", "--history", "{}/none"], "--history: {}/none: found no such folder"),
        (["tiny", "--logs", "{}/none", "--devices", "cpu"], "--logs: {}/none: found no such folder"),
        (["huge", "--devices", "cpu"], "model source 'huge' is unknown"),
        (["tiny", "--fault", BETWEEN], f"fault '{BETWEEN}': found cpu, expected --devices with at least 2 of one type"),
        (["tiny", "--fault", f"{BETWEEN},rank=2", "--devices", "cpu,cpu"], "found cpu, cpu, expected --devices with"),
        (["tiny", "--fault", f"{BETWEEN},layer=2", "--devices", "cpu,cpu"], "unknown key 'layer', expected type, site"),
    ],
)
def test_refusals_are_one_line_before_the_work(arguments, message, tmp_path):
    (tmp_path / "file").touch()
    result = typed("diagnose", *(argument.replace("{}", str(tmp_path)) for argument in arguments))
    assert isinstance(result.exception, AqnpipeError), result.output
    assert message.replace("{}", str(tmp_path)) in str(result.exception)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2), "2 of 2 layers are linear_attention"),
        (T5Config(vocab_size=50, d_model=32, num_layers=2), "model_type is 't5', expected a decoder-only model"),
    ],
    ids=["state-space", "encoder-decoder"],
)
@pytest.mark.parametrize("device", ["--device", "--devices"])
def test_models_of_other_families_are_refused_before_weights_are_read(settings, message, device, tmp_path):
    settings.save_pretrained(tmp_path)
    result = typed("diagnose", tmp_path, "--random-weights", device, "cpu")
    assert isinstance(result.exception, AqnpipeError), result.output
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
