import json

import pytest

from aqnpipe.artifacts.files import read_json
from aqnpipe.artifacts.parities import ParityFile
from aqnpipe.cli.main import main

SMALL = ["--sequences", "4", "--tokens", "10", "--decode", "2"]


def run(monkeypatch, *arguments):
    """Run the command line and return its exit code."""
    monkeypatch.setattr("sys.argv", ["aqnpipe", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_of_main:
        main()
    return exit_of_main.value.code or 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Captures of two sites: eager attention, and sdpa with the values of the first."""
    path = tmp_path_factory.mktemp("sites")
    with pytest.MonkeyPatch.context() as patch:
        low = ["--dtype", "bfloat16"]
        assert run(patch, "capture", "tiny", *SMALL, *low, "-o", path / "gpu.capture") == 0
        replay = ["--replay", path / "gpu.capture", "--decode", "2"]
        assert run(patch, "capture", "tiny", *low, *replay, "--attention", "sdpa", "-o", path / "npu.capture") == 0
        assert run(patch, "capture", "tiny", *low, *replay, "-o", path / "same.capture") == 0
    return path


def test_two_files_beyond_rounding_exit_with_3(folder, monkeypatch, capsys, tmp_path):
    outputs = ["--json", tmp_path / "p.json", "--html", tmp_path / "p.html"]
    arguments = ["parity", folder / "gpu.capture", folder / "npu.capture", "--model", "tiny", *outputs]
    assert run(monkeypatch, *arguments) == 3
    shown = capsys.readouterr().out
    assert "different algorithm: 6 operators (attention)" in shown
    assert "first: scores and probabilities rounded" in shown
    file = read_json(tmp_path / "p.json", ParityFile)
    assert file.verdict == "different algorithm"
    assert file.substitution.alone[0].kinds == ("attention",)
    page = (tmp_path / "p.html").read_text()
    assert page.count("<svg") == 2
    assert "http://" not in page
    assert "https://" not in page


def test_two_files_within_rounding_exit_with_0(folder, monkeypatch, capsys):
    assert run(monkeypatch, "parity", folder / "gpu.capture", folder / "same.capture") == 0
    assert "equal: every operator gives the same bits" in capsys.readouterr().out


def test_two_configurations_without_files(monkeypatch, capsys):
    settings = ["--first", "dtype=float32,decode=0", "--second", "dtype=float32,attention=sdpa,decode=0"]
    assert run(monkeypatch, "parity", "--model", "tiny", *settings, "--sequences", "2", "--tokens", "8") == 0
    assert "rounding: all operators differ by rounding at most" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["parity"], "expected two files of `aqnpipe capture`, or --model, --first and --second"),
        (["parity", "{0}/gpu.capture"], "found 1 file, expected two captures"),
        (["parity", "{0}/gpu.capture", "{0}/none.capture"], "none.capture: found no such file"),
        (["parity", "{0}/gpu.capture", "{0}/npu.capture", "--first", "x=1"], "found files and --first"),
        (["parity", "{0}/gpu.capture", "{0}/npu.capture", "--tokens", "8"], "found files and --tokens"),
        (["parity", "--model", "tiny", "--first", "dtype=float8", "--second", ""], "--first: dtype"),
        (["parity", "--model", "tiny", "--first", "colour=red", "--second", ""], "unknown key 'colour', expected"),
        (["parity", "--model", "tiny", "--first", "dtype", "--second", ""], "expected comma-separated key=value pairs"),
        (["parity", "{0}/gpu.capture", "{0}/npu.capture", "--model", "tiny-large"], "its weights have SHA-256"),
        (["capture", "tiny", "-o", "{0}/none/a.capture"], "--output"),
        (
            ["capture", "tiny", "-o", "{1}", "--backend", "vllm", "--attention", "sdpa"],
            "attention, which has no effect",
        ),
        (
            ["parity", "--model", "tiny", "--first", "backend=vllm,padding=left", "--second", ""],
            "padding, which has no",
        ),
        (["capture", "tiny", "-o", "{1}", "--tensor-parallel", "2"], "tensor_parallel, which has no effect"),
        (["capture", "tiny", "-o", "{1}", "--no-batch-invariant"], "batch_invariant, which has no effect"),
        (
            ["parity", "--model", "tiny", "--first", "backend=vllm,tensor_parallel=0", "--second", ""],
            "--first: tensor_parallel: found 0",
        ),
        (["parity", "--model", "tiny", "--first", "tensor_parallel=2", "--second", ""], "which has no effect"),
        (["capture", "tiny", "-o", "{1}", "--data", "{0}/none.txt"], "found no such file"),
        (
            ["capture", "tiny", "-o", "{1}", "--replay", "{0}/gpu.capture", "--seed", "1"],
            "--seed: found beside --replay",
        ),
        (["capture", "tiny", "-o", "{1}", "--replay", "{0}/same.capture", "--decode", "2"], "is itself a replay"),
        (["capture", "tiny-large", "-o", "{1}", "--replay", "{0}/gpu.capture"], "expected the same model"),
        (["capture", "tiny", "-o", "{1}", "--decode", "40"], "--decode 40: the shortest sequence has 32 tokens"),
        (["capture", "none", "-o", "{1}"], "model source 'none' is unknown"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(folder, monkeypatch, capsys, tmp_path, arguments, message):
    given = [argument.format(folder, tmp_path / "a.capture") for argument in arguments]
    assert run(monkeypatch, *given) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "a.capture").exists()


@pytest.mark.parametrize(
    ("variable", "option", "message"),
    [
        ("1", [], "VLLM_BATCH_INVARIANT: found it on, expected off: vLLM has no batch-invariant mode for a device"),
        ("on", [], "VLLM_BATCH_INVARIANT: found 'on', expected 0 or 1"),
        ("0", ["--batch-invariant"], "batch-invariant mode: found it on, expected off"),
    ],
)
def test_a_batch_invariant_mode_that_the_device_does_not_have_is_refused(
    monkeypatch, capsys, tmp_path, variable, option, message
):
    # vLLM need not be installed here.
    monkeypatch.setattr("aqnpipe.cli.two_machines.check_vllm", lambda device: None)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", variable)
    output = tmp_path / "a.capture"
    assert run(monkeypatch, "capture", "tiny", "--backend", "vllm", *option, "-o", output) == 2
    assert message in capsys.readouterr().err
    assert not output.exists()


def test_noise_is_put_on_the_measured_scale(monkeypatch, capsys):
    settings = ["--first", "dtype=float32,decode=0", "--second", "dtype=bfloat16,decode=0"]
    assert run(monkeypatch, "parity", "--model", "tiny", *settings, "--sequences", "2", "--tokens", "8") == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("noise of 5 %"))
    # bfloat16 has a relative RMS of 0.2 to 0.3 % on products of a model of this size.
    assert 15 < float(line.split(" times")[0].split()[-1]) < 30


def test_token_ids_from_a_file(monkeypatch, capsys, tmp_path):
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([[5, 6, 7, 8, 9], [10, 11, 12, 13]]))
    output = tmp_path / "a.capture"
    assert run(monkeypatch, "capture", "tiny", "--data", ids, "--decode", "0", "-o", output) == 0
    assert "on 9 of 9 tokens" in capsys.readouterr().out
    ids.write_text("[[1, 2.5]]")
    assert run(monkeypatch, "capture", "tiny", "--data", ids, "-o", output) == 2
    assert "expected a list of lists of token ids" in capsys.readouterr().err
