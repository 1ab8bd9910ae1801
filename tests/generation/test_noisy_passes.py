"""Passes of transformers over prompts with a common prefix: without noise it is read once, under noise by every row."""

import pytest

from aqnpipe.config.model import builtin_folder
from aqnpipe.config.noise import AdaptiveNoise, CacheNoise, Fault, ModuleNoise, OperatorNoise, RelativeGaussian
from aqnpipe.generation.backend import Sampling
from aqnpipe.generation.noisy_passes import PassNoise, TransformersPasses, pass_receipt
from aqnpipe.generation.transformers_backend import TransformersBackend
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.models.loading import load_model, load_tokenizer

SAMPLING = Sampling(max_response_tokens=12)
NOISE = {"error": RelativeGaussian(scale=0.05), "phases": ("evaluation",)}
CHANGED = [
    PassNoise(operator_noise=OperatorNoise(**NOISE)),
    PassNoise(module_noise=ModuleNoise(modules="linear", point="output", **NOISE)),
    PassNoise(faults=(Fault(type="dead_zone", layer=2, magnitude=0.1),)),
    PassNoise(kv_cache=CacheNoise(format="fp8", phases=("evaluation",))),
]
IDLE = [
    PassNoise(),
    PassNoise(operator_noise=OperatorNoise(error=RelativeGaussian(scale=0.0), phases=("evaluation",))),
    PassNoise(operator_noise=OperatorNoise(error=RelativeGaussian(scale=0.05), phases=("rollout",))),
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(builtin_folder("tiny"))


@pytest.fixture(scope="module")
def model():
    return load_model(builtin_folder("tiny"), dtype="float32", attention="eager")


@pytest.fixture(scope="module")
def prompts(tokenizer):
    beginning = (
        "Question: Ann has 3 pens . She buys 4 more . How many pens now ?\nAnswer: 3 + 4 = 7 . #### 7\n\nQuestion: "
    )
    return tokenizer([f"{beginning}Tom has {n} apples . How many apples now ?\nAnswer:" for n in range(5)])["input_ids"]


def prompt_tokens_read(model, tokenizer, prompts, noise):
    """The completions of a pass, its receipt, and the number of prompt tokens that its forwards read."""
    read, passes = [], TransformersPasses(model, tokenizer)
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"]) if kwargs["position_ids"] is None else None,
        with_kwargs=True,
    )
    passes.begin_pass(noise)
    completions = passes.generate(prompts, SAMPLING, NoiseKey(seed=0, step=0))
    handle.remove()
    receipt = pass_receipt(noise, [passes.end_pass()])
    return completions, receipt, sum(int((ids != tokenizer.pad_token_id).sum()) for ids in read)


@pytest.mark.parametrize("noise", IDLE, ids=["no noise", "scale 0", "another phase"])
def test_without_noise_the_common_prefix_is_read_once(model, tokenizer, prompts, noise):
    common = next(n for n, tokens in enumerate(zip(*prompts, strict=False)) if len(set(tokens)) > 1)
    completions, _, read = prompt_tokens_read(model, tokenizer, prompts, noise)
    assert completions == TransformersBackend(model, tokenizer).generate(prompts, SAMPLING)
    assert common > 30
    assert read == common + sum(len(prompt) - common for prompt in prompts)


def test_a_rollout_with_aqn_is_not_clean():
    rest = {"phase": "rollout", "clean_norms": "0" * 64, "fault_states": ()}
    assert PassNoise(**rest).is_clean
    assert not PassNoise(aqn=AdaptiveNoise(schedule={"kind": "constant", "sigma": 0.05}), **rest).is_clean


@pytest.mark.parametrize("noise", CHANGED, ids=["operators", "modules", "fault", "cache"])
def test_under_noise_and_faults_every_prompt_is_read_whole(model, tokenizer, prompts, noise):
    completions, receipt, read = prompt_tokens_read(model, tokenizer, prompts, noise)
    receipt.check()
    assert read == sum(map(len, prompts))
    assert completions != TransformersBackend(model, tokenizer).generate(prompts, SAMPLING)
