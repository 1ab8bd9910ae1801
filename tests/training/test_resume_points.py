"""When resume points are written, by whom, and that only whole ones are used."""

from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from tiny_training import training_spec
from torch import nn
from transformers.trainer import TRAINER_STATE_NAME

from aqnpipe.training import resume
from aqnpipe.training.resume import PointSchedule, ResumePoints, load_tensors, own_tensors, prepare_resume
from aqnpipe.training.workspace import Workspace


def settings(**changes):
    return training_spec(prompts_per_step=2, **changes).training


def simulated(schedule, *, steps, step_seconds, point_seconds):
    """Return the steps with points of a run, and the share of its time in which they were written."""
    elapsed, spent, written = 0.0, 0.0, []
    for step in range(1, steps):
        elapsed += step_seconds
        if schedule.is_due(step, elapsed):
            seconds = point_seconds(step)
            elapsed, spent = elapsed + seconds, spent + seconds
            schedule.add(seconds)
            written.append(step)
    return written, spent / elapsed


@pytest.mark.parametrize(("share", "limit"), [("3%", 0.03), ("0.5%", 0.005), ("20%", 0.2)])
@pytest.mark.parametrize("estimate", [1e8, 60e9, 1e13])
def test_points_take_no_more_than_their_share_of_the_time(share, limit, estimate):
    """However wrong the estimate from their size is, and although later ones take three times as long."""
    schedule = PointSchedule(settings(resume_every=share), estimate)
    written, found = simulated(
        schedule, steps=3000, step_seconds=100.0, point_seconds=lambda step: 60.0 if step < 1500 else 180.0
    )
    assert found <= limit
    if estimate < 1e13:
        assert found > 0.9 * limit
        assert written


def test_points_that_cost_little_are_written_after_every_batch_of_rollouts():
    schedule = PointSchedule(settings(steps_per_rollout=2, num_steps=20), 1e6)
    written, _ = simulated(schedule, steps=20, step_seconds=1.0, point_seconds=lambda _: 0.01)
    assert written == list(range(2, 20, 2))


def test_a_run_that_is_too_short_for_a_point_has_none():
    schedule = PointSchedule(settings(), 60e9)
    assert simulated(schedule, steps=10, step_seconds=100.0, point_seconds=lambda _: 60.0)[0] == []


def test_a_number_of_steps_does_not_depend_on_time():
    schedule = PointSchedule(settings(resume_every=3, steps_per_rollout=2, num_steps=20), 1e15)
    written, _ = simulated(schedule, steps=20, step_seconds=1.0, point_seconds=lambda _: 1e4)
    assert written == [4, 8, 12, 16]


@pytest.mark.parametrize("right", [1, 40, "3%", "0.5%", "12.5%"])
def test_steps_and_shares_are_understood(right):
    assert settings(resume_every=right).resume_every == right


@pytest.mark.parametrize("wrong", [0, -1, "0%", "100%", "0.0%", "three", "-3%", 0.03, None])
def test_other_values_of_resume_every_are_refused(wrong):
    with pytest.raises(ValidationError, match="resume_every"):
        settings(resume_every=wrong)


def made(seed):
    """Return a model that has made two steps of Adam, and its optimiser."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model[1].weight.requires_grad = False
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=0.1)
    for _ in range(2):
        advance(model, optimizer)
    return model, optimizer


def advance(model, optimizer):
    optimizer.zero_grad()
    model(torch.arange(12.0).reshape(4, 3)).square().mean().backward()
    optimizer.step()


@pytest.fixture
def workspace(tmp_path):
    made = Workspace(tmp_path / "scratch" / "key")
    made.run.mkdir(parents=True)
    return made


def callback_arguments(step, model=None):
    state, control = SimpleNamespace(global_step=step, max_steps=99), SimpleNamespace(should_training_stop=False)
    return {"args": None, "state": state, "control": control, "model": model}


def write_points(workspace, trained, steps, monkeypatch, num_workers=2):
    """Write points as workers do, one worker after the other instead of at the same time."""
    writers = []
    for rank in reversed(range(num_workers)):
        monkeypatch.setattr(resume, "rank_and_size", lambda rank=rank: (rank, num_workers))
        points = ResumePoints(workspace, settings(resume_every=1))
        points.on_train_begin(**callback_arguments(0, trained[0]))
        writers.append((rank, points))
    for step in steps:
        parts = []
        monkeypatch.setattr(resume, "gathered", lambda own, parts=parts: [own, *parts])
        for rank, points in writers:

            def save(folder, rank=rank):
                (folder / f"rank{rank}.json").write_text("{}")
                if rank == 0:
                    (folder / TRAINER_STATE_NAME).write_text("{}")
                return own_tensors(*trained, rank, num_workers)

            points.write(step, save)
            parts.append(points._part.result()[0])
        for _, points in writers:
            points._publish_written()
    for _, points in writers:
        points.close()


def newest(workspace):
    said = []
    return prepare_resume(workspace, said.append), said


def test_each_worker_writes_its_part_and_all_parts_restore_everything(workspace, monkeypatch):
    trained = made(0)
    write_points(workspace, trained, [1], monkeypatch)
    parts = [own_tensors(*trained, rank, 2) for rank in (0, 1)]
    assert all(parts)
    assert not parts[0].keys() & parts[1].keys()
    point, _ = newest(workspace)
    of_workers = {f"rank{rank}.{kind}" for rank in (0, 1) for kind in ("json", "safetensors")}
    assert {path.name for path in point.iterdir()} == {"manifest.json", TRAINER_STATE_NAME, *of_workers}
    other = made(1)
    other[0][1].weight.data.copy_(trained[0][1].weight.data)
    load_tensors(*other, point, rank=1)
    for _ in range(2):
        for name, weight in trained[0].named_parameters():
            assert torch.equal(dict(other[0].named_parameters())[name], weight), name
        advance(*trained)
        advance(*other)


def test_later_steps_do_not_change_a_point_that_is_being_written():
    trained = made(0)
    tensors = own_tensors(*trained, 0, 1)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    advance(*trained)
    assert all(torch.equal(tensors[name], before[name]) for name in before)


@pytest.mark.parametrize("name", ["rank0.safetensors", "rank1.safetensors", "rank1.json"])
@pytest.mark.parametrize("harm", ["torn", "gone"])
def test_a_torn_part_of_any_worker_means_the_point_before(name, harm, workspace, monkeypatch):
    write_points(workspace, made(0), [1, 2, 3], monkeypatch)
    part = workspace.resume / "step3" / name
    content = part.read_bytes()
    part.unlink()
    if harm == "torn":
        part.write_bytes(content[: len(content) // 2])
    point, (said,) = newest(workspace)
    assert point.name == "step2"
    assert name in said
    assert not (workspace.resume / "step3").exists()


def test_a_point_that_was_not_published_is_no_point(workspace, monkeypatch):
    """The parts of one worker are on the disk, those of the other are not when the run is killed."""
    write_points(workspace, made(0), [1], monkeypatch)
    monkeypatch.setattr(resume, "rank_and_size", lambda: (1, 2))
    points = ResumePoints(workspace, settings(resume_every=1))
    points.on_train_begin(**callback_arguments(1, made(0)[0]))
    points.write(2, lambda folder: (folder / "rank1.json").write_text("{}") and own_tensors(*made(0), 1, 2))
    assert points._part.result()[0].keys() == {"rank1.json", "rank1.safetensors"}
    assert newest(workspace)[0].name == "step1"
    assert [path.name for path in workspace.resume.iterdir()] == ["step1"]


def test_a_full_disk_is_an_error_at_the_next_step_and_leaves_the_earlier_point(workspace, monkeypatch):
    write_points(workspace, made(0), [1], monkeypatch, num_workers=1)
    points = ResumePoints(workspace, settings(resume_every=1))
    points.on_train_begin(**callback_arguments(1, made(0)[0]))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(resume, "save_file", full)
    points.write(2, lambda folder: own_tensors(*made(0), 0, 1))
    with pytest.raises(OSError, match="No space"):
        points.on_step_end(**callback_arguments(3))
    points.close()
    assert [path.name for path in workspace.resume.iterdir()] == ["step1"]


@pytest.mark.parametrize(
    ("others", "expected"), [((False, True), True), ((False, False), False), ((True, False), True)]
)
def test_workers_decide_together(others, expected, workspace, monkeypatch):
    """A point is written if every worker can afford it, or if any was asked to stop."""
    stops, affords = others
    monkeypatch.setattr(resume, "gathered", lambda own: [own, (stops, affords)])
    points = ResumePoints(workspace, settings(resume_every=1))
    points.on_train_begin(**callback_arguments(0, made(0)[0]))
    arguments = callback_arguments(1)
    points.on_step_end(**arguments)
    assert arguments["control"].should_save is expected
    assert arguments["control"].should_training_stop is stops
    points.close()
