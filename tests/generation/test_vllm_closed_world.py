"""The audit on vLLM: operations of noised layers are noised or known, and sampled numbers are the requested ones."""

import pytest
import torch
from tiny_tokenizer import build_tokenizer
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, MixtralConfig, OPTConfig, Qwen2MoeConfig

from aqnpipe.config.model import builtin_folder
from aqnpipe.config.noise import Fault, OperatorNoise, RelativeGaussian, SystematicBias
from aqnpipe.errors import ModelError, ReceiptError
from aqnpipe.generation.backend import Sampling
from aqnpipe.generation.noisy_passes import PassNoise, TransformersPasses, pass_receipt
from aqnpipe.generation.vllm.plugin import is_vllm_installed
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.models.loading import load_model

pytestmark = pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed here: make test-vllm")

KEY = NoiseKey(seed=3, step=0)
SAMPLING = Sampling(max_response_tokens=8)
TOKENIZER = build_tokenizer()
PROMPTS = [TOKENIZER(text)["input_ids"] for text in ("What is 1 plus 1 ?", "Tom has 5 apples . How many apples now ?")]
SABOTAGES = {
    "product as a sum": r"aten\.mul on a weight matrix in model\.layers\.1 had no",
    "an operator of its own": r"aqnpipe_test\.fused_mlp in model\.layers\.1 had no",
    "clean attention": r"vllm\.unified_attention_with_output in model\.layers\.1 had no",
}

ELSEWHERE = ("clean product", "extra product", "clean logits", "clean later")

SIZES = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": TOKENIZER.pad_token_id,
    "bos_token_id": None,
    "eos_token_id": TOKENIZER.eos_token_id,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "opt": OPTConfig(**SIZES, ffn_dim=192, word_embed_proj_dim=128),
    "gpt_neox": GPTNeoXConfig(**SIZES),
    "qwen2_moe": Qwen2MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}


def save_random_model(architecture, folder):
    """Save a model of two layers of 128 channels; vLLM's attention on a CPU supports heads of 32 channels."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(CONFIGS[architecture]).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)


def noise(error=None, **changes):
    settings = {"error": error or RelativeGaussian(scale=0.1), "phases": ("evaluation",), "attention": "fused"}
    return PassNoise(operator_noise=OperatorNoise(**(settings | changes)))


def run(generator, requested):
    generator.begin_pass(requested)
    completions = generator.generate(PROMPTS, SAMPLING, KEY)
    return [completion.token_ids for completion in completions], generator.end_pass()


@pytest.fixture(scope="module")
def start():
    from aqnpipe.generation.vllm.engine import VllmEngine

    def start(folder, **changes):
        settings = {"dtype": "float32", "max_tokens": 64, "batch_size": 2, "device": "cpu"}
        return VllmEngine(folder, end_token=TOKENIZER.eos_token_id, **(settings | changes))

    return start


@pytest.fixture(scope="module")
def engine(start):
    extension = "vllm_sabotages.SabotagedExtension"
    with start(builtin_folder("tiny"), worker_extension=extension, dtype="bfloat16") as engine:
        yield engine


@pytest.fixture
def sabotage(engine):
    yield lambda name: engine._llm.collective_rpc("sabotage", args=(name,))
    engine._llm.collective_rpc("repair")


@pytest.mark.parametrize("operators", ["matmul", "all"])
def test_an_honest_pass_is_audited_in_both_kinds_of_forwards(engine, operators):
    requested = noise(operators=operators)
    fault = Fault(type="dead_zone", layer=1, magnitude=0.3, site="q_proj")
    for asked in (requested, requested.model_copy(update={"faults": (fault,)})):
        measurements = run(engine, asked)[1]
        pass_receipt(asked, [measurements]).check()
        (record,) = measurements.state.phases
        assert not any(row.escaped for row in measurements.state.rows)
        # The first forward of each kind as a whole, and single layers of some later ones.
        assert record.audited_passes["several tokens"] == 1 <= record.audited_passes["one token"]
        assert record.audited_passes["single layers"] > 0
        # At least 64 of each of 5 outputs of a layer (qkv_proj and gate_up_proj are one each), in two whole forwards.
        assert record.recomputed > 2 * 6 * 5 * 64
        assert record.largest_deviation <= 1
        assert record.contradictions == {}


@pytest.mark.parametrize("name", SABOTAGES)
def test_a_product_beside_the_noise_is_refused_by_name(engine, sabotage, name):
    sabotage(name)
    requested = noise()
    with pytest.raises(ReceiptError, match=SABOTAGES[name]) as refused:
        pass_receipt(requested, [run(engine, requested)[1]]).check()
    assert "\n" not in str(refused.value)


def test_places_without_noise_may_compute_what_they_like(engine, sabotage):
    sabotage("product as a sum")
    requested = noise(layers=(0, 2), include_lm_head=False)
    pass_receipt(requested, [run(engine, requested)[1]]).check()


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_product_has_its_noise_wherever_it_is_computed(engine, sabotage, name):
    """Beside the module, by another function, or later: the kernels of torch have the noise."""
    sabotage(name)
    pass_receipt(noise(), [run(engine, noise())[1]]).check()


def test_a_pass_without_an_audit_is_refused(engine, monkeypatch):
    rpc = engine._llm.collective_rpc

    def without_audit(method, **rest):
        replies = rpc(method, **rest)
        if method == "aqnpipe_end_pass":
            replies[0]["state"] = replies[0]["state"].replace('"one token"', '"another"')
        return replies

    monkeypatch.setattr(engine._llm, "collective_rpc", without_audit)
    with pytest.raises(ReceiptError, match=r"audited no layer in evaluation \(forward passes over one token\)"):
        run(engine, noise())


@pytest.mark.parametrize("architecture", ["llama", "opt"])
def test_noise_in_other_architectures_as_in_transformers(start, tmp_path, architecture):
    """A bias is deterministic, so responses can be compared."""
    save_random_model(architecture, tmp_path)
    requested = noise(SystematicBias(scale=0.05))
    reference = TransformersPasses(load_model(tmp_path, dtype="float32", attention="sdpa"), TOKENIZER)
    responses = []
    with start(tmp_path) as engine:
        for generator in (engine, reference):
            tokens, measurements = run(generator, requested)
            pass_receipt(requested, [measurements]).check()
            responses.append(tokens)
        assert responses[0] == responses[1] != run(engine, PassNoise())[0]


@pytest.mark.parametrize("architecture", ["qwen2_moe", "mixtral"])
def test_fused_experts_are_refused_in_one_line(start, tmp_path, architecture):
    save_random_model(architecture, tmp_path)
    with start(tmp_path) as engine:
        for requested in (noise(), noise(layers=(0,), include_lm_head=False)):
            with pytest.raises(
                ModelError, match=r"noise does not reach \S*experts.*transformers supports it"
            ) as refused:
                engine.begin_pass(requested)
            assert "\n" not in str(refused.value)
        run(engine, PassNoise())


def test_a_model_that_vllm_runs_on_the_code_of_transformers_is_refused_in_one_line(start, tmp_path):
    """vLLM 0.32 on a CPU: random GPT-NeoX models gave other responses than in transformers, with the same weights."""
    save_random_model("gpt_neox", tmp_path)
    with pytest.raises(ModelError, match=r"config\.json: vLLM has no model class for it") as refused:
        start(tmp_path)
    assert "\n" not in str(refused.value)
