"""The rows of the sabotages and the summary of them, and that the committed page and table agree."""

import csv
import re
from collections import Counter

import pytest
from attack_list import SABOTAGES
from sabotage import Outcome
from table import BEGIN, END, ROOT, row_of, summary_of, write_rows, write_summary

FIRST, SECOND = SABOTAGES[:2]
REPEAT = next(sabotage for sabotage in SABOTAGES if sabotage.facts == 10)
CAUGHT = Outcome("train: ReceiptError", 'receipt invalid, "E5"')
SILENT = Outcome(None, "nothing was said", changed=True)


def rows_of(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def table_in(text, heading):
    """Rows of the table below a line of headings, as tuples of cells."""
    lines = text.partition(f"{heading}\n|")[2].splitlines()[1:]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines[: lines.index("")]]


def test_a_row_says_what_caught_a_sabotage_or_why_nothing_did():
    assert row_of(FIRST, CAUGHT) == {
        "group": "noise and trainer",
        "name": "noise not installed",
        "what": "the function that adds it does nothing",
        "fault": "2",
        "caught_by": "train: ReceiptError",
        "words": 'receipt invalid, "E5"',
    }
    missed = row_of(FIRST, SILENT)
    assert (missed["caught_by"], missed["words"]) == ("", "nothing was said")
    other = row_of(FIRST, Outcome("train: OSError", "disk full", names_cause=False))
    assert (other["caught_by"], other["words"]) == ("", "stopped for another reason, by train: OSError: disk full")


def test_rows_are_read_back_as_they_were_written(tmp_path):
    rows = [row_of(FIRST, CAUGHT), row_of(SECOND, Outcome("train: ReceiptError", "a | b, c\nd"))]
    write_rows(tmp_path / "attacks.csv", rows)
    assert rows_of(tmp_path / "attacks.csv") == rows


def test_the_summary_counts_groups_and_faults_and_names_what_was_not_caught(tmp_path):
    rows = [row_of(FIRST, CAUGHT), row_of(SECOND, SILENT), row_of(REPEAT, CAUGHT)]
    text = summary_of(rows) + "\n"
    assert text.startswith(f"2 of 3 sabotages were caught. {len(SABOTAGES) - 3} more have not been tried yet")
    groups = {group: (tried, caught) for group, tried, caught in table_in(text, "| group | sabotages | caught |")}
    expected = Counter(sabotage.group for sabotage in (FIRST, SECOND, REPEAT))
    assert {group: int(tried) for group, (tried, _) in groups.items()} == expected
    assert sum(int(caught) for _, caught in groups.values()) == 2
    assert "- noise and trainer: noise at half the scale (half of the requested scale is added): nothing" in text
    assert "| 10 | a patch was left behind | 1 | 1 |" in text
    assert "| 4 | a step counter was not advanced | 0 | 0 |" in text
    page = tmp_path / "page.md"
    page.write_text(f"# Before\n{BEGIN}\nold\n{END}\nafter\n")
    write_summary(page, rows)
    assert page.read_text() == f"# Before\n{BEGIN}\n{text}{END}\nafter\n"


def test_nothing_is_listed_as_not_caught_if_all_are_caught():
    assert "### Not caught" not in summary_of([row_of(FIRST, CAUGHT)])


@pytest.fixture(scope="module")
def page():
    return (ROOT / "docs" / "attacks.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def committed():
    return rows_of(ROOT / "docs" / "attacks.csv")


def test_the_committed_page_counts_the_committed_rows(page, committed):
    assert len({row["name"] for row in committed}) == len(committed) > 400
    caught = [row for row in committed if row["caught_by"]]
    assert f"\n{len(caught)} of {len(committed)} sabotages were caught." in page
    tried = Counter(row["group"] for row in committed)
    of_caught = Counter(row["group"] for row in caught)
    expected = {(group, str(tried[group]), str(of_caught[group])) for group in tried}
    assert set(table_in(page, "| group | sabotages | caught |")) == expected


def test_the_committed_page_names_every_sabotage_that_was_not_caught(page, committed):
    listed = re.findall(r"^- (.+)$", page.partition("### Not caught")[2].partition("###")[0], re.MULTILINE)
    missed = [row for row in committed if not row["caught_by"]]
    assert len(listed) == len(missed)
    for line, row in zip(listed, missed, strict=True):
        assert line == f"{row['group']}: {row['name']} ({row['what']}): {row['words']}"
