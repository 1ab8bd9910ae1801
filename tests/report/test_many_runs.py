"""The page of thousands of runs: what it leaves out, and that it says so. A made-up study gets lower limits."""

import re
from types import SimpleNamespace

import pytest

from aqnpipe.artifacts.comparisons import ClaimsFile
from aqnpipe.artifacts.files import read_json
from aqnpipe.report import charts, claims, receipts, summary, tables
from aqnpipe.report.claims import ClaimGroup, ClaimRow, shown_groups
from aqnpipe.report.tables import Row, Table
from aqnpipe.report.words import load_words


@pytest.fixture(scope="module")
def cut(built, tmp_path_factory):
    """The page with at most two arms in pictures and in the text of the study, and three arms on its first screen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "MAX_ARMS_IN_PICTURES", 2)
        patch.setattr(receipts, "MAX_ARMS_IN_STUDY", 2)
        patch.setattr(tables, "MAX_ROWS_ON_PAGE", 3)
        return built.build(into=tmp_path_factory.mktemp("cut")).html


def test_pictures_show_the_first_arms_and_say_so(cut):
    """The model before training and the baseline of five; costs have no model before training, and show two of four."""
    assert cut.count("The pictures show the first 2 of 5 arms") == 3
    assert cut.count("The pictures show the first 2 of 4 arms") == 1
    legends = re.findall(r'<ul class="legend">(.*?)</ul>', cut.split('id="diagnosis"')[0])
    assert {name for legend in legends for name in re.findall(r'<li data-s="([^"]+)">', legend)} == {
        "pretrained",
        "baseline",
    }


def test_the_arms_of_the_first_screen_and_of_the_study_are_cut_with_a_note(cut):
    rows = cut.split('data-table="arms"')[1].split("</table>")[0].count("<tr") - 1
    assert rows == 3
    assert "Shown: 3 of 5 rows." in cut
    assert "With the first 2 of 4 arms; the rest is in the study&#39;s file of arms." in cut


def test_nothing_is_left_out_of_a_usual_study(built):
    assert "The pictures show the first" not in built.html
    assert "With the first" not in built.html
    assert "more claims are in" not in built.html


def test_the_summary_is_cut_with_a_note(built, tmp_path, monkeypatch):
    """Decided claims first; of five arms the first two: the model before training and the baseline."""
    monkeypatch.setattr(summary, "MAX_ROWS", 2)
    text = (built.build(into=tmp_path).folder / "summary.md").read_text(encoding="utf-8")
    claims, arms = re.split(r"\n\n4 more claims are in comparisons.csv and claims.json: [^\n]*\d not shown\.\n", text)
    assert sum(line.startswith("| ") for line in claims.splitlines()) == 2 + 2
    assert [line.split(" | ")[0] for line in arms.splitlines() if line.startswith("| ")][2:] == [
        "| pretrained",
        "| baseline",
    ]
    assert "Shown: 2 of 5 rows." in arms
    assert "more claims" not in (built.folder / "summary.md").read_text(encoding="utf-8")


def group(heading: str, **claims: tuple[str, str]) -> ClaimGroup:
    """Return a group of claims, each as its role and its verdict."""
    rows = tuple(
        ClaimRow(name, name, False, verdict, "", "", "", None, None, heading, role, "")
        for name, (role, verdict) in claims.items()
    )
    return ClaimGroup(heading, "", rows)


SUPPORTED, INVALID, OPEN = ("", "supported"), ("", "invalid"), ("", "not_shown")


@pytest.mark.parametrize(
    ("most", "shown"),
    [(1, "p"), (2, "a1 p"), (3, "a1 p b1"), (4, "a1 a2 p b1"), (5, "a1 a2 a3 p b1"), (6, "a1 a2 a3 p b1 b2")],
)
def test_claims_of_all_families_are_shown_in_their_order(most, shown):
    """The primary claim, open as it is, then the decided ones of both families, the invalid one, the open ones."""
    first = group("a", a1=SUPPORTED, a2=INVALID, a3=OPEN)
    second = group("b", p=("primary", "not_shown"), b1=SUPPORTED, b2=OPEN)
    found = shown_groups((first, second), most)
    assert " ".join(row.comparison_id for one in found for row in one.rows) == shown
    assert sum(len(one.left_out) for one in found) == 6 - most
    if most == 6:
        assert found == (first, second)


def test_a_refuted_claim_is_shown_before_those_that_came_out_as_expected_and_the_others_are_counted():
    (found,) = shown_groups([group("a", a1=SUPPORTED, a2=SUPPORTED, a3=("", "refuted"), a4=OPEN)], 1)
    assert [row.comparison_id for row in found.rows] == ["a3"]
    sentence = claims.left_out_claims(found.left_out, load_words("en"))
    assert sentence == "3 more claims are in comparisons.csv and claims.json: 2 supported, 1 not shown."
    assert claims.left_out_claims((), load_words("en")) == ""


def test_a_look_names_the_first_claims_that_ended_and_counts_the_others(monkeypatch):
    monkeypatch.setattr(claims, "MAX_CLAIMS_PER_LOOK", 2)
    states = ["supported", "refuted", "supported", "futile", "supported", "open"]
    ended = [SimpleNamespace(comparison_id=f"c{number}", state=state) for number, state in enumerate(states)]
    look = SimpleNamespace(look=1, seeds=2, claims=ended)
    table = claims.look_table(SimpleNamespace(claims=[], looks=[look]), load_words("en"))
    ended = table.rows[0].cells[2]
    assert ended.startswith("c0 (supported)")
    assert "c1 (refuted)" in ended
    assert "c2" not in ended
    assert "and 3 more: 2 supported, 1 " in ended


def test_a_claim_of_many_seeds_shows_the_first_ones(built, monkeypatch):
    file = read_json(built.folder / "claims.json", ClaimsFile)
    num_rows = sum(len(claim.seeds) for claim in file.claims)
    monkeypatch.setattr(claims, "MAX_SEEDS_ON_PAGE", num_rows)
    assert claims._seeds_per_claim(file) == tables.MAX_ROWS_ON_PAGE
    monkeypatch.setattr(claims, "MAX_SEEDS_ON_PAGE", 1)
    assert claims._seeds_per_claim(file) == 5
    table = Table("paired", "", ("seed",), tuple(Row((str(number),)) for number in range(8)), max_rows=5)
    assert (len(table.shown), table.num_left_out) == (5, 3)


def test_problems_among_the_rows_that_are_left_out_are_shown_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(tables, "MAX_ROWS_ON_PAGE", 2)
    table = Table("runs", "", ("run",), tuple(Row((str(number),), alert=number > 4) for number in range(9)), max_rows=3)
    assert [row.cells[0] for row in table.shown] == ["0", "1", "2", "5", "6"]
    assert table.num_left_out == 4


def test_runs_that_the_page_does_not_show_have_no_link(monkeypatch):
    monkeypatch.setattr(tables, "MAX_ROWS_ON_PAGE", 2)
    run_link = receipts.run_links([SimpleNamespace(model="m", arm="a", seed=seed) for seed in range(3)])
    assert [run_link("m", "a", seed) for seed in range(3)] == ["run-1", "run-2", ""]


def test_a_picture_of_many_runs_has_values_at_the_means_alone():
    assert not charts.is_crowded(40, 1000)
    assert charts.is_crowded(41, 50)
    assert charts.is_crowded(20, 1001)
