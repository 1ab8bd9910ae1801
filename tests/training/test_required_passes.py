"""The passes that a study requires, worked out by hand for one worker."""

from tiny_training import training_spec

from aqnpipe.config.arm import ImportanceSampling
from aqnpipe.training.noise_plan import required_passes


def required(spec):
    """Return (sequences read, sequences trained on) by step, for each phase; of validations whether one is due."""
    found = {}
    for row in required_passes(spec):
        read = bool(row.passes) if row.phase == "validation" else row.sequences
        assert bool(row.passes) == bool(read)
        found.setdefault(row.phase, []).append((read, row.trained_sequences))
    return found


def test_every_step_has_a_rollout_a_reference_and_an_actor_of_its_sequences():
    spec = training_spec(num_steps=3, prompts_per_step=2, rollouts_per_prompt=4, micro_batch_size=8, validate_every=2)
    assert required(spec) == {
        "rollout": [(8, 0)] * 3,
        "reference": [(8, 0)] * 3,
        "actor_forward": [(0, 8)] * 3,
        "validation": [(False, 0), (False, 0), (True, 0), (True, 0)],
    }
    assert [row.step for row in required_passes(spec)] == [0, 1, 2] * 3 + [0, 1, 2, 3]
    assert {row.sequences for row in required_passes(spec) if row.phase == "validation"} == {None}


def test_steps_that_share_a_rollout_score_the_whole_of_it_before_the_first():
    found = required(
        training_spec(num_steps=4, prompts_per_step=2, rollouts_per_prompt=4, micro_batch_size=4, steps_per_rollout=2)
    )
    assert found["rollout"] == found["reference"] == [(16, 0), (0, 0)] * 2
    assert found["actor_forward"] == [(16, 8), (0, 8)] * 2


def test_without_a_kl_term_there_is_no_reference_and_a_correction_scores_what_was_drawn():
    spec = training_spec(num_steps=2, prompts_per_step=2, rollouts_per_prompt=2, micro_batch_size=2, kl_coefficient=0)
    assert "reference" not in required(spec)
    corrected = spec.model_copy(
        update={"arm": spec.arm.model_copy(update={"importance_sampling": ImportanceSampling()})}
    )
    assert required(corrected)["actor_forward"] == [(4, 4), (4, 4)]


def test_workers_share_the_sequences():
    spec = training_spec(prompts_per_step=4, rollouts_per_prompt=2, micro_batch_size=2, num_workers=2, dtype="bfloat16")
    assert required(spec)["rollout"][0] == (4, 0)
    assert required(spec)["actor_forward"][0] == (0, 4)


def test_only_the_actor_may_have_dropout():
    spec = training_spec(dtype="bfloat16")
    formats = {row.phase: row.formats for row in required_passes(spec)}
    assert formats.pop("actor_forward") == {"bfloat16", "bfloat16 with dropout"}
    assert set(map(tuple, formats.values())) == {("bfloat16",)}


def test_the_actor_is_in_training_mode_and_so_is_the_reference_of_adapters():
    modes = {row.phase: row.modes for row in required_passes(training_spec())}
    assert modes.pop("actor_forward") == {"training"}
    assert set(map(tuple, modes.values())) == {("evaluation",)}
    adapted = required_passes(training_spec(lora={"rank": 2, "alpha": 4}))
    assert {row.phase for row in adapted if row.modes == {"training"}} == {"actor_forward", "reference"}


def test_generation_may_use_its_own_kernel_of_the_attention_that_is_asked_for():
    for attention, kernels in (("sdpa", {"sdpa", "aqnpipe_grouped_sdpa"}), ("eager", {"eager"})):
        spec = training_spec().model_copy(update={"attention": attention})
        assert {tuple(sorted(row.attention)) for row in required_passes(spec)} == {tuple(sorted(kernels))}
