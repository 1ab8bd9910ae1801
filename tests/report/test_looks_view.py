"""Looks of a study that adds seeds, as the page shows them."""

import re
from types import SimpleNamespace

from aqnpipe.artifacts.comparisons import ClaimAtLook
from aqnpipe.report.claims import look_table, seeds_per_arm
from aqnpipe.report.markup import page_template
from aqnpipe.report.stage import look_figure
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
    words = load_words("en")
    looks = look_table(CLAIMS, words)
    overview, config = SimpleNamespace(rows=(), limits=()), SimpleNamespace(report=SimpleNamespace(), study="s")
    config.report.title = config.report.question = "?"
    given = {"w": words, "looks": looks, "overview": overview, "study": SimpleNamespace(config=config)}
    empty = dict.fromkeys(("answer", "accuracy", "missing")) | dict.fromkeys(
        ("rows", "scales", "codes", "versions"), ()
    )
    page = page_template("summary.md.jinja")
    lines = page.render(**given, **empty, data=SimpleNamespace(missing=()), claims="", left_out="").splitlines()
    start = lines.index(looks.caption)
    assert lines[start + 2 : start + 7] == [
        "| interim analysis | seeds | ended | open |",
        "| --- | --- | --- | --- |",
        "| 1 | 2 | none | 2 |",
        "| 2 | 4 | claim a (supported) | 1 |",
        "| 3 | 6 | claim b (stopped, unlikely to be decided) | 0 |",
    ]


def at(name, look, state="open", **values):
    return ClaimAtLook(comparison_id=name, state=state, look=look, seeds=2 * look, **values)


def test_every_look_at_a_claim_is_a_point_with_its_repeated_interval():
    """Claim a ends at look 2, whose values look 3 repeats; claim b could not be tested at look 1."""
    first = at("a", 1, difference=0.05, ci_low=-0.1, ci_high=0.2)
    ended = at("a", 2, "supported", difference=0.04, ci_low=0.01, ci_high=0.07)
    late = [at("b", look, difference=-0.01, ci_low=-0.03, ci_high=0.01) for look in (2, 3)]
    of_looks = ((first, at("b", 1)), (ended, late[0]), (ended, late[1]))
    looks = [SimpleNamespace(look=n, seeds=2 * n, claims=claims) for n, claims in enumerate(of_looks, start=1)]
    figure = look_figure(SimpleNamespace(claims=CLAIMS.claims, looks=looks), load_words("en"))
    assert [panel.title for panel in figure.groups[0].panels] == ["claim a", "claim b"]
    titles = [re.findall("<title>(.*?)</title>", panel.svg) for panel in figure.groups[0].panels]
    assert titles == [
        ["2 seeds: +5.0 points (−10.0 to +20.0)", "4 seeds: +4.0 points (+1.0 to +7.0)"],
        ["4 seeds: −1.0 points (−3.0 to +1.0)", "6 seeds: −1.0 points (−3.0 to +1.0)"],
    ]
    assert "(2 of 2 claims)" in figure.caption
    assert figure.tables == (look_table(SimpleNamespace(claims=CLAIMS.claims, looks=looks), load_words("en")),)


def test_points_and_intervals_are_drawn_in_points_over_seeds():
    looks = [SimpleNamespace(look=1, seeds=2, claims=[at("a", 1, difference=0.05, ci_low=-0.1, ci_high=0.2)])]
    figure = look_figure(SimpleNamespace(claims=CLAIMS.claims, looks=looks), load_words("zh"))
    (panel,) = figure.groups[0].panels
    (row,) = next(rows for rows in panel.chart.to_dict()["datasets"].values() if "seeds" in rows[0])
    assert {name: row[name] for name in ("seeds", "difference", "ci_low", "ci_high")} == {
        "seeds": 2,
        "difference": 5.0,
        "ci_low": -10.0,
        "ci_high": 20.0,
    }


def test_a_study_with_fixed_seeds_has_no_such_table():
    assert look_figure(SimpleNamespace(claims=(), looks=()), load_words("en")) is None
    assert look_table(SimpleNamespace(claims=(), looks=()), load_words("zh")) is None


def test_seeds_per_arm_are_a_range_where_arms_ended_at_different_looks():
    seeds = {"a": (0, 1), "b": (0, 1, 2, 3), "c": (0, 1)}
    study = SimpleNamespace(arms=dict.fromkeys(seeds), seeds_of=seeds.__getitem__)
    assert seeds_per_arm(study, load_words("en")) == "2 to 4"
    study.arms = {"a": None, "c": None}
    assert seeds_per_arm(study, load_words("en")) == "2"
