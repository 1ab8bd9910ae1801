"""Every sabotage is caught by the product; the same jobs without it are green."""

import pytest
import torch
from attack_list import ACCEPTED, SABOTAGES, TEN_WAYS
from micro_study import finished_study
from sabotage import attempt, untouched


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The study, run once from nothing."""
    torch.set_num_threads(1)
    return finished_study(tmp_path_factory.mktemp("attacks") / "study")


def test_names_are_unique_and_the_ten_ways_are_among_them():
    assert len({one.name for one in SABOTAGES}) == len(SABOTAGES)
    assert {one.facts for one in SABOTAGES} - {None} == set(TEN_WAYS)


def test_the_untouched_study_is_green(finished):
    assert finished.invalid() == []


@pytest.mark.slow
@pytest.mark.parametrize("jobs", sorted({one.jobs for one in SABOTAGES}), ids=str)
def test_the_same_jobs_without_sabotage_are_green(finished, tmp_path, jobs):
    outcome = untouched(finished.copied(tmp_path / "study"), jobs)
    assert not outcome.is_caught, outcome


@pytest.mark.slow
@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda one: one.name)
def test_sabotage_is_caught(finished, tmp_path, sabotage):
    outcome = attempt(finished.copied(tmp_path / "study"), sabotage)
    assert outcome.is_caught == (sabotage.name not in ACCEPTED), outcome
