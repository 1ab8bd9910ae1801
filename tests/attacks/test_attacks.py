"""Every sabotage is caught by the product; the same jobs without it are green, and give back what they took."""

import contextlib
import gc

import psutil
import pytest
import torch
from attack_list import ACCEPTED, ONLY_IN_THE_TABLE, SABOTAGES, TEN_WAYS
from micro_study import finished_study
from sabotage import attempt, untouched

TRIED = [one for one in SABOTAGES if one.name not in ONLY_IN_THE_TABLE]
STAGES = {
    "prepare": ("prepare",),
    "diagnose": ("diagnose", "target"),
    "sigmas": ("sigmas", "target"),
    "train": ("train", "guided", 0),
    "evaluate": ("evaluate", "guided", 0),
    "compare": ("compare",),
    "report": ("report",),
}


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
@pytest.mark.parametrize("jobs", sorted({one.jobs for one in TRIED}), ids=str)
def test_the_same_jobs_without_sabotage_are_green(finished, tmp_path, jobs):
    outcome = untouched(finished.copied(tmp_path / "study"), jobs)
    assert not outcome.is_caught, outcome


@pytest.mark.slow
@pytest.mark.parametrize("sabotage", TRIED, ids=lambda one: one.name)
def test_sabotage_is_caught(finished, tmp_path, sabotage):
    outcome = attempt(finished.copied(tmp_path / "study"), sabotage)
    assert outcome.is_caught == (sabotage.name not in ACCEPTED), outcome


def held():
    """Open files by name (pipes and sockets by kind), threads and children of this process."""
    gc.collect()
    process = psutil.Process()
    return {
        "descriptors": process.num_fds(),
        "files": sorted(file.path for file in process.open_files()),
        "connections": sorted((str(one.laddr), one.status) for one in process.net_connections()),
        "threads": process.num_threads(),
        "children": sorted(child.pid for child in process.children(recursive=True)),
    }


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_leaves_nothing_open(finished, tmp_path, stage):
    """What libraries open once and keep (thread pools, caches) is there: each stage has run before."""
    study = finished.copied(tmp_path / "study")
    name, *arguments = STAGES[stage]
    with contextlib.chdir(study.folder):
        before = held()
        getattr(study, name)(*arguments)
        assert held() == before
