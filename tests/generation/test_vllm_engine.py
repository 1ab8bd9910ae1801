"""vLLM against transformers on a CPU in float32: the same tokens, noise and faults, from separate processes.

`make test-vllm` runs these in a separate environment.
"""

import os
import subprocess
import sys

import psutil
import pytest
from tiny_tokenizer import build_tokenizer

from aqnpipe.config.model import builtin_folder
from aqnpipe.config.noise import (
    CacheNoise,
    FakeQuantization,
    Fault,
    MantissaTruncation,
    ModuleNoise,
    OperatorNoise,
    RelativeGaussian,
    SystematicBias,
)
from aqnpipe.errors import ModelError, ReceiptError
from aqnpipe.generation.backend import Sampling
from aqnpipe.generation.noisy_passes import PassNoise, TransformersPasses, pass_receipt
from aqnpipe.generation.vllm.plugin import is_vllm_installed
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.models.loading import load_model
from aqnpipe.noise.receipts.other_checks import cache_error

pytestmark = pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed here: make test-vllm")

QUESTIONS = (
    "Tom has 5 apples . He buys 7 more . How many apples now ?",
    "Ann has 12 pens . She gives 3 pens to Bob . How many pens does Ann have ?",
    "What is 1 plus 1 ?",
    "Ben has 4 boxes with 6 pens each . How many pens are there ?",
)
SAMPLING = Sampling(max_response_tokens=24)
KEY = NoiseKey(seed=3, step=0)


def noise(scale=0.2, **changes):
    settings = {"error": RelativeGaussian(scale=scale), "phases": ("evaluation",), "attention": "fused"}
    return PassNoise(operator_noise=OperatorNoise(**(settings | changes)))


def modules(chosen, point="input", error=None):
    error = error or RelativeGaussian(scale=0.2)
    return PassNoise(module_noise=ModuleNoise(modules=chosen, point=point, error=error, phases=("evaluation",)))


def run(generator, requested, prompts, *keys):
    generator.begin_pass(requested)
    completions = [generator.generate(prompts, SAMPLING, key) for key in keys or (KEY,)]
    return completions if keys else completions[0], pass_receipt(requested, [generator.end_pass()])


def tokens(completions):
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [tokenizer(question)["input_ids"] for question in QUESTIONS]


@pytest.fixture(scope="module")
def start(tokenizer):
    from aqnpipe.generation.vllm.engine import VllmEngine

    def start(folder, **changes):
        settings = {"dtype": "float32", "max_tokens": 128, "batch_size": 4, "device": "cpu"}
        return VllmEngine(folder, end_token=tokenizer.eos_token_id, **(settings | changes))

    return start


@pytest.fixture(scope="module")
def engine(start):
    """The built-in model: tied embeddings, trained, so that its greedy responses have clear margins."""
    with start(builtin_folder("tiny"), max_tokens=320) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(tokenizer):
    model = load_model(builtin_folder("tiny"), dtype="float32", attention="sdpa")
    return TransformersPasses(model, tokenizer)


def test_the_worker_is_a_separate_process_below_that_of_the_engine(engine):
    (worker,) = engine.worker_processes
    parents = [process.pid for process in psutil.Process(worker).parents()]
    assert os.getpid() in parents
    assert parents[0] != os.getpid()
    assert engine.description["enforce_eager"] is True
    assert engine.description["vllm"].startswith("vllm")


def test_its_processes_listen_only_on_the_loopback_interface(engine):
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    assert {*engine.worker_processes} < {process.pid for process in processes}
    listening = {
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


def test_greedy_tokens_equal_those_of_transformers(engine, reference, prompts):
    clean, receipt = run(engine, PassNoise(), prompts)
    assert clean == run(reference, PassNoise(), prompts)[0]
    assert "stop" in {completion.finish_reason for completion in clean}
    (record,) = receipt.check().phases
    assert (record.calls, record.largest_difference) == (0, 0.0)
    assert record.compared > 1000
    assert record.passes == max(len(completion.token_ids) for completion in clean)


@pytest.mark.parametrize("operators", ["matmul", "all"])
def test_noise_measures_as_in_transformers_in_every_layer(engine, reference, prompts, operators):
    requested = noise(operators=operators)
    ours, theirs = (run(generator, requested, prompts)[1].check() for generator in (engine, reference))
    assert ours.num_layers == theirs.num_layers == 6
    for layer in (*range(6), None):
        (a, n), (b, m) = (layer_scale(receipt, layer) for receipt in (ours, theirs))
        assert abs(a / 0.2 - 1) < 5 / (2 * n) ** 0.5
        assert abs(a / b - 1) < 5 * (1 / (2 * n) + 1 / (2 * m)) ** 0.5
    elementwise = {"norm", "silu"} if operators == "all" else set()
    assert {cell.operator for cell in ours.cells} == {"mm", "attention"} | elementwise


def layer_scale(receipt, layer):
    cells = [cell for cell in receipt.cells if cell.layer == layer]
    total = sum(cell.measured_elements for cell in cells)
    return (sum(cell.measured**2 * cell.measured_elements for cell in cells) / total) ** 0.5, total


def test_every_product_of_a_layer_is_counted(engine, prompts):
    """qkv_proj and gate_up_proj are one product each, beside o_proj and down_proj."""
    receipt = run(engine, noise(), prompts)[1].check()
    (record,) = receipt.phases
    for layer in range(6):
        calls = {cell.operator: cell.calls for cell in receipt.cells if cell.layer == layer}
        assert calls == {"mm": 4 * record.passes, "attention": record.passes}
    elements = {cell.operator: cell.elements for cell in receipt.cells if cell.layer == 0}
    # Of each token, queries and twice half as many keys and values, the output of attention, gate, up and hidden state.
    assert elements["mm"] / elements["attention"] == (2 * 128 + 128 + 2 * 320 + 128) / 128
    assert record.compared > 1000


def test_noise_is_replayed_by_its_key_and_gone_after_the_pass(engine, reference, prompts):
    other = NoiseKey(seed=4, step=0)
    (first, different), receipt = run(engine, noise(), prompts, KEY, other)
    receipt.check()
    again = run(engine, noise(), prompts)[0]
    assert first == again != different
    clean = run(reference, PassNoise(), prompts)[0]
    assert first != clean
    assert engine.generate(prompts, SAMPLING) == clean
    assert run(engine, PassNoise(), prompts)[0] == clean


@pytest.fixture
def few_shot(prompts):
    """Prompts with the same first 200 tokens: more than one block of vLLM's cache."""
    beginning = [token for prompt in prompts for token in prompt] * 5
    return [beginning[:200] + prompt for prompt in prompts]


def test_a_common_prefix_is_read_once_but_by_each_prompt_under_noise(engine, reference, few_shot, monkeypatch):
    wait, cached = engine._llm.wait_for_completion, []

    def watched(**settings):
        outputs = wait(**settings)
        cached.append(sorted(output.num_cached_tokens for output in outputs))
        return outputs

    monkeypatch.setattr(engine._llm, "wait_for_completion", watched)
    fault = PassNoise(faults=(Fault(type="dead_zone", layer=2, magnitude=0.3),))
    for requested in (noise(), fault):
        _, receipt = run(engine, requested, few_shot)
        receipt.check()
    # Cache entries of the noised pass are not used afterwards.
    clean, receipt = run(engine, PassNoise(), few_shot, KEY, NoiseKey(seed=3, step=1))
    receipt.check()
    assert clean[0] == clean[1] == run(reference, PassNoise(), few_shot)[0]
    assert cached == [[0] * 4, [0] * 4, [0, 128, 128, 128], [0, 128, 128, 128]]


def test_a_prompt_that_was_not_read_under_its_own_noise_is_refused(engine, few_shot, monkeypatch):
    enqueue = engine._llm.enqueue

    def read_from_the_cache(prompts, parameters, **rest):
        for each in parameters:
            each.skip_reading_prefix_cache = False
        return enqueue(prompts, parameters, **rest)

    monkeypatch.setattr(engine._llm, "enqueue", read_from_the_cache)
    with pytest.raises(ReceiptError, match=r"vLLM read [1-9]\d+ prompt tokens from its cache"):
        run(engine, noise(), few_shot)


def test_a_vllm_that_no_longer_counts_what_it_cached_is_refused(engine, prompts, monkeypatch):
    wait = engine._llm.wait_for_completion

    def without_counts(**settings):
        outputs = wait(**settings)
        for output in outputs:
            output.num_cached_tokens = None
        return outputs

    monkeypatch.setattr(engine._llm, "wait_for_completion", without_counts)
    with pytest.raises(ReceiptError, match="does not report how many prompt tokens"):
        run(engine, noise(), prompts)


def test_only_the_requested_layers_and_head_are_noised(engine, prompts):
    receipt = run(engine, noise(layers=(1, 4), include_lm_head=False), prompts)[1].check()
    assert {cell.layer for cell in receipt.cells} == {1, 4}


@pytest.mark.parametrize(
    "fault",
    [
        {"type": "saturation", "layer": 2, "magnitude": 0.7},
        {"type": "dead_zone", "layer": 5, "magnitude": 0.2, "sparsity": 0.3, "seed": 7},
        {"type": "bias", "layer": 1, "magnitude": 0.5, "site": "attention_output"},
        {"type": "saturation", "layer": 0, "magnitude": 0.6, "site": "mlp_output", "threshold": "cached"},
        {"type": "dead_zone", "layer": 3, "magnitude": 0.3, "site": "q_proj", "sparsity": 0.5, "seed": 1},
        {"type": "saturation", "layer": 4, "magnitude": 0.5, "site": "v_proj"},
        {"type": "bias", "layer": 0, "magnitude": 0.4, "site": "up_proj", "sparsity": 0.5},
        {"type": "saturation", "layer": 2, "magnitude": 0.6, "site": "o_proj"},
        {"type": "dead_zone", "layer": 1, "magnitude": 0.3, "site": "post_attention_layernorm"},
    ],
    ids=lambda fault: f"{fault['type']}-{fault.get('site', 'layer_output')}",
)
def test_a_deterministic_fault_gives_the_same_responses_as_in_transformers(engine, reference, prompts, fault):
    """One prompt at a time: each call has its own threshold, and transformers would pad a batch."""
    requested = PassNoise(faults=(Fault(**fault),))
    passes = []
    for generator in (engine, reference):
        generator.begin_pass(requested)
        keys = [NoiseKey(seed=3, step=step) for step in range(len(prompts))]
        completions = [
            generator.generate([prompt], SAMPLING, key)[0] for prompt, key in zip(prompts, keys, strict=True)
        ]
        passes.append((completions, pass_receipt(requested, [generator.end_pass()]).check().fault_cells))
    (ours, (our_cell,)), (theirs, (their_cell,)) = passes
    assert ours == theirs
    assert (our_cell.calls, our_cell.elements) == (their_cell.calls, their_cell.elements)
    assert our_cell.num_faulty_channels == their_cell.num_faulty_channels
    # Values at the threshold may be rounded to either side of it.
    assert abs(our_cell.changed - their_cell.changed) <= 1e-3 * our_cell.elements
    assert tokens(engine.generate(prompts, SAMPLING)) == tokens(run(reference, PassNoise(), prompts)[0])


@pytest.mark.parametrize("operators", ["matmul", "all"])
@pytest.mark.parametrize(
    "error", [SystematicBias(scale=0.02), MantissaTruncation(mantissa_bits=3)], ids=lambda e: e.kind
)
def test_deterministic_errors_give_the_same_responses_as_in_transformers(engine, reference, prompts, operators, error):
    requested = noise(error=error, operators=operators)
    responses = []
    for generator in (engine, reference):
        found, receipt = run(generator, requested, prompts)
        receipt.check()
        responses.append(tokens(found))
    assert responses[0] == responses[1] != tokens(engine.generate(prompts, SAMPLING))


@pytest.mark.parametrize("attention", ["fused", "decomposed"])
@pytest.mark.parametrize(
    ("number_format", "activations", "include_lm_head"),
    [("mxfp4", False, False), ("nvfp4", False, True), ("fp8", False, False), ("fp8_block", True, False)],
)
def test_rounded_operands_give_the_same_responses_as_in_transformers(
    engine, reference, prompts, number_format, activations, include_lm_head, attention
):
    """A scale for a whole tensor of activations would depend on the rows that vLLM reads together."""
    error = FakeQuantization(format=number_format, activations=activations)
    requested = noise(error=error, include_lm_head=include_lm_head, attention=attention)
    (ours, receipt), (theirs, their_receipt) = (run(generator, requested, prompts) for generator in (engine, reference))
    assert tokens(ours) == tokens(theirs)
    cells, their_cells = (
        {(cell.operator, cell.layer): cell.measured for cell in one.check().cells} for one in (receipt, their_receipt)
    )
    # Other samples of a few products.
    assert cells == pytest.approx(their_cells, rel=0.35)


@pytest.mark.parametrize("number_format", ["fp8", "int8"])
def test_keys_and_values_of_a_cache_in_8_bits_as_in_transformers(engine, reference, prompts, number_format):
    requested = PassNoise(kv_cache=CacheNoise(format=number_format, phases=("evaluation",)))
    (ours, our_receipt), (theirs, their_receipt) = (
        run(generator, requested, prompts) for generator in (engine, reference)
    )
    assert tokens(ours) == tokens(theirs)
    rows, their_rows = (receipt.check().cache_cells for receipt in (our_receipt, their_receipt))
    assert [row.recomputed for row in rows] == [row.elements for row in rows]
    assert cache_error(rows) == pytest.approx(cache_error(their_rows), rel=0.01)


@pytest.mark.parametrize("point", ["input", "output"])
@pytest.mark.parametrize("chosen", ["minimal", "mlp", "all", ("*.k_proj", "*.up_proj", "lm_head")], ids=str)
def test_noise_on_modules_as_in_transformers(engine, reference, prompts, chosen, point):
    """A bias is deterministic, so responses can be compared; Gaussian noise is compared by its size."""
    exact = [
        run(generator, modules(chosen, point, SystematicBias(scale=0.05)), prompts) for generator in (engine, reference)
    ]
    assert tokens(exact[0][0]) == tokens(exact[1][0]) != tokens(engine.generate(prompts, SAMPLING))
    ours, theirs = (run(generator, modules(chosen, point), prompts)[1].check() for generator in (engine, reference))
    assert ours.num_noised_modules == theirs.num_noised_modules == len(ours.phases[0].modules)
    assert {(cell.operator, cell.layer) for cell in ours.cells} == {
        (cell.operator, cell.layer) for cell in theirs.cells
    }
    for layer in {cell.layer for cell in ours.cells}:
        scale, elements = layer_scale(ours, layer)
        assert abs(scale / 0.2 - 1) < 5 / (2 * elements) ** 0.5


def test_operators_modules_and_faults_share_a_pass(engine, prompts):
    changes = {
        "module_noise": modules(("*.q_proj", "*.down_proj"), "input", RelativeGaussian(scale=0.1)).module_noise,
        "faults": (Fault(type="dead_zone", layer=3, magnitude=0.3, site="q_proj"),),
    }
    receipt = run(engine, noise().model_copy(update=changes), prompts)[1].check()
    assert {cell.requested for cell in receipt.cells if cell.is_module} == {0.1}
    assert receipt.fault_cells[0].changed > 0


def test_a_fault_behind_the_noise_of_its_module_is_no_missing_noise(engine, prompts):
    faults = tuple(Fault(type="dead_zone", layer=3, magnitude=0.3, site=site) for site in ("q_proj", "input_layernorm"))
    requested = modules(("*.q_proj", "*.input_layernorm"), "output").model_copy(update={"faults": faults})
    run(engine, requested, prompts)[1].check()


def test_a_fault_changes_responses(engine, prompts):
    requested = PassNoise(faults=(Fault(type="saturation", layer=2, magnitude=0.7),))
    assert run(engine, requested, prompts)[0] != engine.generate(prompts, SAMPLING)


def test_noise_and_a_fault_share_a_pass(engine, prompts):
    fault = Fault(type="dead_zone", layer=3, magnitude=0.3, site="k_proj")
    receipt = run(engine, noise().model_copy(update={"faults": (fault,)}), prompts)[1].check()
    assert receipt.fault_cells[0].changed > 0
    assert abs(receipt.measured_scale("evaluation")[0] / 0.2 - 1) < 0.02


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        (noise(attention="decomposed"), "attention as one operator"),
        (modules(("*.mlp",)), r"pattern '\*\.mlp' matches model\.layers\.0\.mlp, which is no linear module or norm"),
        (modules(("*.qkv_proj",)), "matches none of 56 modules"),
        (PassNoise(faults=(Fault(type="bias", layer=6, magnitude=0.1),)), r"layer is 6, expected 0 to 5"),
        (PassNoise(faults=(Fault(type="bias", layer=0, magnitude=0.1, site="qkv_proj"),)), "site is 'qkv_proj'"),
    ],
)
def test_unsupported_noise_is_refused_in_one_line(engine, requested, message):
    with pytest.raises(ModelError, match=message) as refused:
        engine.begin_pass(requested)
    assert "\n" not in str(refused.value)


def test_noise_that_silently_does_not_happen_is_refused(engine, prompts, monkeypatch):
    rpc = engine._llm.collective_rpc

    def without_noise(method, **rest):
        return [{}] if method == "aqnpipe_begin_batch" else rpc(method, **rest)

    monkeypatch.setattr(engine._llm, "collective_rpc", without_noise)
    with pytest.raises(ReceiptError, match="measured 0 forward passes, the responses took at least"):
        run(engine, noise(), prompts)


def test_a_receipt_that_covers_fewer_passes_than_the_responses_took_is_refused(engine, prompts, monkeypatch):
    rpc = engine._llm.collective_rpc
    begun = []

    def first_batch_only(method, **rest):
        if method == "aqnpipe_begin_batch":
            begun.append(method)
            if len(begun) > 1:
                return [{}]
        return rpc(method, **rest)

    monkeypatch.setattr(engine._llm, "collective_rpc", first_batch_only)
    with pytest.raises(ReceiptError, match="forward passes, the responses took at least"):
        run(engine, noise(), prompts, KEY, KEY)


def test_missing_measurements_of_a_worker_are_refused(engine, prompts, monkeypatch):
    rpc = engine._llm.collective_rpc
    monkeypatch.setattr(
        engine._llm, "collective_rpc", lambda method, **rest: rpc(method, **rest)[: method != "aqnpipe_end_pass"]
    )
    with pytest.raises(ReceiptError, match=r"measurements of workers \[\], expected 1"):
        run(engine, noise(), prompts)


@pytest.mark.parametrize("stop_text", ["####", "+"])
def test_a_stop_text_ends_a_response_in_the_worker(engine, reference, prompts, stop_text):
    sampling = Sampling(max_response_tokens=24, stop_text=stop_text)
    ended = []
    for generator in (engine, reference):
        generator.begin_pass(PassNoise())
        ended.append(generator.generate(prompts, sampling, KEY))
        record = pass_receipt(PassNoise(), [generator.end_pass()]).check().phases[0]
    assert ended[0] == ended[1]
    free = run(engine, PassNoise(), prompts)[0]
    assert any(len(stopped.token_ids) < len(full.token_ids) for stopped, full in zip(ended[0], free, strict=True))
    assert record.passes >= max(len(completion.token_ids) for completion in ended[0])
    sampled = Sampling(max_response_tokens=24, stop_text=stop_text, temperature=1.0, seed=5, log_probabilities=True)
    for completion in engine.generate(prompts, sampled):
        assert len(completion.log_probabilities) == len(completion.token_ids)
        assert all(value > float("-inf") for value in completion.log_probabilities)


def test_sampling_is_keyed_by_seed_and_row(engine, prompts):
    sampling = Sampling(max_response_tokens=12, temperature=1.5, seed=5)
    whole = engine.generate(prompts, sampling)
    parts = [
        engine.generate(prompts[row : row + 2], Sampling(12, 1.5, seed=5, first_row=row, num_rows=4)) for row in (0, 2)
    ]
    assert parts[0] + parts[1] == whole
    assert engine.generate(prompts, Sampling(12, 1.5, seed=6)) != whole
    assert engine.generate([], sampling) == []


def test_prompts_that_do_not_fit_one_forward_are_sampled_as_each_alone(start, prompts):
    long = [(prompt * 300)[:300] for prompt in prompts * 3]
    assert sum(map(len, long)) > 2048
    with start(builtin_folder("tiny"), max_tokens=320, batch_size=len(long)) as engine:
        together = engine.generate(long, Sampling(12, 1.5, seed=5))
        first = engine.generate(long[:4], Sampling(12, 1.5, seed=5, num_rows=len(long)))
    assert together[:4] == first


@pytest.fixture(scope="module")
def untied_folder(tmp_path_factory, make_model, tokenizer):
    folder = tmp_path_factory.mktemp("untied")
    make_model(
        num_layers=2,
        hidden_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=len(tokenizer),
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_untied_embeddings_and_another_head_size(start, untied_folder, tokenizer, prompts):
    reference = TransformersPasses(load_model(untied_folder, dtype="float32", attention="sdpa"), tokenizer)
    with start(untied_folder) as engine:
        assert engine.generate(prompts, SAMPLING) == run(reference, PassNoise(), prompts)[0]
        receipt = run(engine, noise(operators="all"), prompts)[1].check()
        assert None in {cell.layer for cell in receipt.cells}


def test_a_worker_without_the_extension_is_refused(start):
    with pytest.raises(ReceiptError, match="without aqnpipe's extension"):
        start(builtin_folder("tiny"), worker_extension="")


def test_an_unsupported_head_size_is_one_line_before_anything_starts(start, tmp_path, make_model):
    make_model(hidden_size=32, num_attention_heads=2).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"head_dim is 16, vLLM on a CPU supports 32, 64"):
        start(tmp_path)


def test_an_architecture_that_vllm_does_not_implement_is_refused(start, tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchForCausalLM"]}')
    with pytest.raises(ModelError, match="vLLM has no model class NoSuchForCausalLM"):
        start(tmp_path)


def test_a_model_that_vllm_cannot_load_is_one_line(start, untied_folder, tmp_path):
    for path in untied_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ModelError, match="vLLM cannot start with model") as refused:
        start(tmp_path)
    assert "\n" not in str(refused.value)


def test_killing_the_launcher_ends_the_processes_of_its_engine(tmp_path):
    script = tmp_path / "launcher.py"
    script.write_text(
        "import time\n"
        "from aqnpipe.config.model import builtin_folder\n"
        "from aqnpipe.generation.vllm.engine import VllmEngine\n"
        "settings = dict(end_token=1, dtype='float32', max_tokens=64, batch_size=1, device='cpu')\n"
        "engine = VllmEngine(builtin_folder('tiny'), **settings)\n"
        "print('workers', *engine.worker_processes, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as launcher:
        line = next(line for line in launcher.stdout if line.startswith("workers"))
        (worker,) = (psutil.Process(int(pid)) for pid in line.split()[1:])
        engine = worker.parent()
        assert engine.pid != launcher.pid
        launcher.kill()
    _, alive = psutil.wait_procs([worker, engine], timeout=60)
    assert alive == []
