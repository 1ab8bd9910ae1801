"""The scans on the trained models of the package, whose activations differ from those of random models."""

import pytest

from aqnpipe.config.dataset import GeneratedDataset, PromptFormat
from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.config.model import BUILTIN_MODELS, builtin_folder
from aqnpipe.config.noise import Fault
from aqnpipe.data.loader import load_problems
from aqnpipe.data.prompts import format_prompt
from aqnpipe.diagnosis.scans import run_scans
from aqnpipe.diagnosis.verdict import judge
from aqnpipe.models.loading import load_model, load_tokenizer
from aqnpipe.noise.injection.faults import simulated_faults

NUM_PROMPTS = 4


@pytest.fixture(scope="module", params=BUILTIN_MODELS)
def model_and_prompts(request):
    folder = builtin_folder(request.param)
    if not (folder / "config.json").is_file():
        pytest.skip(f"no weights of {request.param} in this checkout")
    tokenizer = load_tokenizer(folder)
    questions = load_problems(GeneratedDataset(num_train=NUM_PROMPTS), "train")["question"]
    texts = [format_prompt(question, PromptFormat(), tokenizer) for question in questions]
    prompt_ids = [tokenizer(text, return_tensors="pt")["input_ids"][0] for text in texts]
    return load_model(folder, dtype="float32", attention="eager"), prompt_ids


def verdict_on(model_and_prompts, fault=None):
    model, prompt_ids = model_and_prompts
    config = DiagnosisConfig(num_prompts=NUM_PROMPTS)
    with simulated_faults(model, [fault] if fault else []):
        return judge(None, run_scans(model, prompt_ids, config), config)


def test_healthy(model_and_prompts):
    assert verdict_on(model_and_prompts).verdict == "healthy"


@pytest.mark.parametrize(("kind", "magnitude"), [("dead_zone", 0.05), ("saturation", 0.3), ("noise", 0.05)])
def test_dense_faults_are_found_in_the_first_and_last_layer(model_and_prompts, kind, magnitude):
    last = model_and_prompts[0].config.num_hidden_layers - 1
    for layer in (0, last) if kind == "dead_zone" else (last,):
        verdict = verdict_on(model_and_prompts, Fault(type=kind, layer=layer, magnitude=magnitude))
        assert (verdict.verdict, verdict.layer, verdict.type) == ("fault", layer, kind)
