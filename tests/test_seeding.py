from hypothesis import given
from hypothesis import strategies as st

from aqnpipe.seeding import derive_seed, keyed_generator

counters = st.lists(st.integers(-(2**40), 2**40), max_size=5)


@given(st.integers(0, 2**31), st.text(max_size=10), counters, counters)
def test_seeds_are_a_function_of_the_key_alone(seed, stream, first, second):
    assert derive_seed(seed, stream, *first) == derive_seed(seed, stream, *first)
    assert 0 <= derive_seed(seed, stream, *first) < 2**63
    if first != second:
        assert derive_seed(seed, stream, *first) != derive_seed(seed, stream, *second)


def test_streams_and_counters_do_not_collide():
    keys = {derive_seed(0, "a", 1, 2), derive_seed(0, "a", 12), derive_seed(0, "a1", 2), derive_seed(1, "a", 2)}
    assert len(keys) == 4


def test_generators_replay():
    import torch

    draws = [torch.randn(4, generator=keyed_generator("cpu", 0, "x", 1)) for _ in range(2)]
    assert torch.equal(*draws)
