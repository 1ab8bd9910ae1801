"""Runs that were killed at every point and started again end byte for byte like an undisturbed run."""

import dataclasses
import hashlib
import itertools
import json
import random
import re
import shutil

import pytest
from kill_server import POINTS, RESUME_EVERY, KillServer, Outcome, random_kill, tree, whole_spec
from small_disk import mounted_small_disk
from tiny_training import inputs_in, teach, training_spec, write_inputs

from aqnpipe.artifacts.files import read_table, write_table
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.runtime.training import run_training_job
from aqnpipe.training import stage


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = KillServer(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def inputs(made_once, make_model):
    return inputs_in(made_once("resume inputs", lambda folder: write_inputs(folder, make_model, num_problems=16)))


@pytest.fixture(scope="module")
def undisturbed(server, inputs, made_once):
    """Return a function that trains a spec undisturbed, once, and returns its files and outcome."""

    def run(spec):
        def train(folder):
            outcome = server.train(spec, inputs, folder / "run", folder / "scratch")
            assert outcome.code == 0, outcome.said
            (folder / "outcome.json").write_text(json.dumps(dataclasses.asdict(outcome)))

        key = hashlib.sha256(spec.model_dump_json().encode()).hexdigest()[:16]
        folder = made_once(f"undisturbed {key}", train)
        return tree(folder / "run"), Outcome(**json.loads((folder / "outcome.json").read_text()))

    return run


@pytest.fixture
def start(server, inputs, tmp_path):
    """Return a function that trains in this test's folder."""
    return lambda spec, **how: server.train(spec, inputs, tmp_path / "run", tmp_path / "scratch", **how)


def points(scratch):
    return sorted((path for path in scratch.glob("*/resume/step*")), key=lambda path: int(path.name[4:]))


def assert_no_step_is_lost_beyond_the_interval(outcomes, interval=RESUME_EVERY):
    for killed, next_one in itertools.pairwise(outcomes):
        if killed.steps and next_one.steps:
            # A point is written while the next step runs.
            assert next_one.steps[0] >= max(killed.steps) - interval


CHAINS = {
    "rollout": [("start", 1, "before"), ("rollout", 3, "after"), ("decoding", 5, "before")],
    "update": [
        ("log-probabilities", 5, "before"),
        ("backward", 5, "before"),
        ("optimiser step", 2, "before"),
        ("optimiser step", 2, "after"),
    ],
    "between steps": [
        ("validation", 4, "after"),
        ("checkpoint weights", 1, "after"),
        ("checkpoint tokenizer", 1, "before"),
    ],
    "resume point": [
        ("resume copies", 1, "before"),
        ("resume tensors", 1, "before"),
        ("resume tensors", 1, "after"),
        ("resume receipt", 1, "after"),
        ("resume manifest", 1, "before"),
        ("resume flush", 1, "before"),
        ("resume rename", 1, "before"),
        ("resume rename", 3, "after"),
        ("removal", 4, "before"),
    ],
    "end": [("receipt", 1, "before"), ("metrics", 1, "before"), ("record", 1, "before"), ("finish", 1, "before")],
    "promotion": [
        ("promotion", 1, "before"),
        ("link", 4, "after"),
        ("promotion rename", 1, "before"),
        ("promotion rename", 1, "after"),
    ],
}  # fmt: skip
"""Runs that are killed several times in a row: point, number of the call in that process, before or after it."""


def test_the_chains_name_every_point():
    assert {point for chain in CHAINS.values() for point, _, _ in chain} == set(POINTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
def test_killed_at_every_point_and_started_again(name, start, undisturbed, tmp_path):
    kill_and_start_again(CHAINS[name], start, undisturbed, tmp_path)


def kill_and_start_again(chain, start, undisturbed, tmp_path):
    """Kill a run at the points of a chain, one after the other; its files must be those of an undisturbed run."""
    outcomes = []
    for kill in chain:
        outcomes.append(start(whole_spec(), kill=kill))
        assert outcomes[-1].code == -9, (kill, outcomes[-1].said)
    outcomes.append(start(whole_spec()))
    assert outcomes[-1].code == 0, outcomes[-1].said
    assert tree(tmp_path / "run") == undisturbed(whole_spec())[0]
    assert_no_step_is_lost_beyond_the_interval(outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_killed_at_random_and_started_again(seed, start, undisturbed, tmp_path):
    files, reference = undisturbed(whole_spec())
    generator = random.Random(seed)
    outcomes = [start(whole_spec(), **random_kill(generator, reference.seconds)) for _ in range(5)]
    outcomes.append(start(whole_spec()))
    assert {outcome.code for outcome in outcomes} <= {-9, 0}
    assert outcomes[-1].code == 0
    assert tree(tmp_path / "run") == files
    assert_no_step_is_lost_beyond_the_interval(outcomes)


@pytest.mark.slow
def test_adapters_with_dropout_and_several_steps_per_rollout_resume_too(start, undisturbed, tmp_path):
    lora = {"rank": 2, "alpha": 4, "dropout": 0.3}
    spec = whole_spec(steps_per_rollout=2, prompts_per_step=2, num_steps=12, resume_every=3, lora=lora)
    assert spec.training.resume_interval == 4
    assert start(spec, kill=("optimiser step", 11, "after")).code == -9
    assert start(spec).steps == [8, 10]
    assert tree(tmp_path / "run") == undisturbed(spec)[0]


@pytest.fixture(scope="module")
def killed(server, inputs, made_once):
    """Return the scratch folder of a run killed after step 7: points after steps 4 and 6, a checkpoint after step 4."""

    def train(folder):
        kill = ("rollout", 8, "before")
        assert server.train(whole_spec(), inputs, folder / "run", folder / "scratch", kill=kill).code == -9
        assert [point.name for point in points(folder / "scratch")] == ["step4", "step6"]

    return made_once("killed after step 7", train) / "scratch"


NO_FURTHER = ("rollout", 1, "after")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rank0.safetensors", "rank0.json", "manifest.json"])
@pytest.mark.parametrize("harm", ["truncate", "flip", "remove"])
def test_a_damaged_resume_point_is_noticed_and_the_one_before_is_used(name, harm, killed, start, tmp_path):
    shutil.copytree(killed, tmp_path / "scratch")
    damage(points(tmp_path / "scratch")[-1] / name, harm)
    again = start(whole_spec(), kill=NO_FURTHER)
    assert again.steps == [4]
    assert again.said[0].startswith("scratch: resuming after step 4; ignored: ")
    # A manifest with a flipped bit may be readable; then it names files that do not exist.
    assert name in again.said[0] or (name, harm) == ("manifest.json", "flip")


def damage(path, harm):
    content = bytearray(path.read_bytes())
    match harm:
        case "truncate":
            path.write_bytes(content[: len(content) // 2])
        case "flip":
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        case "remove":
            path.unlink()


@pytest.mark.slow
def test_going_on_from_the_point_before_ends_with_the_same_bytes(killed, start, undisturbed, tmp_path):
    shutil.copytree(killed, tmp_path / "scratch")
    damage(points(tmp_path / "scratch")[-1] / "rank0.safetensors", "truncate")
    assert start(whole_spec()).steps == [4, 5, 6, 7]
    assert tree(tmp_path / "run") == undisturbed(whole_spec())[0]


@pytest.mark.slow
def test_without_an_intact_resume_point_the_run_starts_from_the_beginning(killed, start, undisturbed, tmp_path):
    shutil.copytree(killed, tmp_path / "scratch")
    for point in points(tmp_path / "scratch"):
        damage(point / "rank0.safetensors", "flip")
    again = start(whole_spec())
    assert again.steps[0] == 0
    assert again.said[0].startswith("scratch: no intact resume point, starting from the beginning (")
    assert tree(tmp_path / "run") == undisturbed(whole_spec())[0]


@pytest.mark.slow
def test_a_damaged_checkpoint_that_was_written_already_is_made_again(killed, start, tmp_path):
    shutil.copytree(killed, tmp_path / "scratch")
    (checkpoint,) = (tmp_path / "scratch").glob("*/run/checkpoints/step4/model.safetensors")
    damage(checkpoint, "flip")
    again = start(whole_spec(), kill=NO_FURTHER)
    assert again.steps == [0]
    assert "checkpoints/step4/model.safetensors" in again.said[0]


@pytest.mark.slow
@pytest.mark.parametrize("change", ["config", "code", "data"])
def test_a_changed_config_code_or_input_starts_from_the_beginning(change, killed, server, inputs, tmp_path):
    shutil.copytree(killed, tmp_path / "scratch")
    (old,) = (path for path in (tmp_path / "scratch").iterdir() if path.is_dir())
    spec = whole_spec(learning_rate=2e-3) if change == "config" else whole_spec()
    how = {"code": "other"} if change == "code" else {}
    if change == "data":
        fewer = read_table(inputs.test_problems, ProblemTable).head(5)
        write_table(tmp_path / "fewer.parquet", fewer, ProblemTable)
        inputs = dataclasses.replace(inputs, test_problems=tmp_path / "fewer.parquet")
    again = server.train(spec, inputs, tmp_path / "run", tmp_path / "scratch", kill=NO_FURTHER, **how)
    assert again.steps == [0]
    (new,) = (path for path in (tmp_path / "scratch").iterdir() if path.is_dir())
    assert new != old


@pytest.mark.slow
def test_outputs_deleted_after_promotion_come_back_without_training(start, undisturbed, tmp_path):
    """Snakemake deletes the outputs of a job that was killed between its last write and its exit."""
    assert start(whole_spec()).code == 0
    for path in (tmp_path / "run").rglob("*.json"):
        path.unlink()
    again = start(whole_spec())
    assert (again.code, again.steps) == (0, [])
    assert tree(tmp_path / "run") == undisturbed(whole_spec())[0]
    assert not points(tmp_path / "scratch")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "step"), [("SIGTERM", 4), ("SIGUSR1", 5), ("SIGURG", 2)])
def test_a_signal_ends_the_run_after_the_step_with_a_resume_point(name, step, start, undisturbed, tmp_path):
    """Step 4 is the end of an epoch."""
    stopped = start(whole_spec(), kill=("backward", 2 * step, "before"), signal=name)
    assert stopped.code == 75
    assert stopped.said[-1] == (
        f"ERROR: base/test seed 0: stopped by a signal after step {step} of 8; the same command continues from there"
    )
    assert not (tmp_path / "run").exists()
    again = start(whole_spec())
    assert (again.code, again.steps[0]) == (0, step)
    assert tree(tmp_path / "run") == undisturbed(whole_spec())[0]


@pytest.mark.slow
def test_arms_that_differ_in_noise_see_the_same_prompts_in_every_epoch_and_after_a_resume(start, undisturbed):
    noisy = undisturbed(whole_spec())[1].prompts
    clean = undisturbed(training_spec(**whole_spec().training.model_dump(), num_steps=8))[1].prompts
    assert len(noisy) == 8
    assert noisy == clean
    first, second = (sorted(itertools.chain(*epoch)) for epoch in (noisy[:4], noisy[4:]))
    assert first == second
    assert noisy[:4] != noisy[4:]
    start(whole_spec(), kill=("rollout", 5, "after"))
    # A point is published at the end of the next step, so a kill may cost one step more.
    resumed = start(whole_spec()).prompts
    assert len(noisy[4:]) <= len(resumed) <= len(noisy[4:]) + 2
    assert resumed == noisy[-len(resumed) :]


@pytest.mark.slow
def test_neither_order_nor_concurrency_of_runs_matters(server, inputs, undisturbed, tmp_path, monkeypatch):
    """Run in the reverse order in one process, and at the same time in separate processes."""
    specs = {"a": whole_spec(), "b": whole_spec().model_copy(update={"seed": 1})}
    expected = {name: undisturbed(spec)[0] for name, spec in specs.items()}
    monkeypatch.setattr(stage, "code_digest", lambda _: "imported")
    teach(monkeypatch)
    for name in "ba":
        run_training_job(specs[name], inputs, tmp_path / "in_turn" / name, tmp_path / name, lambda _: None)
    together = [(specs[name], inputs, tmp_path / "together" / name, tmp_path / f"{name}2") for name in "ba"]
    assert [outcome.code for outcome in server.train_together(together)] == [0, 0]
    for place in ("in_turn", "together"):
        assert {name: tree(tmp_path / place / name) for name in "ab"} == expected
    assert expected["a"] != expected["b"]


@pytest.fixture
def small_disk(tmp_path):
    """Return a disk that holds one run of these tests and not much more."""
    with mounted_small_disk(tmp_path / "disk", "4m") as disk:
        yield disk


@pytest.mark.slow
@pytest.mark.parametrize("room", [0, 40_000, 160_000, 320_000])
def test_a_full_disk_ends_the_run_with_one_line_and_costs_nothing(
    room, small_disk, killed, server, inputs, undisturbed, tmp_path
):
    """`room` bytes are free: none, half of the weights, half of the optimiser, or enough for the resume point."""
    shutil.copytree(killed, small_disk / "scratch")
    shutil.rmtree(points(small_disk / "scratch")[-1])
    before = tree(small_disk / "scratch")
    filler = small_disk / "filler"
    filler.write_bytes(b"0" * (shutil.disk_usage(small_disk).free - room // 4096 * 4096))
    full = server.train(whole_spec(), inputs, small_disk / "run", small_disk / "scratch")
    assert full.code == 2, full.said
    assert full.said[-1].startswith("ERROR: no space left on device for ")
    assert "\n" not in full.said[-1]
    after = tree(small_disk / "scratch")
    assert {name: after.get(name) for name in before if "/resume/" in name} == {
        name: content for name, content in before.items() if "/resume/" in name
    }
    assert not list((small_disk / "scratch").glob("*/resume/.step*")), "a resume point that was not finished"
    assert not (small_disk / "run").exists()
    filler.unlink()
    assert server.train(whole_spec(), inputs, small_disk / "run", small_disk / "scratch").code == 0
    assert tree(small_disk / "run") == undisturbed(whole_spec())[0]


@pytest.mark.slow
def test_a_second_process_on_the_same_run_is_refused_and_the_holder_named(start, server, inputs, tmp_path):
    both = [(whole_spec(), inputs, tmp_path / "run", tmp_path / "scratch")] * 2
    outcomes = server.train_together(both)
    assert sorted(outcome.code for outcome in outcomes) == [0, 2]
    (refused,) = (outcome for outcome in outcomes if outcome.code == 2)
    (line,) = refused.said
    refusal = r"ERROR: \S+/scratch: another process works on this run: process \d+ on \S+ \(since \S+\)"
    assert re.fullmatch(refusal, line)
