"""Every sabotage is caught by the product; the same jobs without it are green, and give back what they took."""

import contextlib
import gc
from collections import Counter

import psutil
import pytest
import torch
from attack_list import ACCEPTED, ONLY_IN_THE_TABLE, SABOTAGES, TEN_WAYS
from micro_study import MicroStudy, finished_study
from sabotage import attempt, untouched

TRIED = [sabotage for sabotage in SABOTAGES if sabotage.name not in ONLY_IN_THE_TABLE]
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
def finished(made_once):
    """The study, run once from nothing."""
    torch.set_num_threads(1)
    return MicroStudy(made_once("attacked study", finished_study))


def test_names_are_unique_and_the_ten_ways_are_among_them():
    assert len({sabotage.name for sabotage in SABOTAGES}) == len(SABOTAGES)
    assert {sabotage.facts for sabotage in SABOTAGES} - {None} == set(TEN_WAYS)


def test_the_untouched_study_is_green(finished):
    assert finished.invalid() == []


@pytest.mark.slow
@pytest.mark.parametrize("jobs", sorted({sabotage.jobs for sabotage in TRIED}), ids=str)
def test_the_same_jobs_without_sabotage_are_green(finished, tmp_path, jobs):
    outcome = untouched(finished.copied(tmp_path / "study"), jobs)
    assert not outcome.is_caught, outcome


@pytest.mark.parametrize(
    "sabotage",
    [pytest.param(sabotage, id=sabotage.name, marks=[] if sabotage.facts else pytest.mark.slow) for sabotage in TRIED],
)
def test_sabotage_is_caught(finished, tmp_path, sabotage):
    outcome = attempt(finished.copied(tmp_path / "study"), sabotage)
    assert outcome.is_caught == (sabotage.name not in ACCEPTED), outcome


def held():
    """How many of each open file, connection, thread and child this process has."""
    gc.collect()
    process = psutil.Process()
    counts = Counter(descriptors=process.num_fds(), threads=process.num_threads())
    counts.update(f"file {file.path}" for file in process.open_files())
    counts.update(f"connection {socket.laddr} {socket.status}" for socket in process.net_connections())
    counts.update(f"child {child.pid}" for child in process.children(recursive=True))
    return counts


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_leaves_nothing_open(finished, tmp_path, stage):
    """Libraries open some things once and keep them, and end threads that idle: so the second run adds nothing."""
    first, second = (finished.copied(tmp_path / name) for name in ("first", "second"))
    name, *arguments = STAGES[stage]
    with contextlib.chdir(first.folder):
        getattr(first, name)(*arguments)
    before = held()
    with contextlib.chdir(second.folder):
        getattr(second, name)(*arguments)
    assert not held() - before
