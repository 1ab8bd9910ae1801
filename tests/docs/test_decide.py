"""The page on `config/decide.yaml` says what the committed looks say, and they follow from the committed answers."""

import re
from pathlib import Path

import polars as pl
import pytest
from judged_answers import ANSWERS, differences, judged, looks_of

from aqnpipe.config.study import load_study_file

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "decide"
VERDICTS = {
    "supported": "supported",
    "equivalent": "equivalent within 1.5",
    "open": "not shown",
    "futile": "not shown: unlikely by 10 seeds",
}


@pytest.fixture(scope="module")
def looks():
    return looks_of(FOLDER)


def test_every_number_of_every_look_follows_from_the_answers(looks):
    study = load_study_file(ROOT / "config" / "decide.yaml")
    again = judged(study, looks, pl.read_parquet(FOLDER / ANSWERS))
    assert len(again) == len(looks) > 0
    for look, claims in zip(looks, again, strict=True):
        for recorded, found in zip(look.claims, claims, strict=True):
            assert differences(recorded, found) == []


def test_the_table_of_the_page_has_the_numbers_of_the_last_look(looks):
    table = re.search(r"(?m)^\| question.*\n\|[-|]+\n((?:\|.*\n)+)", (ROOT / "docs" / "decide.md").read_text())
    rows = [[cell.strip().replace("**", "") for cell in row.strip("|\n").split("|")] for row in table[1].splitlines()]
    assert [row[1:] for row in rows] == [cells(claim) for claim in looks[-1].claims]


def cells(claim):
    low, high = (f"{100 * end:+.1f}" for end in (claim.ci_low, claim.ci_high))
    p_value = f"{claim.p_holm:.2g}"
    if claim.state == "equivalent":
        p_value = f"{claim.p_other_holm:.2g} (equivalence)"
    return [f"{100 * claim.difference:+.1f}", f"{low} to {high}", p_value, VERDICTS[claim.state], str(claim.seeds)]
