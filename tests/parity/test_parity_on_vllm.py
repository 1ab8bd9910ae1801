"""vLLM against transformers, operator by operator; `make test-vllm` runs these in a separate environment."""

import pytest

from aqnpipe.artifacts.parities import CaptureConfig
from aqnpipe.config.model import builtin_folder
from aqnpipe.errors import ConfigError, ModelError
from aqnpipe.generation.vllm.plugin import is_vllm_installed
from aqnpipe.parity.capture_file import seal
from aqnpipe.parity.compare import parity_of
from aqnpipe.parity.forms import SCORES_ROUNDED
from aqnpipe.parity.vllm.capture import capture_vllm

pytestmark = pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed here: make test-vllm")

TINY = builtin_folder("tiny")
# The second and the third have the same token at the same position, which is decoded.
SEQUENCES = [list(range(3, 15)), [*range(40, 46), 64, 46], [*range(60, 66), 64, 47]]


def on_vllm(dtype, replay=None, **settings):
    config = CaptureConfig(**{"dtype": dtype, "num_decoded": 3, "max_rows": 64} | settings)
    return seal(capture_vllm(TINY, "tiny", SEQUENCES, config, "cpu", replay))[0]


@pytest.fixture(scope="module")
def one_worker():
    """A capture of vLLM in float32, whose last three tokens are decoded."""
    return on_vllm("float32")


@pytest.fixture(scope="module")
def two_workers(one_worker):
    """A capture of two tensor-parallel workers, fed the values of one."""
    return on_vllm("float32", one_worker, tensor_parallel=2)


def kinds_of(parity, verdict):
    return {row.kind for row in parity.operators if row.verdict == verdict}


def test_bfloat16_differs_by_named_algorithms_and_has_no_fault(captured):
    first = captured(sequences=SEQUENCES, num_decoded=0, dtype="bfloat16")
    parity = parity_of(first, on_vllm("bfloat16", first, num_decoded=0))
    assert parity.verdict == "different algorithm"
    assert not kinds_of(parity, "fault")
    assert list(parity.second.stale_parameters) == []
    norm = next(row for row in parity.operators if row.name == "norm")
    assert norm.second_algorithm == "cast before the weight, of the sum before its rounding"
    assert {"attention", "rotary_q", "rotary_k"} <= kinds_of(parity, "different algorithm")
    assert {"q_proj", "gate_proj", "down_proj"} <= kinds_of(parity, "rounding") | kinds_of(parity, "equal")


def test_decoded_tokens_are_the_given_ones_and_differ_from_transformers_by_rounding(captured, one_worker):
    assert one_worker.sequences == SEQUENCES
    decoded = one_worker.tokens.filter("is_decoded")
    assert decoded.height == 3 * len(SEQUENCES)
    # vLLM alone would have chosen other ones.
    assert (decoded["predicted"] != decoded["token_id"]).any()
    parity = parity_of(captured(sequences=SEQUENCES, num_decoded=3), one_worker)
    assert parity.verdict == "rounding"
    assert parity.num_rows == sum(map(len, SEQUENCES))
    assert 0 < parity.log_probabilities.decode_rms < 1e-5
    assert "num_decoded" not in " ".join(parity.settings)


def test_decoded_tokens_in_bfloat16_differ_from_transformers_by_named_algorithms_too(captured):
    first = captured(sequences=SEQUENCES, num_decoded=3, dtype="bfloat16")
    second = on_vllm("bfloat16", first)
    assert second.tokens.filter("is_decoded").height == 3 * len(SEQUENCES)
    parity = parity_of(first, second)
    assert parity.same_inputs
    assert parity.num_rows == sum(map(len, SEQUENCES))
    assert "num_decoded" not in " ".join(parity.settings)
    assert not kinds_of(parity, "fault")
    assert all(row.bound_share < 1 for row in parity.operators)
    # Attention reads the keys and values that earlier passes left in vLLM's cache.
    attention = next(row for row in parity.operators if row.name == "layers.0.attention")
    assert (attention.verdict, attention.first_algorithm) == ("different algorithm", SCORES_ROUNDED)
    assert {"q_proj", "gate_proj", "down_proj"} <= kinds_of(parity, "rounding") | kinds_of(parity, "equal")
    # 0.02 nats on one processor; scores of wrong tokens differ by more than one.
    assert 0 < parity.log_probabilities.decode_rms < 0.2


def test_two_tensor_parallel_workers_are_one_to_rounding(one_worker, two_workers):
    parity = parity_of(one_worker, two_workers)
    assert parity.verdict in ("rounding", "equal")
    assert two_workers.identity.tensor_parallel == 2
    assert "2 tensor-parallel workers" in two_workers.identity.setting
    assert "tensor_parallel: 1 / 2" in parity.settings
    assert two_workers.identity.num_compared_parameters == one_worker.identity.num_compared_parameters
    assert list(two_workers.identity.stale_parameters) == []
    assert two_workers.operators["name"].equals(one_worker.operators["name"])
    assert two_workers.operators["width"].equals(one_worker.operators["width"])
    assert "embed_tokens" in kinds_of(parity, "equal")
    assert 0 < parity.log_probabilities.rms < 1e-5
    assert 0 < parity.log_probabilities.decode_rms < 1e-5


def test_a_number_of_workers_that_does_not_divide_the_heads_is_refused_in_one_line():
    with pytest.raises(ModelError, match="4 attention heads do not divide by 3") as refused:
        on_vllm("float32", tensor_parallel=3)
    assert "\n" not in str(refused.value)


def test_a_batch_that_vllm_would_split_is_refused_before_the_engine_starts():
    config = CaptureConfig(batch_size=8, num_decoded=2)
    with pytest.raises(ConfigError, match="which vLLM would split over forward passes"):
        capture_vllm(TINY, "tiny", [[1] * 300] * 8, config, "cpu")
