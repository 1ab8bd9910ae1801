"""The committed looks of `config/decide.yaml` follow from the committed answers."""

from pathlib import Path

import polars as pl
import pytest
from judged_answers import ANSWERS, differences, judged, looks_of

from aqnpipe.config.study import load_study_file

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "decide"


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
