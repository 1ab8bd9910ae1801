"""The audit numbers the elements of a tensor-parallel worker's share as those of the whole tensor."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from aqnpipe.config.noise import RelativeGaussian
from aqnpipe.generation.vllm.claim import Claim
from aqnpipe.generation.vllm.judgement import num_padded


def claim(shape, strides, offset=0, columns=None):
    error = RelativeGaussian(scale=0.1)
    return Claim("linear.q_proj", 0, error, 1, 1, 0, shape, strides, offset, columns)


def test_elements_of_a_share_have_their_numbers_in_the_whole():
    """Columns 2 to 4 of rows of 6: row 1 of the share begins with element 8 of the whole."""
    covered, numbers = claim((2, 3), (3, 1), columns=(2, 3, 6)).elements_at(np.arange(6))
    assert covered.tolist() == [0, 1, 2, 3, 4, 5]
    assert numbers.tolist() == [2, 3, 4, 8, 9, 10]


def test_elements_of_a_share_that_is_a_view_of_a_merged_output():
    """Rows of 5 in memory, of which the last 3 are the share."""
    covered, numbers = claim((2, 3), (5, 1), offset=2, columns=(0, 3, 6)).elements_at(np.arange(10))
    assert covered.tolist() == [2, 3, 4, 7, 8, 9]
    assert numbers.tolist() == [0, 1, 2, 6, 7, 8]


@pytest.mark.parametrize("shape", [(4, 2, 3), (4, 6)])
def test_rows_may_consist_of_heads(shape):
    strides = (6, 3, 1) if len(shape) == 3 else (6, 1)
    _, numbers = claim(shape, strides, columns=(6, 6, 12)).elements_at(np.array([0, 5, 6, 23]))
    assert numbers.tolist() == [6, 11, 18, 47]


@pytest.mark.parametrize(("num_logits", "expected"), [(3, 2), (4, 0), (None, 0)])
def test_only_columns_behind_the_vocabulary_are_padding(num_logits, expected):
    """Two rows of 4: with 3 tokens in the vocabulary, elements 3 and 7 are padding."""
    frame = SimpleNamespace(part=SimpleNamespace(num_logits=num_logits))
    followed = SimpleNamespace(frame=frame, addresses=np.arange(8), tensor=torch.zeros(2, 4))
    assert num_padded(followed) == expected
