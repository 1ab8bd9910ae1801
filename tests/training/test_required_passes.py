"""The passes that a study requires, worked out by hand for one worker."""

from tiny_training import training_spec

from aqnpipe.config.arm import ImportanceSampling
from aqnpipe.training.noise_plan import required_passes


def required(spec):
    return {passes.phase: passes for passes in required_passes(spec)}


def test_every_step_has_a_rollout_a_reference_and_an_actor_of_its_sequences():
    found = required(
        training_spec(num_steps=3, prompts_per_step=2, rollouts_per_prompt=4, micro_batch_size=8, validate_every=2)
    )
    assert list(found) == ["rollout", "reference", "actor_forward", "validation"]
    for phase in ("rollout", "reference"):
        assert (list(found[phase].steps), found[phase].sequences) == ([0, 1, 2], 8)
        assert not found[phase].drops
    actor = found["actor_forward"]
    assert (list(actor.steps), list(actor.trained_steps), actor.trained_sequences) == ([], [0, 1, 2], 8)
    assert (list(found["validation"].steps), found["validation"].sequences) == ([2, 3], None)


def test_steps_that_share_a_rollout_score_the_whole_of_it_before_the_first():
    found = required(
        training_spec(num_steps=4, prompts_per_step=2, rollouts_per_prompt=4, micro_batch_size=4, steps_per_rollout=2)
    )
    for phase in ("rollout", "reference", "actor_forward"):
        assert (list(found[phase].steps), found[phase].sequences) == ([0, 2], 16)
    assert (list(found["actor_forward"].trained_steps), found["actor_forward"].trained_sequences) == ([0, 1, 2, 3], 8)


def test_without_a_kl_term_there_is_no_reference_and_a_correction_scores_what_was_drawn():
    spec = training_spec(num_steps=2, prompts_per_step=2, rollouts_per_prompt=2, micro_batch_size=2, kl_coefficient=0)
    assert "reference" not in required(spec)
    corrected = spec.model_copy(
        update={"arm": spec.arm.model_copy(update={"importance_sampling": ImportanceSampling()})}
    )
    assert (list(required(corrected)["actor_forward"].steps), required(corrected)["actor_forward"].sequences) == (
        [0, 1],
        4,
    )


def test_workers_share_the_sequences():
    found = required(
        training_spec(prompts_per_step=4, rollouts_per_prompt=2, micro_batch_size=2, num_workers=2, dtype="bfloat16")
    )
    assert {passes.num_format for passes in found.values()} == {"bfloat16"}
    assert (found["rollout"].sequences, found["actor_forward"].trained_sequences) == (4, 4)
