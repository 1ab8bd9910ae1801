"""Passes in time: each step of a phase is compared with what the study requires of it."""

import pytest

from aqnpipe.config.noise import OperatorNoise, RelativeGaussian
from aqnpipe.noise.receipts.passes import pass_problems
from aqnpipe.noise.receipts.receipt import Receipt
from aqnpipe.noise.receipts.table import Row

F, DROPOUT = {"float32"}, {"float32", "float32 with dropout"}
STATED = {"modes": {"evaluation"}, "attention": {"eager"}, "algorithms": {"default"}}
REQUIRED = (
    *(
        Row("rollout", step, passes=read, sequences=8 * read, formats=F, **STATED)
        for step, read in enumerate((1, 0, 1, 0))
    ),
    *(
        Row("actor_forward", step, passes=read, sequences=8 * read, trained_sequences=4, formats=DROPOUT, **STATED)
        for step, read in enumerate((1, 0, 1, 0))
    ),
    *(Row("validation", step, passes=int(step == 4), formats=F, **STATED) for step in range(5)),
)
NOISE = OperatorNoise(error=RelativeGaussian(scale=0.05), phases=("rollout", "actor_forward", "backward"))


def rows_of_a_run():
    """Four steps of two batches, in micro-batches of two sequences; three parts have noise, two of them gradients."""
    rows = [Row("validation", 4, passes=9, sequences=2, noised_parts=0, formats={"float32"})]
    for step in range(4):
        if step % 2 == 0:
            rows.append(Row("rollout", step, passes=5, sequences=8, noised_parts=15, formats={"float32"}))
        scored = 8 if step % 2 == 0 else 0
        passes = 2 + scored // 2
        rows += [
            Row(
                "actor_forward",
                step,
                passes=passes,
                gradient_passes=2,
                sequences=scored,
                trained_sequences=4,
                noised_parts=3 * passes,
                formats={"float32 with dropout"},
            ),
            Row("backward", step, passes=2, noised_parts=4),
        ]
    return {(row.phase, row.step): row for row in rows}


def problems_of(rows, steps_done=4, num_workers=1):
    """Two layers and the output projection have noise, and gradients of the last two of them."""
    receipt = Receipt(
        operator_noise=NOISE,
        expected_phases=(),
        required=REQUIRED,
        rows=(*rows.values(), Row("actor_forward", gradients={1, 2})),
        num_layers=2,
        num_norms=5,
        num_steps=4,
        num_workers=num_workers,
    )
    return pass_problems(receipt, steps_done)


def test_a_run_that_did_what_its_study_requires_has_no_problems():
    assert problems_of(rows_of_a_run()) == []


def test_of_a_run_that_goes_on_only_the_steps_done_are_compared():
    rows = {place: row for place, row in rows_of_a_run().items() if place[1] < 2}
    assert problems_of(rows, steps_done=2) == []
    assert problems_of(rows, steps_done=3) == [
        "rollout: it was never seen, in step 2",
        "actor_forward: it was never seen, in step 2",
    ]


@pytest.mark.parametrize(
    ("place", "changes", "problem"),
    [
        (("rollout", 2), {"passes": 0}, "rollout: it was never seen, in step 2"),
        (
            ("rollout", 2),
            {"sequences": 0},
            "rollout: 0 sequences were read from their first token on, the study needs 8, in step 2",
        ),
        (
            ("rollout", 0),
            {"noised_parts": 14},
            "rollout: ran 5 times with noise in 14 layers altogether, expected 3 in each, in step 0",
        ),
        (
            ("rollout", 0),
            {"formats": {"float32", "float32 with a cache of bfloat16"}},
            "rollout: computed in float32 with a cache of bfloat16, the study asks for float32, in step 0",
        ),
        (
            ("rollout", 0),
            {"formats": {"float32 with dropout"}},
            "rollout: computed in float32 with dropout, the study asks for float32, in step 0",
        ),
        (
            ("rollout", 2),
            {"modes": {"evaluation", "training"}},
            "rollout: computed in training mode, the study asks for evaluation, in step 2",
        ),
        (
            ("actor_forward", 1),
            {"attention": {"sdpa"}},
            "actor_forward: computed in sdpa attention, the study asks for eager, in step 1",
        ),
        (
            ("actor_forward", 1),
            {"algorithms": {"deterministic"}},
            "actor_forward: computed in deterministic algorithms, the study asks for default, in step 1",
        ),
        (
            ("rollout", 2),
            {"largest_first_position": 12},
            "rollout: a first forward pass began at position 12: tokens were read before",
        ),
        (
            ("actor_forward", 1),
            {"trained_sequences": 8},
            "actor_forward: 8 sequences were trained on, the study needs 4, in step 1",
        ),
        (
            ("actor_forward", 3),
            {"gradient_passes": 3},
            "backward: ran 2 times, the actor 3 times, in step 3",
        ),
        (
            ("backward", 3),
            {"noised_parts": 2},
            "backward: ran 2 times with noise in 2 layers altogether, expected 2 in each, in step 3",
        ),
        (("validation", 4), {"passes": 0}, "validation: it was never seen, in step 4"),
    ],
)
def test_a_row_that_is_missing_or_different_is_a_problem(place, changes, problem):
    rows = rows_of_a_run()
    for name, value in changes.items():
        setattr(rows[place], name, value)
    assert problems_of(rows) == [problem]


def test_the_modes_and_kernels_that_a_study_states_are_no_problem():
    rows = rows_of_a_run()
    for row in rows.values():
        row.modes, row.attention, row.algorithms = {"evaluation"}, {"eager"}, {"default"}
    assert problems_of(rows) == []


def test_a_rollout_in_a_step_that_needs_none_is_a_problem():
    rows = rows_of_a_run()
    rows["rollout", 1] = Row("rollout", 1, passes=5, sequences=8, noised_parts=15, formats={"float32"})
    assert problems_of(rows) == [
        "rollout: 8 sequences were read from their first token on, the study needs 0, in step 1"
    ]


def test_steps_with_the_same_problem_are_one_line():
    rows = rows_of_a_run()
    for step in range(4):
        rows["backward", step].noised_parts = 0
    (problem,) = problems_of(rows)
    assert problem.endswith(", in step 0, 1, 2, 3")


def test_what_an_engine_does_not_count_is_not_compared_but_its_passes_are():
    rows = rows_of_a_run()
    for step in (0, 2):
        rows["rollout", step] = Row("rollout", step, passes=7)
    assert problems_of(rows) == []
    rows["rollout", 2].passes = 0
    assert problems_of(rows) == ["rollout: it was never seen, in step 2"]


def test_rows_of_two_workers_need_twice_the_sequences():
    rows = rows_of_a_run()
    for row in rows.values():
        for name in ("passes", "gradient_passes", "sequences", "trained_sequences", "noised_parts"):
            setattr(row, name, 2 * (getattr(row, name) or 0))
    assert problems_of(rows, num_workers=2) == []
    rows["rollout", 0].sequences = 8
    assert problems_of(rows, num_workers=2) == [
        "rollout: 8 sequences were read from their first token on, the study needs 16, in step 0"
    ]
