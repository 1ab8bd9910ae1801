import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aqnpipe.cli.main import app
from aqnpipe.errors import DataError

CONFIG = Path(__file__).parents[2] / "config"


def planned(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_without_results_usual_variances_are_named_as_such():
    found = json.loads(planned(CONFIG / "tiny-full.yaml", "--json", "--points", "5").stdout)
    assert (found["num_arms"], found["num_seeds"], found["num_questions"]) == (34, 5, 500)
    assert {level["variances_from"] for level in found["levels"]} == {"usual values"}
    for level in found["levels"]:
        assert 0 < level["detectable_alone"] < level["detectable_in_family"]
    assert found["device_hours"] > 0


def test_the_table_has_a_line_per_noise_level():
    lines = planned(CONFIG / "tiny-full.yaml", "--points", "8").stdout.splitlines()
    assert lines[2].split()[:3] == ["noise", "alone", "family"]
    assert [line.split()[0] for line in lines[3:6]] == ["0%", "5%", "10%"]
    assert "cheapest for 8 points" in lines[2]


def test_a_folder_without_results_is_refused(tmp_path):
    result = planned(CONFIG / "tiny-full.yaml", "--results", tmp_path)
    assert isinstance(result.exception, DataError)
    assert "found no two arms with two common seeds" in str(result.exception)


@pytest.mark.parametrize("points", ["0", "-1", "1000"])
def test_a_difference_that_makes_no_sense_is_refused(points):
    assert planned(CONFIG / "tiny-full.yaml", "--points", points).exit_code == 2
