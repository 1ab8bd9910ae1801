import pytest
import torch
from tiny_training import NOISE, run, scattered_rewards, teach, training_spec, write_inputs

from aqnpipe.artifacts.files import read_table
from aqnpipe.artifacts.runs import TrainingMetrics
from aqnpipe.errors import NoRewardError, ReceiptError
from aqnpipe.training.audit.scoring import ScoringAudit
from aqnpipe.training.run import reward_correct

NO_KL = {"kl_coefficient": 0.0}


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


def one_group_differs(completions, **_):
    """Return rewards of which only those of the first prompt differ."""
    return [float(index == 0) for index in range(len(completions))]


@pytest.fixture
def spec():
    """A run of two rollouts with four prompts each, whose completions four steps learn from."""
    return training_spec(NOISE, num_steps=8, prompts_per_step=1, micro_batch_size=2, steps_per_rollout=4, **NO_KL)


def test_a_first_step_without_an_advantage_has_no_gradient_and_is_accepted(tmp_path, make_model, monkeypatch, spec):
    teach(monkeypatch, one_group_differs)
    folder = run(spec, write_inputs(tmp_path, make_model), tmp_path / "run")
    norms = read_table(folder / "metrics.parquet", TrainingMetrics)["grad_norm"].to_list()
    assert norms[0] == 0.0
    assert max(norms) > 0.0


@pytest.mark.parametrize(("rewards", "step"), [(scattered_rewards, 1), (one_group_differs, 5)])
def test_a_gradient_that_is_lost_behind_the_logits_is_refused(tmp_path, make_model, monkeypatch, spec, rewards, step):
    teach(monkeypatch, rewards)
    observe = ScoringAudit.observe

    def observed(audit, kwargs, logits, kind, is_audited):
        observe(audit, kwargs, logits, kind, is_audited)
        if logits.requires_grad:
            logits.register_hook(torch.zeros_like)

    monkeypatch.setattr(ScoringAudit, "observe", observed)
    with pytest.raises(ReceiptError, match=rf"receipt invalid after step {step}: .*backward noise has no size"):
        run(spec, write_inputs(tmp_path, make_model), tmp_path / "run")
