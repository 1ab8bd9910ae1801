"""Looks of a study that adds seeds, as the page shows them."""

from types import SimpleNamespace

from aqnpipe.report.claims import look_table, seeds_per_arm
from aqnpipe.report.summary import _look_lines
from aqnpipe.report.words import load_words


def look(number, seeds, **states):
    claims = [SimpleNamespace(comparison_id=name, state=state) for name, state in states.items()]
    return SimpleNamespace(look=number, seeds=seeds, claims=claims)


CLAIMS = SimpleNamespace(
    claims=[SimpleNamespace(comparison_id=name, claim=f"claim {name}", claim_zh=None) for name in "ab"],
    looks=(look(1, 2, a="open", b="open"), look(2, 4, a="supported", b="open"), look(3, 6, a="supported", b="futile")),
)


def test_a_claim_is_named_at_the_look_where_it_ended():
    table = look_table(CLAIMS, load_words("en"))
    assert [row.cells for row in table.rows] == [
        ("1", "2", "none", "2"),
        ("2", "4", "claim a (supported)", "1"),
        ("3", "6", "claim b (stopped, unlikely to be decided)", "0"),
    ]


def test_the_summary_has_the_same_looks_as_the_page():
    lines = _look_lines(SimpleNamespace(claims=CLAIMS), load_words("en"))
    assert lines[2:4] == ["| interim analysis | seeds | ended | open |", "| --- | --- | --- | --- |"]
    assert lines[4:7] == [
        "| 1 | 2 | none | 2 |",
        "| 2 | 4 | claim a (supported) | 1 |",
        "| 3 | 6 | claim b (stopped, unlikely to be decided) | 0 |",
    ]


def test_a_study_with_fixed_seeds_has_no_such_table():
    assert look_table(SimpleNamespace(claims=(), looks=()), load_words("zh")) is None


def test_seeds_per_arm_are_a_range_where_arms_ended_at_different_looks():
    seeds = {"a": (0, 1), "b": (0, 1, 2, 3), "c": (0, 1)}
    study = SimpleNamespace(arms=dict.fromkeys(seeds), seeds_of=seeds.__getitem__)
    assert seeds_per_arm(study, load_words("en")) == "2 to 4"
    study.arms = {"a": None, "c": None}
    assert seeds_per_arm(study, load_words("en")) == "2"
