"""The decomposition in real runs: its parts have the causes that were put there, and it changes nothing."""

import polars as pl
import pytest
from failing_measurement import fail_in_measurement
from tiny_training import AQN, NOISE, run, training_spec

from aqnpipe.artifacts.files import read_json, read_table
from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.artifacts.runs import RunRecord, TrainingMetrics
from aqnpipe.artifacts.sampler_distance import DistanceProgress, SamplerDistance
from aqnpipe.training.distance.passes import NotMeasurableError
from aqnpipe.training.distance.probe import DistanceProbe

pytestmark = pytest.mark.usefixtures("rewards_that_teach")


def parts_in(folder) -> SamplerDistance:
    facts = read_json(folder / "run.json", RunRecord).training
    assert facts is not None
    return facts.sampler_distance


def causes(step):
    return {part.cause: part for part in step.parts}


def test_without_noise_the_distance_is_rounding_and_nothing_is_left_over(inputs, tmp_path):
    said = []
    folder = run(training_spec(), inputs, tmp_path / "run", said.append)
    first, last = parts_in(folder).steps
    assert (first.step, first.rollout_step, last.step, last.rollout_step) == (1, 0, 2, 1)
    for step in (first, last):
        assert list(causes(step)) == ["rollout_batch", "decoding", "batch", "rest"]
        assert step.num_sequences == 4
        assert step.rms < 1e-4
        assert causes(step)["rest"].rms == 0
        assert sum(part.share for part in step.parts) == pytest.approx(1)
    assert sum("distance to the sampler at step" in line for line in said) == 2


def test_noise_in_rollout_and_policy_are_told_apart(inputs, tmp_path):
    rollout = {**NOISE, "phases": ["rollout"], "layers": [1], "include_lm_head": False}
    (step, _) = parts_in(run(training_spec(rollout), inputs, tmp_path / "rollout")).steps
    assert list(causes(step)) == ["rollout_noise", "decoding", "batch", "rest"]
    assert causes(step)["rollout_noise"].share == pytest.approx(1, abs=1e-2)
    assert causes(step)["rest"].rms == 0

    actor = {**NOISE, "phases": ["actor_forward", "backward"]}
    (step, _) = parts_in(run(training_spec(actor), inputs, tmp_path / "actor")).steps
    assert list(causes(step)) == ["rollout_batch", "decoding", "batch", "actor_noise"]
    assert causes(step)["actor_noise"].share == pytest.approx(1, abs=1e-2)


def test_the_sampler_s_older_weights_are_staleness(inputs, tmp_path):
    spec = training_spec(
        num_steps=4, prompts_per_step=2, micro_batch_size=2, steps_per_rollout=2, checkpoint_every=None,
        learning_rate=0.01,
    )  # fmt: skip
    first, last = parts_in(run(spec, inputs, tmp_path / "run")).steps
    assert "staleness" not in causes(first)
    assert (last.step, last.rollout_step) == (4, 2)
    assert causes(last)["staleness"].share == pytest.approx(1, abs=1e-2)
    assert causes(last)["rest"].rms == 0
    assert last.mean_absolute > 1e-3


def digests(folder):
    """Return the digests of all files but run.json, of which the facts of the training are compared."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "run.json"]
    assert len(files) > 4
    return {str(path.relative_to(folder)): sha256_of_file(path) for path in files}


def other_facts(folder):
    facts = read_json(folder / "run.json", RunRecord).training
    return facts.model_copy(update={"sampler_distance": SamplerDistance()})


@pytest.mark.parametrize("noise", [{}, {"operator_noise": NOISE, "aqn": AQN}], ids=["clean", "noisy"])
def test_the_measurement_changes_no_byte_of_the_run(inputs, tmp_path, noise):
    """With gradient checkpointing and a KL term, so that every phase of training runs."""
    settings = {**noise, "gradient_checkpointing": True, "kl_coefficient": 0.1}
    measured = run(training_spec(**settings), inputs, tmp_path / "measured")
    plain = run(training_spec(**settings, explain_sampler_distance=False), inputs, tmp_path / "plain")
    assert len(parts_in(measured).steps) == 2
    assert parts_in(measured).why_not is None
    assert parts_in(plain) == SamplerDistance(why_not="training.explain_sampler_distance is false")
    assert digests(measured) == digests(plain)
    assert other_facts(measured) == other_facts(plain)


def test_a_measurement_that_runs_out_of_memory_changes_no_byte_of_the_run(inputs, tmp_path, monkeypatch):
    """In one of the passes of the first step: the whole one, decoding, of the micro-batch."""
    spec = training_spec(operator_noise=NOISE, aqn=AQN, num_steps=3)
    plain = run(spec, inputs, tmp_path / "plain")
    for number in (1, 2, 4):
        said: list[str] = []
        with monkeypatch.context() as patched:
            fail_in_measurement(patched, number)
            found = run(spec, inputs, tmp_path / f"failed{number}", said.append)
        assert [step.step for step in parts_in(found).steps] == [3], number
        assert parts_in(found).why_not == "at step 1: the device has too little free memory"
        assert sum("at step 1 not explained: the device has too little" in line for line in said) == 1
        assert digests(found) == digests(plain), number
        assert other_facts(found) == other_facts(plain)


def test_no_other_error_of_a_measurement_is_caught(inputs, tmp_path, monkeypatch):
    fail_in_measurement(monkeypatch, 1, RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        run(training_spec(), inputs, tmp_path / "run")


def test_the_distance_is_that_of_the_metrics_where_all_sequences_are_measured(inputs, tmp_path):
    folder = run(training_spec(aqn=AQN, prompts_per_step=2, num_steps=1), inputs, tmp_path / "run")
    (step,) = parts_in(folder).steps
    recorded = read_table(folder / "metrics.parquet", TrainingMetrics)
    assert step.mean_absolute == pytest.approx(recorded["logp_difference_mean"][0], rel=1e-6)
    assert causes(step)["rollout_noise"].rms > 100 * causes(step)["decoding"].rms


def test_a_step_that_cannot_be_measured_is_left_out_and_the_run_goes_on(inputs, tmp_path, monkeypatch):
    def refuse(*args):
        raise NotMeasurableError("a log-probability is not finite")

    original, said = DistanceProbe._measure_rollout, []
    monkeypatch.setattr(
        DistanceProbe, "_measure_rollout", lambda self, step: refuse() if step.step == 2 else original(self, step)
    )
    found = parts_in(run(training_spec(), inputs, tmp_path / "run", said.append))
    assert [step.step for step in found.steps] == [1]
    assert found.why_not == "at step 2: a log-probability is not finite"
    assert sum("at step 2 not explained: a log-probability is not finite" in line for line in said) == 1


def test_what_was_missed_survives_a_resume_point():
    metrics = pl.DataFrame({"step": [1], "logp_difference_mean": [0.0]})
    before, after = (
        DistanceProbe(training_spec(), None, None, samples_in_process=True, label="run", say=print) for _ in range(2)
    )
    before.restore(DistanceProgress(missed={1: "one reason", 2: "another"}))
    after.restore(DistanceProgress.model_validate_json(before.state().model_dump_json()))
    assert after.result(metrics).why_not == "at step 1: one reason; at step 2: another"
