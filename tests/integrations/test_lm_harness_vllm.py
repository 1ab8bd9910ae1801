"""The model for lm-evaluation-harness on vLLM, on two multiple-choice and two generative tasks without the hub.

`make test-vllm` runs these in a separate environment.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from harness_tasks import TASKS

from aqnpipe.errors import AqnpipeError, ReceiptError
from aqnpipe.generation.vllm.plugin import is_vllm_installed
from aqnpipe.noise.receipts.receipt import Receipt

pytest.importorskip("lm_eval")
pytestmark = [
    pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed here: make test-vllm"),
    pytest.mark.usefixtures("offline"),
]

AQNPIPE = Path(sys.executable).with_name("aqnpipe")
CHOICES = ("choose_number", "choose_name")


@pytest.fixture(scope="module")
def lm():
    """The tiny model on vLLM."""
    from aqnpipe.integrations.lm_harness_vllm import NoisyVllm

    model = NoisyVllm("tiny", batch_size=16, device="cpu", max_length=256)
    yield model
    model.close()


def evaluated(folder, model, names=tuple(TASKS), **model_args):
    """Results of the harness."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    return simple_evaluate(
        model=model,
        model_args={"pretrained": "tiny", "device": "cpu", **model_args} if isinstance(model, str) else None,
        tasks=list(names),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        batch_size=4,
        bootstrap_iters=0,
        log_samples=True,
    )


def under(lm, scale, seed=3):
    """The model at the start of a pass under noise."""
    from aqnpipe.integrations.lm_harness import noise_of

    lm.begin_pass(noise_of(scale, seed, "matmul", True, "fused"))
    return lm


def answers(results):
    """Responses of every question, by task."""
    return {
        task: [sample["resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
        for task, samples in results["samples"].items()
    }


def log_likelihoods(responses):
    """(Log-likelihood, is the greedy one) of every choice of every question."""
    return [(float(value), bool(greedy)) for question in responses for ((value, greedy),) in question]


def test_without_noise_it_answers_as_the_harness_does_with_transformers(tasks, lm):
    import aqnpipe.integrations.lm_harness  # noqa: F401

    ours, plain = evaluated(tasks, under(lm, 0)), evaluated(tasks, "aqnpipe", attn_implementation="sdpa")
    assert ours["results"] == plain["results"]
    assert ours["results"]["write_solution"]["exact_match,strict"] > 0.2
    found, expected = answers(ours), answers(plain)
    for task in CHOICES:
        pairs = zip(log_likelihoods(found[task]), log_likelihoods(expected[task]), strict=True)
        assert all(abs(a - b) < 1e-3 and is_greedy == was for (a, is_greedy), (b, was) in pairs)
    for task in ("write_solution", "write_number"):
        assert found[task] == expected[task]
    receipt = Receipt.model_validate(ours["config"]["aqnpipe_receipt"]).check()
    assert receipt.operator_noise is None
    assert ours["config"]["aqnpipe_engine"]["backend"] == "vllm"


def test_noise_reaches_every_kind_of_task_and_the_results_have_its_receipt(tasks, lm):
    noisy = evaluated(tasks, under(lm, 0.05))
    receipt = Receipt.model_validate(noisy["config"]["aqnpipe_receipt"]).check()
    assert receipt.operator_noise is not None
    assert receipt.operator_noise.error.scale == 0.05
    scale, numbers = receipt.measured_scale("evaluation")
    assert abs(scale / 0.05 - 1) < 5 / (2 * numbers) ** 0.5
    assert {cell.layer for cell in receipt.cells} == {*range(6), None}
    found = answers(noisy)
    assert answers(evaluated(tasks, under(lm, 0.05))) == found
    clean, other = answers(evaluated(tasks, under(lm, 0), CHOICES)), answers(evaluated(tasks, under(lm, 0.05, 4)))
    for task in CHOICES:
        assert len({str(each[task]) for each in (clean, found, other)}) == 3
    large = answers(evaluated(tasks, under(lm, 0.5), ["write_solution", "write_number"]))
    assert all(large[task] != found[task] for task in large)


def test_every_choice_of_a_batch_has_its_own_noise_on_the_output_projection(lm):
    """vLLM computes the logits of prompts request by request; the same prompt twice must not have the same noise."""
    from lm_eval.api.instance import Instance

    arguments = ("What is 1 plus 1 ?", " 2")
    requests = [Instance("loglikelihood", {}, arguments, number) for number in range(4)]
    noise = under(lm, 0.2).noise
    only_head = noise.operator_noise.model_copy(update={"layers": ()})
    lm.begin_pass(noise.model_copy(update={"operator_noise": only_head}))
    values = [value for value, _ in lm.loglikelihood(requests, disable_tqdm=True)]
    assert len(set(values)) == 4
    receipt = lm.end_pass().check()
    assert {cell.layer for cell in receipt.cells} == {None}


def test_prompts_that_are_read_in_several_forwards(lm):
    """More than 2,048 tokens: vLLM reads some prompts in two parts."""
    from lm_eval.api.instance import Instance

    from aqnpipe.integrations.lm_harness import NoisyLM

    question = "Tom has 5 apples . He buys 7 more . How many apples now ? "
    requests = [Instance("loglikelihood", {}, (question * 12, f"{number} 5+7=12"), number) for number in range(16)]
    read = lm.tok_encode([request.args[0] for request in requests])
    assert sum(map(len, read)) > 2048
    found = under(lm, 0).loglikelihood(requests, disable_tqdm=True)
    expected = NoisyLM("tiny", batch_size=16, device="cpu").loglikelihood(requests, disable_tqdm=True)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-3)
    lm.end_pass().check()
    under(lm, 0.05).loglikelihood(requests, disable_tqdm=True)
    (phase,) = lm.end_pass().check().phases
    assert phase.passes > 1


def test_sampled_responses_are_drawn_again_with_the_same_seed(lm):
    from lm_eval.api.instance import Instance

    settings = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": True, "temperature": 1.5}
    requests = [Instance("generate_until", {}, ("Tom has 5 apples . ", settings), number) for number in range(4)]
    texts = [under(lm, 0.05).generate_until(requests, disable_tqdm=True) for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1
    lm.end_pass().check()


def test_a_refused_receipt_is_a_failed_run(tasks, lm, monkeypatch):
    rpc = lm._engine._llm.collective_rpc
    without_noise = lambda method, **rest: [{}] if method == "aqnpipe_begin_batch" else rpc(method, **rest)  # noqa: E731
    monkeypatch.setattr(lm._engine._llm, "collective_rpc", without_noise)
    with pytest.raises(ReceiptError, match="receipt invalid"):
        evaluated(tasks, under(lm, 0.05), ["choose_number"])


def test_logits_that_the_output_projection_did_not_compute_are_refused(lm):
    from lm_eval.api.instance import Instance

    request = Instance("loglikelihood", {}, ("What is 1 plus 1 ?", " 2"), 0)
    under(lm, 0.05).loglikelihood([request], disable_tqdm=True)
    lm._num_logits += 1
    with pytest.raises(ReceiptError, match=r"logits at (\d+) tokens, the output projection had noise at \d+"):
        lm.end_pass()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"noise": 1.5}, "operator_noise.error.scale"),
        ({"noise": "much"}, "operator_noise.error.scale"),
        ({"noise": 0.1, "noise_operators": "some"}, "operators"),
        ({"noise_seed": "a"}, "noise_seed"),
        ({"batch_size": "auto"}, "--batch_size auto"),
        ({"batch_size": 0}, "--batch_size 0"),
        ({"device": "tpu"}, "--device tpu: expected auto, cpu, cuda, npu"),
        ({"device": "cuda:1"}, "the engine computes on the first visible device (CUDA_VISIBLE_DEVICES"),
        ({"trust_remote_code": True}, "never executed"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"tensor_parallel_size": 3}, "tensor parallelism over 3 workers: 4 attention heads"),
        ({"data_parallel_size": 2}, "one process on one device"),
        ({"lora_local_path": "x/y"}, "merge the adapter"),
        ({"max_length": "long"}, "--model_args: max_length: found 'long'"),
        ({"max_lenght": 256}, "max_lenght: unknown key (did you mean max_length?)"),
        ({"dtype": "int8"}, "--model_args: dtype"),
        ({"pretrained": "huge"}, "'huge' is unknown"),
        ({"pretrained": "./gone"}, "found no such folder"),
    ],
)
def test_a_wrong_setting_is_one_line_before_anything_starts(wrong, says):
    from aqnpipe.integrations.lm_harness_vllm import NoisyVllm

    with pytest.raises(AqnpipeError) as caught:
        NoisyVllm(**{"pretrained": "tiny", "device": "cpu", **wrong})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_stored_answers_of_other_noise_are_not_taken(lm, tmp_path):
    from lm_eval.api.model import CachingLM

    from aqnpipe.errors import ConfigError

    with pytest.raises(ConfigError, match="--use_cache"):
        CachingLM(lm, str(tmp_path / "cache.db"))


@pytest.mark.slow
def test_the_command_line_of_the_harness(tasks, tmp_path):
    arguments = "pretrained=tiny,noise=0.05,noise_seed=1,max_length=256"
    model = ("--model", "aqnpipe-vllm", "--model_args", arguments, "--device", "cpu", "--batch_size", "4")
    where = ("--include_path", tasks, "--output_path", tmp_path / "out")
    done = subprocess.run(
        [AQNPIPE, "lm-eval", *model, "--tasks", "choose_number,write_solution", *where],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (results,) = (tmp_path / "out").rglob("results_*.json")
    content = json.loads(results.read_text())
    assert set(content["results"]) == {"choose_number", "write_solution"}
    Receipt.model_validate(content["config"]["aqnpipe_receipt"]).check()
