"""Two tensor-parallel workers of vLLM on a CPU: the noise, the answers and the receipt of one.

`make test-vllm` runs these in a separate environment.
"""

import pytest
import torch
from tiny_tokenizer import build_tokenizer

from aqnpipe.config.model import builtin_folder
from aqnpipe.config.noise import (
    AbsoluteGaussian,
    Fault,
    MantissaTruncation,
    ModuleNoise,
    OperatorNoise,
    RelativeGaussian,
)
from aqnpipe.errors import ModelError, ReceiptError
from aqnpipe.generation.backend import Sampling
from aqnpipe.generation.noisy_passes import PassNoise, pass_receipt
from aqnpipe.generation.vllm.plugin import is_vllm_installed
from aqnpipe.machine.machine import NoiseKey

pytestmark = pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed here: make test-vllm")

KEY = NoiseKey(seed=3, step=0)
SAMPLING = Sampling(max_response_tokens=16, temperature=1.0, seed=5, log_probabilities=True)
TOKENIZER = build_tokenizer()
PROMPTS = [TOKENIZER(text)["input_ids"] for text in ("What is 1 plus 1 ?", "Tom has 5 apples . How many apples now ?")]
# Sums of float32 products over two workers, instead of one sum.
ROUNDING = 1e-4


def operators(error=None, **changes):
    settings = {"error": error or RelativeGaussian(scale=0.2), "phases": ("evaluation",), "attention": "fused"}
    return PassNoise(operator_noise=OperatorNoise(**(settings | changes)))


def modules(point):
    error = RelativeGaussian(scale=0.2)
    return PassNoise(module_noise=ModuleNoise(modules="all", point=point, error=error, phases=("evaluation",)))


def fault(**settings):
    return PassNoise(faults=(Fault(**({"layer": 3, "magnitude": 0.3, "sparsity": 0.5, "seed": 1} | settings)),))


REQUESTS = {
    "clean": PassNoise(),
    "products": operators(),
    "all operators": operators(operators="all"),
    "absolute": operators(AbsoluteGaussian(scale=0.05)),
    "truncation": operators(MantissaTruncation(mantissa_bits=3), layers=(1, 4), include_lm_head=False),
    "module inputs": modules("input"),
    "module outputs": modules("output"),
    # The maximum, the mean and the faulty channels are those of all columns.
    "fault on columns": fault(type="dead_zone", site="q_proj"),
    "random fault on columns": fault(type="noise", site="k_proj"),
    "fault on a sum": fault(type="saturation", site="o_proj"),
    "fault on a layer": fault(type="bias"),
    "all together": PassNoise(
        operator_noise=operators().operator_noise,
        module_noise=modules("input").module_noise,
        faults=fault(type="dead_zone", site="q_proj").faults,
    ),
}


@pytest.fixture(scope="module")
def start():
    from aqnpipe.generation.vllm.engine import VllmEngine

    def start(**changes):
        settings = {"dtype": "float32", "max_tokens": 64, "batch_size": 2, "device": "cpu"}
        return VllmEngine(builtin_folder("tiny"), end_token=TOKENIZER.eos_token_id, **(settings | changes))

    return start


@pytest.fixture(scope="module")
def one(start):
    with start() as engine:
        yield engine


@pytest.fixture(scope="module")
def two(start):
    with start(tensor_parallel=2, worker_extension="vllm_sabotages.SabotagedWorker") as engine:
        yield engine


@pytest.fixture
def sabotage(two):
    yield lambda name: two._llm.collective_rpc("sabotage", args=(name,))
    two._llm.collective_rpc("sabotage", args=(None,))


def run(engine, requested):
    engine.begin_pass(requested)
    completions = engine.generate(PROMPTS, SAMPLING, KEY)
    return completions, pass_receipt(requested, [engine.end_pass()]).check()


def counts(receipt):
    cells = {(cell.operator, cell.layer): (cell.calls, cell.elements) for cell in receipt.cells}
    faults = [(cell.calls, cell.elements, cell.num_faulty_channels) for cell in receipt.fault_cells]
    return cells, faults, [(record.passes, record.calls, len(record.modules)) for record in receipt.phases]


@pytest.mark.parametrize("name", REQUESTS)
def test_two_workers_answer_as_one_and_their_receipts_are_one(one, two, name):
    assert len(set(two.worker_processes)) == two.description["workers"] == 2
    (first, of_one), (second, of_two) = (run(engine, REQUESTS[name]) for engine in (one, two))
    assert [each.token_ids for each in first] == [each.token_ids for each in second]
    for ours, theirs in zip(first, second, strict=True):
        assert ours.log_probabilities == pytest.approx(theirs.log_probabilities, abs=ROUNDING)
    assert counts(of_one) == counts(of_two)
    if name != "clean":
        clean = run(one, REQUESTS["clean"])[0]
        assert [each.log_probabilities for each in clean] != [each.log_probabilities for each in first]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no noise", "worker 1 of 2 measured 0 forward passes"),
        ("another key", "worker 1 of 2: evaluation: keys is seed"),
        ("columns of another worker", r"linear\.up_proj: noise on columns 0 to \d+ of \d+, expected all of them once"),
    ],
)
def test_a_worker_with_other_noise_is_refused(two, sabotage, name, says):
    sabotage(name)
    with pytest.raises(ReceiptError, match=says) as refused:
        run(two, operators())
    assert "\n" not in str(refused.value)


def test_a_rollout_on_two_workers_is_refused_in_one_line(two):
    with pytest.raises(ModelError, match="rollouts on tensor-parallel engines are not supported"):
        two.begin_pass(PassNoise(phase="rollout", clean_norms="0" * 64))
    with pytest.raises(ModelError, match="rollouts on tensor-parallel engines are not supported"):
        two.load_weights([("model.norm.weight", torch.ones(1))])
