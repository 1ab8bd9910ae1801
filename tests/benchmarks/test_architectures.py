"""The table of architectures: it is current, its count is independent of aqnpipe, and no family is forgotten."""

import pytest
import torch
from architectures import ARMS, PAGE, line_of, lines_of_page, refusal_lines, rows_of
from decoder_families import FAMILIES, LEFT_OUT, tiny_model_of
from noised_products import ProductCount
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from aqnpipe.config.noise import NoiseSpec, OperatorNoise, RelativeGaussian
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

TOKENS = torch.arange(3, 27).reshape(2, 12)


def counted_shares(model, noise):
    """Shares of the products of a forward and a backward pass that have noise, counted from values."""
    spec = NoiseSpec(operator_noise=noise)
    recorder = ReceiptRecorder(spec, expected_phases=("actor_forward",), num_layers=2, num_norms=0)
    with ProductCount() as count:
        count.section = "forward"
        with phase_noise(model, spec, "actor_forward", NoiseKey(seed=0, step=0), recorder, backward=True):
            logits = model(input_ids=TOKENS, use_cache=False).logits
            count.section = "backward"
            logits.square().sum().backward()
    return count.share("forward"), count.share("backward")


def test_every_model_type_is_in_the_table_or_left_out_for_a_reason():
    left_out = {name for names in LEFT_OUT.values() for name in names}
    in_table = {family.split()[0] for family in FAMILIES}
    assert in_table | left_out == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert not in_table & left_out


CURRENT = ["qwen2", "bloom", "mamba"]


def one_of_each_outcome():
    """The first family of the page for each combination of columns that are refused, without those of `CURRENT`.

    `make architectures` measures all families, which takes minutes.
    """
    families = {}
    for family, lines in lines_of_page().items():
        refused = tuple(cell == "unsupported" for cell in lines[0].strip("| ").split(" | ")[2:])
        families.setdefault(refused, family)
    return sorted(set(families.values()) - set(CURRENT))


@pytest.mark.slow
@pytest.mark.parametrize("family", [*CURRENT, *sorted({*one_of_each_outcome(), "gemma4_text"})])
def test_a_row_is_current(family):
    (row,) = rows_of([family])
    page = PAGE.read_text(encoding="utf-8")
    assert row.failures == []
    assert [line for line in (line_of(row), *refusal_lines(row)) if line not in page] == []


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_the_count_finds_noise_where_it_is_and_nowhere_else(family):
    noise = ARMS["matmul"][0].operator_noise
    assert counted_shares(tiny_model_of(family), noise) == (1, 1)
    assert counted_shares(tiny_model_of(family), None) == (0, 0)


def test_the_count_finds_what_an_arm_leaves_out():
    error = RelativeGaussian(scale=0.05)
    phases = ("rollout", "actor_forward")
    without_head = OperatorNoise(error=error, include_lm_head=False)
    forward, backward = counted_shares(tiny_model_of("llama"), without_head)
    assert 0.8 < forward < 0.95
    assert backward == pytest.approx(forward)
    forward, backward = counted_shares(tiny_model_of("llama"), OperatorNoise(error=error, phases=phases))
    assert (forward, backward) == (1, 0)
