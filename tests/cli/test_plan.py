import json
import shutil
from pathlib import Path

import pytest
import synthetic_evaluations
import yaml
from typed import typed

from aqnpipe.errors import ConfigError, DataError

CONFIG = Path(__file__).parents[2] / "config"


def planned(*arguments):
    return typed("plan", *arguments)


def test_without_results_usual_variances_are_named_as_such():
    found = json.loads(planned(CONFIG / "tiny-full.yaml", "--json", "--points", "5").stdout)
    assert (found["num_arms"], found["num_seeds"], found["num_questions"]) == (31, 5, 500)
    assert {level["variances_from"] for level in found["levels"]} == {"usual values"}
    for level in found["levels"]:
        assert 0 < level["detectable_alone"] < level["detectable_in_family"]
    assert found["device_hours"] > 0


def test_the_table_has_a_line_per_noise_level():
    lines = planned(CONFIG / "tiny-full.yaml", "--points", "8").stdout.splitlines()
    assert lines[2].split()[:3] == ["noise", "alone", "group"]
    assert [line.split()[0] for line in lines[3:6]] == ["0%", "5%", "10%"]
    assert "cheapest for 8 points in the group" in lines[2]
    assert "cheapest for 8 points as the primary claim" in planned(CONFIG / "config.yaml", "--points", "8").stdout


def test_why_the_report_has_other_differences_is_said():
    said = planned(CONFIG / "tiny-full.yaml").stdout
    assert "The report's differ from these: they use the variance measured between a claim's arms" in said


def test_results_that_are_not_there_are_named(tmp_path):
    found = planned(CONFIG / "config.yaml", "--results", tmp_path / "gone").exception
    assert isinstance(found, DataError)
    assert str(found) == f"{tmp_path}/gone: no such folder, expected a finished study's results"


def test_a_pilot_gives_a_range_of_seeds(tmp_path):
    study = synthetic_evaluations.study(seeds=[0, 1, 2])
    synthetic_evaluations.write_evaluations(tmp_path, study)
    arguments = (CONFIG / "config.yaml", "--points", "8", "--results", tmp_path / "results")
    levels = json.loads(planned(*arguments, "--json").stdout)["levels"]
    known = [level for level in levels if level["seeds_range"] is not None]
    assert known
    for level in known:
        assert level["seed_sd_range"][0] <= level["seed_sd"] <= level["seed_sd_range"][1]
        low, high = level["seeds_range"]
        assert low <= level["cheapest"]["num_seeds"] <= (high or 65)
    assert "80 % intervals of what the results say" in planned(*arguments).stdout


def test_named_noises_are_planned_with_their_passes(tmp_path):
    """Levels 0, 10 % (2 draws) and a bias, which is not random: 1 + 2 + 1 passes of the evaluations, not 3."""
    study = yaml.safe_load((CONFIG / "smoke.yaml").read_text())
    study["arms_file"] = str(CONFIG / "arms.yaml")
    study["dataset"]["num_test"] = 100
    study["evaluation"] |= {"noise_levels": [0.0, 0.1], "noise_seeds": [0, 1]}
    found = []
    for noises in (
        {},
        {"shifted": {"operator_noise": {"operators": "matmul", "error": {"kind": "systematic_bias", "scale": 0.01}}}},
    ):
        study["evaluation"]["noises"] = noises
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump(study))
        result = planned(path, "--json")
        assert result.exit_code == 0, result.exception
        found.append(json.loads(result.stdout))
    assert [level["noise_name"] for level in found[1]["levels"]] == [None, None, "shifted"]
    assert found[1]["levels"][2]["variances_from"] == "usual values"
    assert found[1]["device_hours"] > found[0]["device_hours"]
    assert "shifted" in planned(path).stdout


def test_draws_make_no_difference_where_nothing_is_drawn(tmp_path):
    study = yaml.safe_load((CONFIG / "smoke.yaml").read_text())
    study |= {"arms_file": str(CONFIG / "arms.yaml"), "seeds": [0, 1, 2]}
    limits = []
    for draws in ([0], [0, 1, 2, 3]):
        study["evaluation"]["noise_seeds"] = draws
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump(study))
        levels = json.loads(planned(path, "--json").stdout)["levels"]
        limits.append({level["noise_level"]: level["detectable_alone"] for level in levels})
    assert limits[0][0.0] == limits[1][0.0]
    assert limits[0][0.1] > limits[1][0.1]


def test_a_study_of_given_checkpoints_is_refused():
    error = planned(CONFIG / "checkpoints.yaml").exception
    assert isinstance(error, ConfigError)
    assert "found checkpoints, expected training" in str(error)


def test_a_folder_without_results_is_refused(tmp_path):
    result = planned(CONFIG / "tiny-full.yaml", "--results", tmp_path)
    assert isinstance(result.exception, DataError)
    assert "found no two arms with two common seeds" in str(result.exception)


@pytest.mark.parametrize("points", ["0", "-1", "1000"])
def test_a_difference_that_makes_no_sense_is_refused(points):
    assert planned(CONFIG / "tiny-full.yaml", "--points", points).exit_code == 2


def test_a_study_that_adds_seeds_is_planned_with_its_maximum():
    result = planned(CONFIG / "decide.yaml", "--json")
    found = json.loads(result.stdout)
    assert (found["adds_seeds"], found["num_seeds"]) == (True, 10)
    assert "adds seeds up to 10" in planned(CONFIG / "decide.yaml").stdout


def test_results_give_variances_on_the_seeds_that_two_arms_share(tmp_path):
    """E5 has three seeds and baseline the first two of them, as where another claim about E5 stayed open."""
    claims = [synthetic_evaluations.arms("E5", "baseline")]
    study = synthetic_evaluations.study(seeds=[0, 1, 2], arms=["baseline", "E5"], comparisons=claims)
    synthetic_evaluations.write_evaluations(tmp_path, study)
    results = tmp_path / "results"
    shutil.rmtree(results / "eval" / "base" / "baseline" / "seed2")
    found = json.loads(planned(CONFIG / "tiny-full.yaml", "--json", "--results", results).stdout)
    # Two arms of two common seeds have one degree of freedom, which says nothing about seeds.
    assert {level["variances_from"] for level in found["levels"]} == {"results, usual seeds"}
    assert {level["seeds_range"] for level in found["levels"]} == {None}
    shutil.rmtree(results / "eval" / "base" / "E5" / "seed0")
    assert isinstance(planned(CONFIG / "tiny-full.yaml", "--results", results).exception, DataError)
