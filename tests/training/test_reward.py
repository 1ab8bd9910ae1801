import pytest
from tiny_training import NOISE, run, training_spec, write_inputs

from aqnpipe.errors import NoRewardError, ReceiptError
from aqnpipe.training.run import reward_correct


def test_reward_is_one_for_the_gold_number_after_the_marker():
    responses = ["#### 7", "7", "#### 8", "so #### $7.00"]
    assert reward_correct(responses, ["7"] * 4, [None] * 4) == [1.0, 0.0, 0.0, 1.0]


def test_an_answer_to_a_question_of_the_models_own_earns_nothing():
    response = "I do not know.\n\nQuestion: 3+4?\nAnswer: #### 7"
    assert reward_correct([response, response], ["7", "7"], ["Question:", None]) == [0.0, 1.0]


def test_a_noisy_run_whose_rewards_are_all_0_says_so(tmp_path, make_model):
    inputs = write_inputs(tmp_path, make_model)
    with pytest.raises(
        NoRewardError, match=r"base/test seed 0: no reward in any group: all 16 responses have"
    ) as caught:
        run(training_spec(NOISE, kl_coefficient=0.0), inputs, tmp_path / "run")
    assert len(str(caught.value)) < 250
    assert not (tmp_path / "run").exists()


def test_a_run_without_noise_needs_no_reward(tmp_path, make_model):
    assert run(training_spec(), write_inputs(tmp_path, make_model), tmp_path / "run").is_dir()


def test_missing_rewards_excuse_no_other_problem_of_a_receipt(tmp_path, make_model, monkeypatch):
    monkeypatch.setattr(
        "aqnpipe.noise.kernels.error_models.add_relative_gaussian_", lambda tensor, scale, source: tensor
    )
    with pytest.raises(ReceiptError, match="receipt invalid after step 1: rollout"):
        run(training_spec(NOISE), write_inputs(tmp_path, make_model), tmp_path / "run")
