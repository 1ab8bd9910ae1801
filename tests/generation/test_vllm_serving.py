"""A vLLM server under noise, as in the example: it answers with a receipt, and a wrong file stops its start."""

import importlib.util
from pathlib import Path

import pytest

from aqnpipe.config.noise import RelativeGaussian
from aqnpipe.config.yaml_file import load_yaml
from aqnpipe.errors import ConfigError
from aqnpipe.generation.vllm.plugin import is_vllm_installed
from aqnpipe.generation.vllm.serving import ServedNoiseFile
from aqnpipe.noise.receipts.receipt import Receipt

EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm" / "noisy_server.py"
needs_vllm = pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed: make vllm, make test-vllm")


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("noisy_server", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def receipt(example, address):
    (worker,) = example.post(f"{address}/collective_rpc", {"method": "aqnpipe_receipt"})["results"]
    assert worker["problems"] == []
    return Receipt.model_validate(worker["receipt"])


def answer(example, address, tokens=8):
    question = {"model": "tiny", "prompt": example.QUESTION, "max_tokens": tokens, "temperature": 0}
    options = {"ignore_eos": True, "logprobs": 0}
    return example.post(f"{address}/v1/completions", question | options)["choices"][0]["logprobs"]["token_logprobs"]


@needs_vllm
@pytest.mark.slow
def test_a_server_answers_under_noise_and_gives_its_receipt(example, tmp_path):
    with example.server(tmp_path, example.NOISE) as address:
        first = answer(example, address)
        measured = receipt(example, address).check()
        (phase,) = measured.phases
        # A token per forward.
        assert phase.passes == 8
        assert phase.recomputed > 0
        assert measured.operator_noise is not None
        assert measured.operator_noise.error == RelativeGaussian(scale=0.05)
        assert answer(example, address) != first
        (phase,) = receipt(example, address).check().phases
        assert phase.passes == 16


@needs_vllm
@pytest.mark.slow
def test_a_server_of_two_workers_gives_one_receipt(example, tmp_path):
    with example.server(tmp_path, example.NOISE, ("--tensor-parallel-size", "2")) as address:
        for forwards in (8, 16):
            answer(example, address)
            results = example.post(f"{address}/collective_rpc", {"method": "aqnpipe_receipt"})["results"]
            assert [worker["rank"] for worker in results] == [0, 1]
            assert [worker["problems"] for worker in results] == [[], []]
            assert results[0]["receipt"] == results[1]["receipt"]
            measured = Receipt.model_validate(results[0]["receipt"]).check()
            assert measured.phases[0].passes == forwards
            # The columns of both workers are in the receipt: queries and twice half as many keys and values, the output
            # of attention, gate, up and hidden state.
            elements = {cell.operator: cell.elements for cell in measured.cells if cell.layer == 0}
            assert elements["mm"] / elements["attention"] == (2 * 128 + 128 + 2 * 320 + 128) / 128


@needs_vllm
@pytest.mark.slow
def test_noise_that_cannot_be_stops_the_start(example, tmp_path):
    noise = "error: {kind: relative_gaussian, scale: 0.1}\nlayers: [99]\n"
    with (
        pytest.raises(RuntimeError, match=r"noise of layers \[99\]"),
        example.server(tmp_path, noise),
    ):
        pytest.fail("the server must not start")


def test_the_noise_of_the_file_is_that_of_a_pass(tmp_path):
    path = tmp_path / "noise.yaml"
    path.write_text("error: {kind: relative_gaussian, scale: 0.1}\nseed: 3\nlayers: [0, 2]\ninclude_lm_head: false\n")
    noise = load_yaml(path, ServedNoiseFile).as_pass(str(path))
    assert noise.noise_seed == 3
    assert noise.operator_noise is not None
    assert noise.operator_noise.error_in(2) == RelativeGaussian(scale=0.1)
    assert noise.operator_noise.error_in(1) is None
    assert noise.operator_noise.error_in(None) is None
    assert noise.operator_noise_in("evaluation") is not None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("error: {kind: relative_gaussian, scale: 2}", "error.scale: found 2, expected a number below 1"),
        ("scale: 0.1", "scale: unknown key"),
        ("error: {kind: relative, scale: 0.1}", "error.kind: found 'relative'"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(tmp_path, content, says):
    path = tmp_path / "noise.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_yaml(path, ServedNoiseFile)
    assert says in str(caught.value)
