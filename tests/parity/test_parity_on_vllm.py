"""vLLM against transformers, operator by operator; `make test-vllm` runs these in a separate environment."""

import pytest

from aqnpipe.artifacts.captures import CaptureConfig
from aqnpipe.config.model import builtin_folder
from aqnpipe.errors import ConfigError
from aqnpipe.generation.vllm.plugin import is_vllm_installed
from aqnpipe.parity.capture_file import seal
from aqnpipe.parity.parity import parity_of
from aqnpipe.parity.vllm.capture import capture_vllm

pytestmark = pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed here: make test-vllm")

TINY = builtin_folder("tiny")
SEQUENCES = [list(range(3, 15)), list(range(40, 47)), list(range(60, 65))]


def on_vllm(dtype, replay):
    config = CaptureConfig(dtype=dtype, num_decoded=0, max_rows=64)
    return seal(capture_vllm(TINY, "tiny", SEQUENCES, config, "cpu", replay))[0]


def kinds_of(parity, verdict):
    return {row.kind for row in parity.operators if row.verdict == verdict}


def test_bfloat16_differs_by_named_algorithms_and_has_no_fault(captured):
    first = captured(sequences=SEQUENCES, num_decoded=0, dtype="bfloat16")
    parity = parity_of(first, on_vllm("bfloat16", first))
    assert parity.verdict == "different algorithm"
    assert not kinds_of(parity, "fault")
    assert list(parity.second.stale_parameters) == []
    norm = next(row for row in parity.operators if row.name == "norm")
    assert norm.second_algorithm == "cast before the weight, of the sum before its rounding"
    assert {"attention", "rotary_q", "rotary_k"} <= kinds_of(parity, "different algorithm")
    assert {"q_proj", "gate_proj", "down_proj"} <= kinds_of(parity, "rounding") | kinds_of(parity, "equal")


def test_decoding_is_refused_before_the_engine_starts():
    with pytest.raises(ConfigError, match="--decode 2: vLLM chooses the tokens"):
        capture_vllm(TINY, "tiny", SEQUENCES, CaptureConfig(num_decoded=2), "cpu")
