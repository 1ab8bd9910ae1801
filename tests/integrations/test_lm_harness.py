"""The model for lm-evaluation-harness, on two multiple-choice and two generative tasks without the hub."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from harness_tasks import TASKS

from aqnpipe.errors import ConfigError, ModelError, ReceiptError
from aqnpipe.generation.vllm.plugin import is_vllm_installed
from aqnpipe.noise.receipts.receipt import Receipt

pytest.importorskip("lm_eval")
AQNPIPE = Path(sys.executable).with_name("aqnpipe")
pytestmark = pytest.mark.usefixtures("offline")


def evaluated(folder, tasks=tuple(TASKS), model="aqnpipe", **model_args):
    """Results of the harness on the tiny model."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    import aqnpipe.integrations.lm_harness  # noqa: F401

    return simple_evaluate(
        model=model,
        model_args={"pretrained": "tiny", "device": "cpu", **model_args},
        tasks=list(tasks),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        batch_size=model_args.pop("batch_size", 4),
        bootstrap_iters=0,
        log_samples=True,
    )


def answers(results):
    """Responses of every question of every task."""
    return {
        task: [sample["resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
        for task, samples in results["samples"].items()
    }


@pytest.mark.slow
def test_noise_reaches_every_kind_of_task_and_the_results_have_its_receipt(tasks):
    noisy = evaluated(tasks, noise=0.05, noise_seed=3)
    receipt = Receipt.model_validate(noisy["config"]["aqnpipe_receipt"])
    receipt.check()
    assert receipt.operator_noise is not None
    assert receipt.operator_noise.error.scale == 0.05
    assert sum(phase.recomputed for phase in receipt.phases) > 0
    again, other = evaluated(tasks, noise=0.05, noise_seed=3), evaluated(tasks, noise=0.05, noise_seed=4)
    assert answers(again) == answers(noisy)
    for task in ("choose_number", "choose_name"):
        assert answers(other)[task] != answers(noisy)[task]
    # Large noise changes what is written, too.
    large = evaluated(tasks, ["write_solution", "write_number"], noise=0.5)
    assert all(answers(large)[task] != answers(noisy)[task] for task in ("write_solution", "write_number"))


@pytest.mark.slow
def test_without_noise_it_answers_as_the_harness_does(tasks):
    from aqnpipe.config.model import builtin_folder

    clean, plain = evaluated(tasks), evaluated(tasks, model="hf", pretrained=str(builtin_folder("tiny")))
    assert answers(clean) == answers(plain)
    assert clean["results"] == plain["results"]
    assert clean["results"]["write_solution"]["exact_match,strict"] > 0.2
    assert not clean["config"]["aqnpipe_receipt"]["operator_noise"]


@pytest.mark.slow
def test_noise_of_the_requested_size_moves_log_likelihoods(tasks):
    def values(noise):
        (responses,) = answers(evaluated(tasks, ["choose_number"], noise=noise)).values()
        return [float(choice[0][0]) for question in responses for choice in question]

    clean = values(0)
    small, large = (math.dist(values(noise), clean) for noise in (0.001, 0.05))
    assert 0 < small < large / 5


def test_a_refused_receipt_is_a_failed_run(tasks, monkeypatch):
    from aqnpipe.integrations import lm_harness

    monkeypatch.setattr(lm_harness.NoisyLM, "_model_call", lm_harness.HFLM._model_call)
    with pytest.raises(ReceiptError, match="receipt invalid"):
        evaluated(tasks, ["choose_number"], noise=0.05)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"noise": 1.5}, "operator_noise.error.scale"),
        ({"noise": -0.1}, "operator_noise.error.scale"),
        ({"noise": "much"}, "operator_noise.error.scale"),
        ({"noise": 0.1, "noise_operators": "some"}, "operators"),
        ({"noise_seed": "a"}, "noise_seed"),
        ({"batch_size": "auto"}, "batch_size auto"),
        ({"trust_remote_code": True}, "never executed"),
        ({"peft": "x/y"}, "merge the adapter"),
        ({"backend": "seq2seq"}, "expected causal"),
        ({"pretrained": "huge"}, "'huge' is unknown"),
    ],
)
def test_a_wrong_setting_is_one_line(wrong, says):
    from aqnpipe.errors import AqnpipeError
    from aqnpipe.integrations.lm_harness import NoisyLM

    with pytest.raises(AqnpipeError) as caught:
        NoisyLM(**{"pretrained": "tiny", "device": "cpu", **wrong})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(is_vllm_installed(), reason="vLLM is installed here")
def test_the_model_on_vllm_without_vllm_is_one_line():
    from lm_eval.api.registry import get_model

    import aqnpipe.integrations.lm_harness  # noqa: F401

    with pytest.raises(ModelError, match=r"--model aqnpipe-vllm: vLLM is not installed here: pip install .*"):
        get_model("aqnpipe-vllm")


def test_a_quantised_model_is_refused(monkeypatch):
    """By its own config or by an option such as load_in_4bit: transformers keeps the settings in the config."""
    from aqnpipe.integrations.lm_harness import HFLM, NoisyLM

    create = HFLM._create_model

    def quantised(model, *args, **kwargs):
        create(model, *args, **kwargs)
        model.model.config.quantization_config = {"load_in_4bit": True}

    monkeypatch.setattr(HFLM, "_create_model", quantised)
    with pytest.raises(ConfigError, match="found a quantised model"):
        NoisyLM("tiny", device="cpu")


def test_stored_answers_of_other_noise_are_not_taken(tmp_path):
    from lm_eval.api.model import CachingLM

    from aqnpipe.integrations.lm_harness import NoisyLM

    with pytest.raises(ConfigError, match="--use_cache"):
        CachingLM(NoisyLM("tiny", noise=0.05, device="cpu"), str(tmp_path / "cache.db"))


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["0.05", "2"])
def test_the_command_line_of_the_harness(tasks, tmp_path, noise):
    model = ("--model", "aqnpipe", "--model_args", f"pretrained=tiny,noise={noise},noise_seed=1", "--device", "cpu")
    where = ("--include_path", tasks, "--output_path", tmp_path / "out")
    done = subprocess.run(
        [AQNPIPE, "lm-eval", *model, "--tasks", "choose_number,write_solution", *where, "--batch_size", "4"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    written = list((tmp_path / "out").rglob("results_*.json"))
    if noise == "2":
        assert (done.returncode, written) == (2, [])
        assert done.stderr.splitlines()[-1].startswith("ERROR: --model_args: operator_noise.error.scale: found 2")
        return
    assert done.returncode == 0, done.stderr
    (results,) = written
    content = json.loads(results.read_text())
    assert set(content["results"]) == {"choose_number", "write_solution"}
    Receipt.model_validate(content["config"]["aqnpipe_receipt"]).check()
