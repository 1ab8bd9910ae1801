import numpy as np
import pytest
import torch
from torch import nn

from aqnpipe.config.dataset import GeneratedDataset, PromptFormat
from aqnpipe.config.model import ModelConfig
from aqnpipe.config.noise import Fault
from aqnpipe.data.loader import load_problems
from aqnpipe.diagnosis.sensitivity.first_order import (
    ScoredText,
    first_order_estimates,
    layer_noise,
    text_batches,
    texts_of_problems,
)
from aqnpipe.diagnosis.sensitivity.layers import (
    Noise,
    NoisyPasses,
    fragile_layers,
    rank_correlation,
    ratio_and_error,
    sensitivity,
)
from aqnpipe.errors import ConfigError, DataError, ModelError, ReceiptError
from aqnpipe.machine.machine import Machine, Request
from aqnpipe.models.loading import load_model, load_tokenizer, source_folder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny():
    torch.set_num_threads(1)
    folder = source_folder(ModelConfig(source="tiny"))
    return load_model(folder, dtype="float32", attention="eager", device="cpu"), load_tokenizer(folder)


@pytest.fixture(scope="module")
def problems(tiny):
    table = load_problems(GeneratedDataset(num_train=64), "train")
    return texts_of_problems(table, PromptFormat(), tiny[1])


@pytest.fixture(scope="module")
def model(make_model):
    return make_model(num_layers=4)


def texts(num_texts=6, length=20, prompt_tokens=4):
    ids = torch.randint(3, 100, (num_texts, length), generator=torch.Generator().manual_seed(5)).tolist()
    return [ScoredText(tuple(row[: length - position]), prompt_tokens) for position, row in enumerate(ids)]


def weights_of(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


# The loss of texts


def test_losses_of_padded_batches_are_those_of_single_texts(model):
    wanted = []
    for text in texts():
        ids = torch.tensor([text.token_ids])
        logits = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        losses = -logits.gather(1, ids[0, 1:, None])[:, 0]
        wanted.append(losses[text.prompt_tokens - 1 :].sum().item())
    found = NoisyPasses(model, texts()).losses(None)
    assert found == pytest.approx(wanted, rel=1e-5)


def test_batches_respect_the_limit_of_logits_and_keep_every_text():
    many = texts(12)
    batches = text_batches(many, vocabulary_size=2**26 // 60, device=CPU)
    assert sorted(position for batch in batches for position in batch.positions) == list(range(12))
    assert all(batch.token_ids.numel() <= 60 for batch in batches)
    assert len(batches) > 3


@pytest.mark.parametrize("prompt_tokens", [0, 3, 4])
def test_a_text_needs_a_prompt_and_a_scored_token(prompt_tokens):
    with pytest.raises(DataError, match="a text has 3 tokens"):
        ScoredText((1, 2, 3), prompt_tokens)


# The estimate


class Linears(nn.Module):
    """Layers h + (h W + b) over one-hot tokens, small enough to expand by hand."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.lm_head = nn.Linear(6, 5, bias=False)

    def get_input_embeddings(self):
        return self.embedding

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, use_cache=False, past_key_values=None, attention_mask=None, noise=None):
        hidden = self.embedding(input_ids)
        for index, layer in enumerate(self.layers):
            inner = layer(hidden)
            if noise is not None and noise[0] == index:
                inner = nn.functional.linear(hidden, layer.weight) * (1 + noise[1]) + layer.bias
            hidden = hidden + torch.tanh(inner)
        return type("Output", (), {"logits": self.lm_head(hidden)})()


def test_estimate_is_half_s_squared_times_the_sum_of_squared_y_times_gradient():
    model, text = Linears(), ScoredText((1, 2, 3, 4, 0, 2), 2)
    (batch,) = text_batches([text], 5, CPU)
    wanted = []
    for layer in range(2):
        # noise z enters as y (1 + z), so dL/dz = y g, element by element
        z = torch.zeros(1, 6, 6, requires_grad=True)
        logits = model(batch.token_ids, noise=(layer, z)).logits[0, :-1].log_softmax(-1)
        loss = -logits.gather(1, batch.token_ids[0, 1:, None])[text.prompt_tokens - 1 :].sum()
        (gradient,) = torch.autograd.grad(loss, z)
        wanted.append(0.5 * 0.2**2 * float(gradient.square().sum()) / text.num_scored)
    assert first_order_estimates(model, [text], 0.2)[:2] == pytest.approx(wanted, rel=1e-5)


def test_estimate_leaves_the_model_and_its_gradients_alone(model):
    before = weights_of(model)
    trained = next(model.parameters())
    trained.grad = torch.ones_like(trained)
    model.train()
    try:
        first_order_estimates(model, texts(), 0.1)
        assert model.training
        assert all(weight.requires_grad for weight in model.parameters())
        assert torch.equal(trained.grad, torch.ones_like(trained))
        assert all(torch.equal(before[name], weight) for name, weight in model.named_parameters())
        assert [weight.grad is None for weight in model.parameters()].count(False) == 1
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    finally:
        trained.grad = None
        model.eval()


def test_estimate_grows_with_the_square_of_the_scale(model):
    low, high = (first_order_estimates(model, texts(), scale) for scale in (0.05, 0.1))
    assert high == pytest.approx([4 * value for value in low], rel=1e-9)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2"])
def test_estimate_reaches_every_layer_of_other_architectures(random_model, architecture):
    other = random_model(architecture, num_layers=3)
    short = [ScoredText(tuple(token % 50 for token in text.token_ids), text.prompt_tokens) for text in texts()]
    estimates = first_order_estimates(other, short, 0.1)
    assert len(estimates) == 4
    assert min(estimates) > 0


def test_kernels_that_noise_cannot_reach_are_refused(model):
    kept = model.config._attn_implementation
    model.config._attn_implementation = "flash_attention_2"
    try:
        with pytest.raises(ModelError, match="attention is flash_attention_2"):
            layer_noise(model, 0, 0.1)
    finally:
        model.config._attn_implementation = kept


# The measurement


def test_noise_in_a_layer_that_does_nothing_costs_nothing(make_model):
    silent = make_model(num_layers=3)
    with torch.no_grad():
        silent.model.layers[1].self_attn.o_proj.weight.zero_()
        silent.model.layers[1].mlp.down_proj.weight.zero_()
    result = sensitivity(silent, texts(), noise_seeds=(0, 1))
    one = result.layers[1]
    assert (one.layer, one.estimate, one.loss_increase, one.loss_standard_error) == (1, 0, 0, 0)
    assert all(layer.estimate > 0 and layer.loss_increase != 0 for layer in result.layers if layer.layer != 1)


def test_equal_seeds_give_equal_results_and_the_model_stays_as_it_was(model):
    before = weights_of(model)
    first, second = (sensitivity(model, texts(), noise_seeds=(3,)) for _ in range(2))
    other = sensitivity(model, texts(), noise_seeds=(4,))
    assert first == second != other
    assert [layer.estimate for layer in first.layers] == [layer.estimate for layer in other.layers]
    assert all(torch.equal(before[name], weight) for name, weight in model.named_parameters())
    assert not model.training


def test_noise_in_another_layer_is_refused_by_the_receipt(model, monkeypatch):
    passes = NoisyPasses(model, texts())
    real = Request.error_at
    monkeypatch.setattr(
        Request, "error_at", lambda self, part: real(self, 1 if part == 2 else 2 if part == 1 else part)
    )
    with pytest.raises(ReceiptError, match="noise in layer 1"):
        passes.losses(Noise(1, 0.1, 0))


def test_absent_noise_is_refused_by_the_receipt(model, monkeypatch):
    monkeypatch.setattr(Machine, "_on_result", lambda self, operator, result, *_: result)
    with pytest.raises(ReceiptError):
        NoisyPasses(model, texts()).losses(Noise(1, 0.1, 0))


def test_faults_are_simulated_in_estimate_and_measurement(model):
    fault = Fault(type="dead_zone", layer=2, magnitude=0.3)
    clean, faulty = (sensitivity(model, texts(), noise_seeds=(0,), faults=faults) for faults in ((), (fault,)))
    assert clean.loss != faulty.loss
    for one, other in zip(clean.layers, faulty.layers, strict=True):
        assert one.estimate != other.estimate
        assert one.loss_increase != other.loss_increase


@pytest.mark.slow
def test_trained_model_the_estimate_ranks_layers_as_the_measured_loss_does(tiny, problems):
    """On `tiny`, 64 questions, 2 seeds. See benchmarks/README.md for more models; 0.7 is a loose bound for 6 layers."""
    result = sensitivity(tiny[0], problems, noise_seeds=(0, 1))
    assert result.fragile_layers == (0,)
    assert result.rank_correlation >= 0.7
    first = result.layers[0]
    assert first.estimate == pytest.approx(first.loss_increase, rel=0.5)
    assert result.accuracy is None


@pytest.mark.slow
def test_accuracy_is_measured_on_gold_answers(tiny, problems):
    result = sensitivity(tiny[0], problems[:24], tokenizer=tiny[1], noise_seeds=(0,), scale=0.5)
    assert result.num_questions == 24
    assert result.accuracy > 0.2
    assert result.layers[0].accuracy_change < -0.1
    assert 0 < result.layers[0].accuracy_standard_error < 0.2


# What is said about it


def test_ratio_and_its_standard_error_worked_out_by_hand():
    sums, sizes = np.array([2.0, 6.0]), np.array([1.0, 3.0])
    assert ratio_and_error(sums, sizes) == (2.0, 0.0)
    # ratio 2; residuals 1 and -1; sqrt(2/1 * 2)/4
    assert ratio_and_error(np.array([3.0, 5.0]), sizes) == (2.0, pytest.approx(0.5))
    assert ratio_and_error(np.array([3.0]), np.array([2.0])) == (1.5, None)


def test_fragile_layers_are_those_that_cannot_be_told_apart():
    draws = np.random.default_rng(0).normal(size=(4, 200))
    sizes = np.ones(200)
    assert fragile_layers([*(draws[:3] + 0.0)], sizes) == ()
    assert fragile_layers([draws[0], draws[1] + 3, draws[2] + 1, draws[3] + 3], sizes) == (1, 3)
    assert fragile_layers([draws[0], draws[1] + 3, draws[2] + 1], sizes) == (1,)


def test_false_alarms_of_fragile_layers_stay_below_their_bound():
    generator = np.random.default_rng(1)
    alarms = sum(bool(fragile_layers([*generator.normal(size=(6, 40))], np.ones(40))) for _ in range(1000))
    # binomial(1000, 0.05): more than 75 has probability 3e-4
    assert alarms <= 75


def test_rank_correlation_is_undefined_for_few_or_equal_layers():
    assert rank_correlation([1, 2, 3], [2, 4, 9]) == pytest.approx(1)
    assert rank_correlation([1, 2], [2, 4]) is None
    assert rank_correlation([1, 1, 1], [2, 4, 5]) is None


# Bad input


def test_texts_may_be_strings_tensors_or_lists(tiny):
    model, tokenizer = tiny
    words = "Question: Tom has 3 apples. How many?"
    ids = tokenizer(words)["input_ids"]
    found = [
        sensitivity(model, [text], tokenizer=tokenizer, noise_seeds=(0,)) for text in (words, ids, torch.tensor(ids))
    ]
    assert found[0] == found[1] == found[2]
    assert found[0].layers[0].loss_standard_error is None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"texts": []}, DataError, "no texts"),
        ({"texts": ["a"]}, DataError, "no tokenizer"),
        ({"texts": [[1, 100]]}, DataError, "found token id 100, expected ids of the model's vocabulary, 0 to 99"),
        ({"texts": [[1]]}, DataError, "a text has 1 tokens"),
        ({"texts": [[1, 2]], "scale": 1.0}, ConfigError, "scale 1"),
        ({"texts": [[1, 2]], "noise_seeds": ()}, ConfigError, "at least one seed"),
        ({"texts": [[1, 2]], "noise_seeds": (1, 1)}, ConfigError, "none of them twice"),
    ],
)
def test_bad_input_is_one_line(model, arguments, error, message):
    with pytest.raises(error, match=message) as caught:
        sensitivity(model, **arguments)
    assert "\n" not in str(caught.value)


def test_a_loss_that_is_not_finite_is_refused(make_model):
    broken = make_model(num_layers=2)
    with torch.no_grad():
        broken.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(ModelError, match="NaN or infinit"):
        sensitivity(broken, texts(), noise_seeds=(0,))
