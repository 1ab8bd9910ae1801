"""Growth of the distance between sampler and policy over a run."""

import polars as pl
import pytest

from aqnpipe.training.sampler import growth_line, growth_of


def metrics(values, steps_per_rollout=1):
    repeated = [value for value in values for _ in range(steps_per_rollout)]
    return pl.DataFrame({"step": range(1, len(repeated) + 1), "logp_difference_mean": repeated})


def test_growth_by_hand():
    """Fifths of four rollouts: means 0.02 and 0.06, variances 4/3 and 4/3 times 1e-4, standard error sqrt(2/3) %."""
    first, last = [0.01, 0.03, 0.01, 0.03], [0.05, 0.07, 0.05, 0.07]
    growth = growth_of(metrics([*first, *[0.04] * 12, *last]), 1)
    assert growth is not None
    assert (growth.num_rollouts, growth.first_mean, growth.last_mean) == (20, pytest.approx(0.02), pytest.approx(0.06))
    assert growth.standard_error == pytest.approx(0.01 * (2 / 3) ** 0.5)
    assert growth.has_grown
    assert growth_line(growth).startswith("warning: the distance to the sampler has grown from 0.02 to 0.06 nats")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("by less than half", [0.1 + 0.0001 * (step % 2) + 0.001 * step for step in range(40)]),
        ("not beyond the spread", [0.01 if step % 2 else 0.3 for step in range(16)] + [0.05, 0.9, 0.4, 0.01]),
        ("falls", [0.1 / (1 + step) for step in range(30)]),
        ("rounding", [1e-7 * (1 + step) for step in range(30)]),
        ("constant", [0.1] * 20),
    ],
)
def test_other_courses_are_no_growth(name, values):
    growth = growth_of(metrics(values), 1)
    assert growth is not None
    assert not growth.has_grown, name


def test_too_few_rollouts_say_nothing():
    rising = [0.01 * (1 + step) for step in range(19)]
    assert growth_of(metrics(rising), 1) is None
    assert growth_of(metrics(rising, steps_per_rollout=2), 2) is None


def test_a_rollout_counts_once_however_many_steps_learn_from_it():
    values = [0.01 * (1 + step) for step in range(20)]
    assert growth_of(metrics(values, steps_per_rollout=3), 3) == growth_of(metrics(values), 1)
