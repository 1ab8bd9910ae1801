"""Noise on the shares of tensor-parallel workers is, number by number, the noise of the whole tensor."""

import pytest
import torch

from aqnpipe.config.noise import AbsoluteGaussian, MantissaTruncation, RelativeGaussian, SystematicBias
from aqnpipe.noise.kernels.error_models import apply_error_
from aqnpipe.noise.kernels.gaussian import NoiseStream
from aqnpipe.noise.kernels.shards import Shard, apply_error_to_shards_

SOURCE = NoiseStream(key=7, call=3)
ERRORS = (
    RelativeGaussian(scale=0.1),
    AbsoluteGaussian(scale=0.1),
    SystematicBias(scale=0.1),
    MantissaTruncation(mantissa_bits=3),
)


def values(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.kind)
def test_two_shares_get_the_noise_of_the_whole(error, dtype):
    # 7 rows of 300 columns: groups of 1,024 elements begin in the middle of a row.
    clean = values(7, 300, dtype=dtype)
    whole = apply_error_(clean.clone(), error, SOURCE)
    shares = [Shard(0, 100, 300), Shard(100, 200, 300)]
    parts = [apply_error_to_shards_(shard.of(clean).clone(), (shard,), error, SOURCE) for shard in shares]
    assert torch.equal(torch.cat(parts, -1), whole)
    assert not torch.equal(whole, clean)


def test_a_share_may_be_a_view_and_have_heads():
    """A projection of a merged module is a view of its columns; a norm of heads has rows of several heads."""
    clean = values(5, 64)
    error = RelativeGaussian(scale=0.1)
    whole = apply_error_(clean.clone(), error, SOURCE)
    merged = torch.cat([values(5, 3), clean[:, 32:]], -1)
    view = merged[:, 3:]
    assert apply_error_to_shards_(view, (Shard(32, 32, 64),), error, SOURCE) is view
    assert torch.equal(merged[:, 3:], whole[:, 32:])
    heads = clean[:, 32:].clone().view(5, 4, 8)
    apply_error_to_shards_(heads, (Shard(32, 32, 64),), error, SOURCE)
    assert torch.equal(heads.flatten(1), whole[:, 32:])


def test_a_merged_result_may_have_columns_of_several_projections_and_padding():
    """Queries of 8 columns and keys of 4: this worker has the second half of both, and 3 columns of padding."""
    clean, error = values(5, 12), RelativeGaussian(scale=0.1)
    whole = apply_error_(clean.clone(), error, SOURCE)
    padding = values(5, 3)
    own = torch.cat([clean[:, 4:8], clean[:, 10:], padding], -1)
    apply_error_to_shards_(own, (Shard(4, 4, 12), Shard(10, 2, 12)), error, SOURCE)
    assert torch.equal(own, torch.cat([whole[:, 4:8], whole[:, 10:], padding], -1))


def test_shares_of_the_same_columns_get_the_same_noise():
    clean, error, shard = values(4, 8), RelativeGaussian(scale=0.1), Shard(8, 8, 16)
    first, second = (apply_error_to_shards_(clean.clone(), (shard,), error, SOURCE) for _ in range(2))
    assert torch.equal(first, second)


def test_the_whole_is_put_together_from_the_shares_of_all_workers():
    whole = torch.arange(12.0).view(2, 6)
    left, right = Shard(0, 3, 6), Shard(3, 3, 6)
    assert torch.equal(left.whole(torch.cat([left.of(whole), right.of(whole)], -1)), whole)
    # Four workers, two of which hold each half.
    copies = [left.of(whole)] * 2 + [right.of(whole)] * 2
    assert torch.equal(right.whole(torch.cat(copies, -1)), whole)


def test_an_empty_batch_stays_empty():
    empty = torch.empty(0, 8)
    assert apply_error_to_shards_(empty, (Shard(8, 8, 16),), RelativeGaussian(scale=0.1), SOURCE).shape == (0, 8)
