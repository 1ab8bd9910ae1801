"""`aqnpipe exec`: whole programs on a noisy machine, unchanged, with one line of what was measured.

The command runs in this process, the program in one of its own.
"""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from made_up_parities import identity, operator, parity
from measured_figures import LINEARS, OPERATORS, OUTSIDE
from transformers import Qwen2Config

from aqnpipe.artifacts.files import write_json
from aqnpipe.config.measured_noise import ErrorFigures
from aqnpipe.errors import ConfigError
from aqnpipe.noise.autoload import VARIABLE, autoload
from aqnpipe.noise.program import begin

PROGRAMS = Path(__file__).parents[1] / "support" / "programs"


@pytest.fixture
def execute(command_line):
    """Function (arguments, program, its words) -> exit code, standard output and lines of standard error."""

    def run(*arguments, program="train.py", words=()):
        done = command_line("exec", *arguments, "--", sys.executable, PROGRAMS / program, *words)
        return done.returncode, done.stdout, done.stderr.splitlines()

    return run


def test_a_program_has_noise_in_every_product(execute, monkeypatch, capfd, tmp_path):
    code, printed, lines = execute("--noise", "0.05", "--seed", "3", "--receipts", str(tmp_path / "r"), words=["fork"])
    assert code == 0, lines
    line = lines[-1]
    # Two forward and three backward per step (the inputs have no gradient), one outside, three in the fork.
    assert line.startswith("aqnpipe: 19 of 19 products had relative gaussian scale 0.05, measured scale 0.05")
    assert "in 2 processes" in line
    receipts = [json.loads(path.read_text()) for path in (tmp_path / "r").glob("*.json")]
    assert len(receipts) == 2
    monkeypatch.setattr(sys, "argv", ["train.py"])
    runpy.run_path(str(PROGRAMS / "train.py"))
    clean = capfd.readouterr().out
    assert clean
    assert clean != printed


@pytest.mark.slow
def test_the_seed_decides_the_noise(execute):
    printed, again, other = (execute("--noise", "0.05", "--seed", seed)[1] for seed in ("3", "3", "4"))
    assert printed == again != other


def test_the_programs_exit_code_is_passed_on(execute):
    code, _, lines = execute("--noise", "0.05", "--no-backward", words=["die"])
    assert code == 7
    assert "7 of 16 products" in lines[-1]
    assert lines[-1].endswith("without 9 gradients")


def test_a_refuted_receipt_is_said_whatever_the_exit_code_of_the_program(command_line):
    program = (
        "import sys, torch; F = torch.nn.functional; old = F.linear; F.linear = lambda *a: old(*a) * 1.02\n"
        "from aqnpipe.config.model import builtin_folder\nfrom transformers import AutoModelForCausalLM\n"
        "AutoModelForCausalLM.from_pretrained(builtin_folder('tiny'))(torch.arange(9)[None]); sys.exit(1)"
    )
    done = command_line("exec", "--noise", "0.05", "--no-backward", "--", sys.executable, "-c", program)
    assert done.returncode == 1
    assert "is not the result of its product, so other code computes in its place" in done.stderr.splitlines()[-1]


def test_options_behind_the_first_word_are_those_of_the_program(command_line):
    program = "import sys, torch; print(sys.argv[1:]); torch.randn(8, 8) @ torch.randn(8, 8)"
    done = command_line("exec", "--noise", "0.05", "--no-backward", sys.executable, "-c", program, "--noise", "7")
    assert (done.returncode, done.stdout) == (0, "['--noise', '7']\n")
    assert "scale 0.05" in done.stderr


def test_products_of_complex_numbers_are_refused_anywhere_and_those_of_integers_in_layers(command_line):
    program = "import torch; a = torch.randn(8, 8); a @ a; b = torch.ones(8, 8, dtype=torch.{}); b @ b"
    codes, lines = [], []
    for dtype in ("int64", "complex64"):
        done = command_line(
            "exec", "--noise", "0.05", "--no-backward", "--", sys.executable, "-c", program.format(dtype)
        )
        codes.append(done.returncode)
        lines.append(done.stderr.splitlines()[-1])
    assert codes == [0, 2]
    assert lines[0].endswith("without 1 outside, of integers")
    assert "1 calls of mm multiplied integers or complex numbers" in lines[1]


def test_a_request_to_end_reaches_the_program_and_what_it_measured_is_said():
    main = "from aqnpipe.cli.main import main; main()"
    program = "import os, torch; a = torch.ones(8, 8); a @ a; print(os.getpid(), flush=True)\nwhile True: a @ a"
    arguments = ["exec", "--noise", "0.05", "--no-backward", "--", sys.executable, "-c", program]
    with subprocess.Popen(
        [sys.executable, "-c", main, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None
        number = int(started.stdout.readline())
        started.terminate()
        _, said = started.communicate()
    assert started.returncode == 143
    assert said.splitlines()[-1].startswith("aqnpipe: ")
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


def test_a_machine_within_a_machine_is_refused_in_one_line(command_line, monkeypatch):
    monkeypatch.setenv(VARIABLE, "{}")
    done = command_line("exec", "--noise", "0.05", "--", sys.executable, "-c", "")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert f"{VARIABLE} is in the environment: this is a noisy machine already" in done.stderr


def test_only_some_operators(execute):
    code, _, lines = execute("--error", "kind=mantissa_truncation,mantissa_bits=3", "--only", "bmm")
    assert code == 2
    assert "forward: no product had the requested error, of 7 that were seen" in lines[-1]


def test_a_killed_program_and_processes_of_multiprocessing(execute):
    code, _, lines = execute("--noise", "0.05", "--no-backward", words=["pool", "kill"])
    assert code == 137
    # One product in each of two processes.
    assert lines[-1].startswith("aqnpipe: 2 of 2 products")
    assert "in 2 processes" in lines[-1]
    code, _, lines = execute("--noise", "0.05", words=["late"])
    assert code == 137
    # Two forward and three backward per step: what was computed before a kill is in the receipt.
    assert lines[-1].startswith("aqnpipe: 15 of 15 products")


@pytest.mark.parametrize(("words", "code"), [([], 0), (["kill"], 137)])
def test_products_that_a_killed_process_did_not_record_are_said(command_line, tmp_path, words, code):
    """Here no time is allowed for writing while the program runs."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, sys, torch\n"
        "from aqnpipe.noise import program\n"
        "program._FIRST_SECONDS = -1e9\n"
        "torch.ones(2, 3) @ torch.ones(3, 2)\n"
        "if sys.argv[1:]:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = command_line("exec", "--noise", "0.05", "--no-backward", "--", sys.executable, program, *words)
    assert done.returncode == code, done.stderr
    said = done.stderr.splitlines()[-1]
    assert ("not counted: the last products of killed processes (1)" in said) == bool(words)
    assert said.startswith("aqnpipe: 0 of 0" if words else "aqnpipe: 1 of 1")


def test_a_program_without_torch_is_refused(command_line):
    done = command_line("exec", "--noise", "0.05", "--", "true")
    assert done.returncode == 2
    assert "no process of the program wrote a receipt" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "found no --noise, no --error and no --fault, expected one of them"),
        (["--noise", "0.05", "--error", "kind=nothing"], "found --noise 0.05 and --error kind=nothing"),
        (["--noise", "1.5"], "--noise: found 1.5, expected below 1; did you mean 0.015?"),
        (["--error", "kind=nothing"], "kind"),
        (["--error", "kind=relative_gaussian,scale=x"], "scale"),
        (["--error", "relative_gaussian"], "found 'relative_gaussian', expected comma-separated key=value pairs"),
        (["--noise", "0.05", "--operators", "some"], "operators: found 'some', expected 'matmul' or 'all'"),
        (["--fault", "type=dead_zone,layer=1,magnitude=2"], "faults.0.magnitude"),
        (
            ["--fault", "type=dead_zone,layer=1,magnitude=0.1", "--only", "bmm"],
            "--only is of errors, expected --noise or",
        ),
        (["--fault", "type=dead_zone,layer=1,magnitude=0.1", "--no-backward"], "--no-backward is of errors, expected"),
        (["--error", "kind=own,function=nowhere:function,size=1"], "nowhere"),
        (["--error", "kind=measured,from=parity.json"], "a measured error is of matmul operators in forward passes"),
        (
            ["--error", "kind=measured,from=parity.json", "--no-backward", "--operators", "all"],
            "a measured error is of matmul operators in forward passes",
        ),
        (["--error", "kind=measured,from=nowhere.json", "--no-backward"], "nowhere.json"),
        (["--error", "kind=measured,from=a100", "--no-backward"], "from is 'a100', expected a file of `aqnpipe parity"),
    ],
)
def test_wrong_arguments_are_one_line(command_line, arguments, message):
    done = command_line("exec", *arguments, "--", "true")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("ERROR: ")
    assert message in line


def test_nothing_happens_without_the_variable(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    code = (
        "import sys, time; sys.modules['torch'] = None\n"
        "from aqnpipe.noise.autoload import autoload; autoload()\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ('aqnpipe', 'numpy', 'pydantic', 'numba')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['aqnpipe', 'aqnpipe.noise', 'aqnpipe.noise.autoload']"
    autoload()


def test_a_wrong_specification_ends_the_process():
    with pytest.raises(ConfigError, match=r"AQNPIPE_MACHINE: .*scale"):
        begin('{"error": {"kind": "relative_gaussian", "scale": -1}, "receipts": "x"}')


FAULT = "type=noise,layer=1,magnitude=0.1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--noise", "0.05", "--operators", "all"], "286 of 286 products had relative gaussian scale 0.05, measured"),
        (
            ["--error", "kind=fake_quantization,format=mxfp4,activations=true"],
            "196 of 229 products had fake quantization format mxfp4 activations True from",
        ),
        (
            ["--error", "kind=own,function=own_errors:scaled,size=0.05"],
            "223 of 223 products had own function own_errors:scaled size 0.05 from",
        ),
        (["--fault", FAULT], "noise in layer 1 (layer_output) changed 4,608 of 4,608 values in 3 calls in 1 process"),
        (
            ["--noise", "0.05", "--fault", "type=dead_zone,layer=1,magnitude=0.3,site=q_proj", "--fault", FAULT],
            "values in 3 calls; noise in layer 1 (layer_output) changed 4,608 of 4,608 values",
        ),
    ],
)
def test_forms_of_errors_and_faults_on_a_decoder_with_checkpoints(execute, monkeypatch, tmp_path, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_errors.py").write_text(
        "def scaled(values, normals):\n    return values * (1 + 0.05 * normals[0])\n"
    )
    code, printed, lines = execute(*arguments, program="decoder.py")
    assert code == 0, lines
    assert said in lines[-1]
    if "--operators" in arguments or arguments.count("--fault") == 2:  # all random numbers of the other forms are here
        assert execute(*arguments, program="decoder.py")[1] == printed


@pytest.fixture
def parity_file(tmp_path):
    """A parity of the decoder of `decoder.py`, in which every operator has figures of its own."""

    def write(**changed):
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
        config = Qwen2Config(vocab_size=64, num_key_value_heads=1, **(sizes | changed)).to_dict()
        places = [*((kind, layer) for layer in range(3) for kind in OPERATORS), *((kind, None) for kind in OUTSIDE)]
        found = parity(
            [
                operator(*place, figures=ErrorFigures(per_result=0.01, per_input=0.001 * (place[0] in LINEARS)))
                for place in places
            ],
            first=identity(config=config, attention="sdpa"),
            second=identity(config=config, attention="sdpa", dtype="bfloat16"),
        )
        write_json(tmp_path / "parity.json", found)
        return tmp_path / "parity.json"

    return write


@pytest.mark.slow
def test_a_measured_error_is_on_every_operator_of_a_decoder(execute, parity_file):
    error = f"kind=measured,from={parity_file()},multiple=2"
    code, printed, lines = execute("--error", error, "--no-backward", program="decoder.py")
    assert code == 0, lines
    # 3 passes with 8 products and 2 norms in a layer, and lm_head; two of them compute their layers again, all but the
    # last product.
    assert f"{(3 * 10 + 2 * 9) * 3 + 3} of" in lines[-1]
    assert "products had measured from " in lines[-1]
    assert execute("--error", error, "--no-backward", program="decoder.py")[1] == printed


@pytest.mark.slow
def test_a_measured_error_of_another_model_ends_the_program(execute, parity_file):
    error = f"kind=measured,from={parity_file(hidden_size=64)}"
    code, _, lines = execute("--error", error, "--no-backward", program="decoder.py")
    assert code == 2
    (line,) = (line for line in lines if "found hidden_size 64, the model that gets the noise has 32" in line)
    assert line.startswith("ERROR: ")
    assert not any("Traceback" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cleared", "copied", "wrapped", "exchanged", "retried"])
def test_a_layer_that_is_exchanged_or_interrupted_keeps_its_fault(execute, how):
    code, _, lines = execute("--fault", FAULT, program="decoder.py", words=[how])
    assert code == 0, lines
    assert "noise in layer 1 (layer_output) changed 4,608 of 4,608 values in 3 calls" in lines[-1]


@pytest.mark.slow
def test_a_layer_that_computes_past_its_fault_is_refused(execute):
    two = ["--fault", FAULT, "--fault", "type=bias,layer=1,magnitude=0.1"]
    code, _, lines = execute("--noise", "0.05", *two, program="decoder.py", words=["called"])
    assert code == 2
    for kind in ("noise", "bias"):
        assert f"{kind} in layer 1 (layer_output) was in 3 of 6 calls of its layer" in lines[-1]


@pytest.mark.slow
def test_adapters_of_fewer_rows_than_a_block_are_quantized(execute):
    error = "kind=fake_quantization,format=mxfp4,activations=true"
    code, _, lines = execute("--error", error, program="decoder.py", words=["adapted"])
    assert code == 0, lines


@pytest.mark.slow
def test_a_fault_that_no_model_has_is_refused(execute):
    code, _, lines = execute("--fault", "type=noise,layer=7,magnitude=0.1", program="decoder.py")
    assert code == 2
    assert lines[-1].endswith("changed none of 0 values, expected a program that calls a decoder with a layer 7")


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["shard"]])
def test_workers_of_torchrun_draw_noise_of_their_own(command_line, words):
    torchrun = Path(sys.executable).with_name("torchrun")
    program = [torchrun, "--nproc-per-node", "2", PROGRAMS / "workers.py", *words]
    done = command_line("exec", "--noise", "0.05", "--", *program)
    assert done.returncode == 0, done.stderr
    # Two forward and three backward per step and worker.
    assert "aqnpipe: 30 of 30 products had" in done.stderr
    assert "in 2 processes" in done.stderr
    first, second = done.stdout.split()
    assert first != second


@pytest.mark.slow
def test_workers_of_data_loaders_have_noise(execute):
    code, printed, lines = execute("--noise", "0.05", "--no-backward", program="loader.py")
    assert code == 0, lines
    assert lines[-1].startswith("aqnpipe: 24 of 24 products had")
    assert "in 6 processes" in lines[-1]
    # No worker draws the noise of another: without noise all batches of a method have the same spread.
    assert len(set(printed.splitlines())) == 6


@pytest.mark.slow
def test_processes_of_ray_have_noise_though_they_are_killed(execute):
    code, _, lines = execute("--noise", "0.05", program="ray_tasks.py")
    assert code == 0, lines
    assert any(line.startswith("aqnpipe: 14 of 14 products had") for line in lines), lines


@pytest.mark.slow
def test_compiled_code_has_noise(execute):
    code, printed, lines = execute("--noise", "0.05", program="compiled.py")
    assert code == 0, lines
    assert printed == "layer True\nproduct True\n"


@pytest.mark.slow
@pytest.mark.parametrize("words", [["sft"], ["sft", "lora"], ["dpo"], ["dpo", "lora"], ["grpo"], ["grpo", "lora"]])
def test_stock_trainers_with_their_defaults(execute, words):
    code, _, lines = execute("--noise", "0.05", program="stock.py", words=words)
    assert code == 0, lines[-5:]
    assert "measured scale 0.05" in lines[-1] or "measured scale 0.049" in lines[-1]
