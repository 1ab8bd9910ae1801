"""The committed looks of studies that add seeds follow from the committed answers."""

import shutil
from pathlib import Path

import polars as pl
import pytest
from judged_answers import ANSWERS, differences, judged, looks_of, next_look_of, table

from aqnpipe.config.study import load_study_file

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "decide"
STUDIES = ("decide", "fixed-machine", "two-models")


@pytest.fixture(scope="module")
def looks():
    return looks_of(FOLDER)


@pytest.mark.parametrize("name", STUDIES)
def test_every_number_of_every_look_follows_from_the_answers(name):
    study, looks = load_study_file(ROOT / "config" / f"{name}.yaml"), looks_of(ROOT / "docs" / name)
    again = judged(study, looks, pl.read_parquet(ROOT / "docs" / name / ANSWERS))
    assert len(again) == len(looks) > 0
    for look, claims in zip(looks, again, strict=True):
        for recorded, found in zip(look.claims, claims, strict=True):
            assert differences(recorded, found) == []


def test_the_next_look_is_taken_when_the_answers_of_all_its_runs_are_there(looks, tmp_path):
    study = load_study_file(ROOT / "config" / "decide.yaml")
    for name in (ANSWERS, "design.json"):
        shutil.copy(FOLDER / name, tmp_path)
    first = next_look_of(study, tmp_path)
    assert (first.look, first.seeds_per_arm, first.design) == (1, looks[0].seeds_per_arm, looks[0].design)
    for recorded, found in zip(looks[0].claims, first.claims, strict=True):
        assert differences(recorded, found) == []
    pl.read_parquet(FOLDER / ANSWERS).filter(pl.col("arm") != "E5a").write_parquet(tmp_path / ANSWERS)
    with pytest.raises(SystemExit, match="look 1 needs 2 more runs: E5a seed 0, E5a seed 1"):
        next_look_of(study, tmp_path)


@pytest.mark.parametrize("name", STUDIES)
def test_the_page_has_every_claim_at_the_last_look(name):
    page, looks = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8"), looks_of(ROOT / "docs" / name)
    lines = table(load_study_file(ROOT / "config" / f"{name}.yaml"), looks)
    assert len(lines) == len(looks[-1].claims) + 2
    assert [line for line in lines if line not in page.splitlines()] == []
