import pytest
import torch

from aqnpipe.noise.receipts.sampling import MEASURED_ELEMENTS_PER_CALL, sample, sample_positions

GAPS = torch.arange(60 * 70.0).view(60, 70)


@pytest.mark.parametrize(
    "tensor",
    [GAPS, GAPS[:, 3:50], GAPS.t(), GAPS.view(3, 20, 70).transpose(0, 1)[:, :, ::2], GAPS[0].expand(40, 70)],
    ids=["dense", "columns", "transposed", "three dimensions with gaps", "expanded"],
)
def test_elements_are_those_of_the_flat_tensor_however_it_lies_in_memory(tensor):
    found = sample(tensor)
    assert found.tolist() == [
        tensor.flatten()[place].item() for place in sample_positions(tensor.numel(), tensor.device)
    ]
    assert len(found) == MEASURED_ELEMENTS_PER_CALL


@pytest.mark.parametrize("tensor", [GAPS[:2], GAPS[:7, :9], torch.zeros(0, 4)], ids=["dense", "with gaps", "empty"])
def test_a_small_tensor_is_copied_whole(tensor):
    found = sample(tensor)
    assert found.tolist() == tensor.flatten().tolist()
    assert found.numel() == 0 or found.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("num_tokens", [45, 60, 64, 90])
def test_measured_elements_are_spread_over_rows_whatever_the_shape(num_tokens):
    """Gradients of attention weights are zero in the rows of prompts; a regular step through them met no others."""
    weights = torch.zeros(32, 4, num_tokens, num_tokens)
    weights[:, :, -25:] = 1.0
    share, count = 25 / num_tokens, MEASURED_ELEMENTS_PER_CALL
    measured = sample(weights)
    assert measured.numel() == count
    assert abs(measured.mean().item() - share) < 4 * (share * (1 - share) / count) ** 0.5
    positions = sample_positions(weights.numel(), weights.device)
    assert (positions.diff() > 0).all()
    assert positions[0] >= 0
    assert positions[-1] < weights.numel()
