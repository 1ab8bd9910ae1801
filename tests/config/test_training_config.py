from aqnpipe.config.evaluation import EvaluationConfig
from aqnpipe.config.training import TrainingConfig


def training(**overrides):
    settings = {
        "epochs": 2,
        "prompts_per_step": 16,
        "rollouts_per_prompt": 8,
        "micro_batch_size": 32,
        "learning_rate": 1e-4,
        "max_response_tokens": 40,
    }
    return TrainingConfig(**{**settings, **overrides})


def test_steps_of_the_published_run():
    published = training(prompts_per_step=128, rollouts_per_prompt=5, micro_batch_size=20)
    assert published.num_steps(7473) == 116


def test_the_last_step_is_always_kept_even_when_the_interval_does_not_divide():
    assert training(checkpoint_every=20).checkpoint_steps(116) == [20, 40, 60, 80, 100, 116]
    assert training(checkpoint_every=58).checkpoint_steps(116) == [58, 116]
    assert training(checkpoint_every=None).checkpoint_steps(116) == [116]
    assert training(validate_every=200).validation_steps(116) == [116]


def test_accumulation():
    assert training().sequences_per_step == 128
    assert training().accumulation_steps == 4


def test_a_step_by_tokens_is_one_call_of_the_trainer():
    by_tokens = training(micro_batch_size=None, tokens_per_micro_batch=1000, num_workers=2)
    assert (by_tokens.sequences_per_call, by_tokens.accumulation_steps) == (64, 1)


def test_the_clean_level_runs_once_and_noisy_levels_once_per_seed():
    config = EvaluationConfig(noise_levels=(0.0, 0.05), noise_seeds=(3, 4), max_response_tokens=1, batch_size=1)
    assert config.passes() == [(0.0, 3), (0.05, 3), (0.05, 4)]
