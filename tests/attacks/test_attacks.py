"""Every sabotage is caught by the product; the same jobs without it are green, and give back what they took."""

import contextlib
import dataclasses
import gc
from collections import Counter

import psutil
import pytest
import torch
from attack_list import ONLY_IN_THE_TABLE, SABOTAGES, TEN_WAYS
from micro_study import MicroStudy, finished_study
from sabotage import AFTER_TRAINING, TRAIN, Sabotage, attempt, untouched
from study_variants import VARIANTS

TRIED = [sabotage for sabotage in SABOTAGES if sabotage.name not in ONLY_IN_THE_TABLE]
NEEDED = {
    "keys": 25,
    "distributions": 25,
    "place": 35,
    "AQN": 20,
    "faults": 6,
    "trainer": 45,
    "evaluation": 30,
    "adapters": 8,
    "files and records": 30,
}
STUDYS_OWN = {"prepare", "diagnose", "sigmas", "train", "evaluate", "compare", "report"}
"""Jobs that a study runs when it is made; if one of them refused, there would be no study."""

REPEATED = ("attacked", (("sigmas", "target"), *TRAIN, *AFTER_TRAINING))
"""The longest of these jobs, done again on a finished study."""

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
def finished_as(made_once):
    """Function (variant) -> that study, run once from nothing."""
    torch.set_num_threads(1)

    def finished(variant):
        folder = made_once(f"{variant} study", lambda folder: finished_study(folder, variant) and None)
        return MicroStudy(folder, variant)

    return finished


@pytest.fixture(scope="session")
def finished(finished_as):
    """The attacked study."""
    return finished_as("attacked")


def test_names_are_unique_and_the_ten_ways_are_among_them():
    assert len({sabotage.name for sabotage in SABOTAGES}) == len(SABOTAGES)
    assert {sabotage.facts for sabotage in TRIED if sabotage.facts} == set(TEN_WAYS)


def test_there_are_enough_sabotages_of_each_group_and_each_names_its_cause():
    groups = Counter(sabotage.group.split(":")[0] for sabotage in SABOTAGES)
    assert sum(groups.values()) >= 200
    assert not {group: needed for group, needed in NEEDED.items() if groups[group] < needed}
    assert [sabotage.name for sabotage in SABOTAGES if not sabotage.cause] == []


@pytest.mark.slow
def test_a_sabotage_that_does_not_run_or_is_stopped_for_another_reason_is_not_caught(finished, tmp_path):
    idle = Sabotage("idle", "nothing", lambda _: contextlib.nullcontext(), (), (("report",),))
    outcome = attempt(finished.copied(tmp_path / "idle"), idle)
    assert (outcome.check, outcome.has_effect, outcome.changed) == (None, False, False)
    edited = next(sabotage for sabotage in SABOTAGES if sabotage.name == "verdicts edited")
    outcome = attempt(finished.copied(tmp_path / "other"), dataclasses.replace(edited, cause="a reason that is not it"))
    assert outcome.check is not None
    assert not outcome.names_cause
    assert not outcome.is_caught


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_untouched_study_is_green(finished_as, variant):
    """Its own jobs are the control of sabotages of them."""
    assert finished_as(variant).invalid() == []


def controls():
    """Return the jobs of sabotages that no study runs when it is made, by variant, and `REPEATED`."""
    others = {(s.variant, s.jobs) for s in TRIED if not {name for name, *_ in s.jobs} <= STUDYS_OWN}
    return [REPEATED, *sorted(others, key=str)]


def test_the_repeated_jobs_are_those_of_a_sabotage():
    assert REPEATED in {(s.variant, s.jobs) for s in TRIED}
    assert all(hasattr(MicroStudy, name) for name in STUDYS_OWN)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "jobs"), controls(), ids=str)
def test_the_same_jobs_without_sabotage_are_green(finished_as, tmp_path, variant, jobs):
    outcome = untouched(finished_as(variant).copied(tmp_path / "study"), jobs)
    assert outcome.check is None, outcome


@pytest.mark.slow
@pytest.mark.parametrize("sabotage", TRIED, ids=lambda sabotage: sabotage.name)
def test_sabotage_is_caught(finished_as, tmp_path, sabotage):
    outcome = attempt(finished_as(sabotage.variant).copied(tmp_path / "study"), sabotage)
    assert outcome.is_caught == (not sabotage.reason), outcome


def held():
    """How many of each open file, connection, thread and child this process has."""
    gc.collect()
    process = psutil.Process()
    counts = Counter(descriptors=process.num_fds(), threads=process.num_threads())
    counts.update(f"file {file.path}" for file in process.open_files())
    counts.update(f"connection {socket.laddr} {socket.status}" for socket in process.net_connections())
    counts.update(f"child {child.pid}" for child in process.children(recursive=True))
    return counts


@pytest.mark.slow
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
