"""The audit's own keys and random numbers are those of the definition, and so are the kernels'."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aqnpipe.noise.kernels.gaussian import NoiseStream, standard_normal
from aqnpipe.proof.random_numbers import Draws, derived_key, normals
from aqnpipe.seeding import derive_seed

COUNTERS = st.integers(min_value=0, max_value=2**31)
KEYS = st.integers(min_value=0, max_value=2**63 - 1)


def draws(key, call, stream):
    return Draws(*(np.array(value, np.uint64) for value in (key, call, stream)))


@given(st.integers(-(2**63), 2**63 - 1), COUNTERS, COUNTERS, COUNTERS, COUNTERS, COUNTERS)
def test_two_derivations_give_the_same_key(seed, step, micro_step, rank, forward, place):
    fields = (step, micro_step, rank, forward, place)
    assert derived_key(seed, "rollout", *fields) == derive_seed(seed, "rollout", *fields)
    assert derived_key(seed, "aqn", step) == derive_seed(seed, "aqn", step)


def test_every_field_of_the_position_changes_the_key():
    """What the audit compares with must itself depend on everything that a key must depend on."""
    base = (1, "rollout", 2, 3, 4, 5, 6)
    others = [(*base[:field], "reference" if field == 1 else 9, *base[field + 1 :]) for field in range(len(base))]
    assert len({derived_key(*each) for each in (base, *others)}) == 1 + len(base)


def test_the_words_are_those_of_the_published_generator():
    """Philox4x32 with key and counter 0: the first words by the reference implementation with 7 rounds."""
    from aqnpipe.proof.random_numbers import _philox

    words = _philox(counter(0, 0, 0), np.uint64(0))
    assert [int(word[0]) for word in words] == philox_in_plain_integers([0, 0, 0, 0], [0, 0])
    words = _philox(counter(7, 3, 11), np.uint64(2**40 + 5))
    assert [int(word[0]) for word in words] == philox_in_plain_integers([7, 3, 11, 0], [5, 2**8])


def counter(*words):
    return tuple(np.array([word], np.uint64) for word in (*words, 0)[:4])


def philox_in_plain_integers(words, key):
    c, k = list(words), list(key)
    for _ in range(7):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(second >> 32) ^ c[1] ^ k[0], second % 2**32, (first >> 32) ^ c[3] ^ k[1], first % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


@settings(deadline=None, max_examples=25)
@given(KEYS, COUNTERS, st.integers(0, 40))
def test_the_kernel_draws_these_numbers_to_within_its_stated_error(key, call, stream):
    drawn = standard_normal(5000, NoiseStream(key, call, stream)).double().numpy()
    expected, error = normals(np.arange(5000), draws(key, call, stream))
    assert (np.abs(drawn - expected) <= error).all()
    assert np.median(error) < 2e-6


@pytest.mark.parametrize("dropped", [(0, 3, 1), (5, 0, 1), (5, 3, 0)])
def test_another_key_call_or_stream_gives_other_numbers(dropped):
    expected, error = normals(np.arange(1000), draws(5, 3, 1))
    other, _ = normals(np.arange(1000), draws(*dropped))
    assert (np.abs(other - expected) > error).mean() > 0.99


def test_numbers_are_independent_of_the_other_elements_asked_for():
    elements = torch.randperm(10_000, generator=torch.Generator().manual_seed(0)).numpy()[:500]
    assert np.array_equal(normals(elements, draws(9, 1, 0))[0], normals(np.arange(10_000), draws(9, 1, 0))[0][elements])
