"""The settings of the attacked studies. Each has few questions and steps, and what some sabotages need to matter."""

import copy
from typing import Any

MATMUL = {"operators": "matmul", "error": {"kind": "relative_gaussian", "scale": 0.05}}
ALL_OPERATORS = {**MATMUL, "operators": "all"}
GUIDED_AQN = {
    "schedule": {
        "kind": "epoch_ranges",
        "ranges": [{"sigma_start": 0.05, "sigma_end": 0.02}, {"sigma_start": 0.01, "sigma_end": 0.005}],
    },
    "layer_sigmas_from": "target",
}
LINEAR_AQN = {"schedule": {"kind": "linear", "sigma_start": 0.05, "sigma_end": 0.01}}
HIDDEN_AQN = {**LINEAR_AQN, "targets": "hidden_states"}
DEAD_ZONE = {"type": "dead_zone", "layer": 3, "magnitude": 0.05}
HELPS = {
    "kind": "arms",
    "treatment": "guided",
    "control": "baseline",
    "expected": "higher",
    "claim": "guided AQN helps",
}
HURTS = {"kind": "levels", "arm": "guided", "noise_level": 0.1, "claim": "noise hurts"}
TRAINING_HELPS = {
    "kind": "arms",
    "treatment": "baseline",
    "control": "pretrained",
    "expected": "higher",
    "claim": "training helps",
}
NO_NOISE = {"description": "no noise"}
ATTACKED: dict[str, Any] = {
    "config": {
        "study": "attacked",
        "results_dir": "results",
        "models": {"base": {"source": "tiny"}},
        "machines": {"device": {}, "target": {"faults": [DEAD_ZONE]}},
        "dataset": {"source": "generated", "num_train": 4, "num_test": 12, "max_steps": 1},
        "arms": ["baseline", "guided"],
        "seeds": [0, 1],
        "training": {
            "epochs": 2,
            "prompts_per_step": 4,
            "rollouts_per_prompt": 4,
            "micro_batch_size": 16,
            "learning_rate": 2e-4,
            "max_response_tokens": 14,
            "checkpoint_every": 1,
            "validate_every": 2,
            "validation_questions": 2,
        },
        "diagnosis": {"num_prompts": 3},
        # So that the layers have different sigmas.
        "sigma_rule": {"high_kurtosis_ratio": 1.1},
        "evaluation": {
            "noise_levels": [0.0, 0.1],
            "noise_seeds": [0, 1],
            "max_response_tokens": 14,
            "batch_size": 12,
        },
        "comparisons": [HELPS, HURTS, TRAINING_HELPS],
        "report": {"title": "Attacked", "question": "Is it noticed?"},
    },
    "arms": {
        "baseline": NO_NOISE,
        "guided": {"description": "noise, and AQN by the diagnosis", "operator_noise": MATMUL, "aqn": GUIDED_AQN},
    },
}


def _variant(arms: dict[str, Any], **config: Any) -> dict[str, Any]:
    """Return the attacked study with other arms, one seed, and changed settings (merged into those of a section)."""
    study = copy.deepcopy(ATTACKED)
    study["arms"] = arms
    study["config"] |= {"arms": list(arms), "seeds": [0], "comparisons": [HURTS]}
    for name, value in config.items():
        section = study["config"].get(name)
        study["config"][name] = {**section, **value} if isinstance(section, dict) and name != "machines" else value
    return study


_SHORT = {"noise_levels": [0.0, 0.1], "noise_seeds": [0], "max_response_tokens": 14, "batch_size": 3}
VARIANTS: dict[str, dict[str, Any]] = {
    "attacked": ATTACKED,
    # The settings of the trainer differ from their defaults. Two epochs of two steps, each with half of a rollout.
    "trained": _variant(
        {"guided": NO_NOISE},
        machines={"device": {}},
        dataset={"num_test": 6, "max_steps": 2},
        training={
            "prompts_per_step": 2,
            "steps_per_rollout": 2,
            "micro_batch_size": 4,
            "learning_rate_schedule": "linear",
            "warmup_steps": 2,
            "learning_rate": 1e-3,
            "kl_coefficient": 0.05,
            "weight_decay": 0.05,
            "adam_beta1": 0.8,
            "adam_beta2": 0.95,
            "max_grad_norm": 0.3,
            "clip_ratio": 0.1,
            "temperature": 0.9,
            "max_response_tokens": 18,
            "checkpoint_every": 2,
            "validate_every": 2,
            "resume_every": 2,
        },
        evaluation={**_SHORT, "max_response_tokens": 24},
    ),
    # Few-shot prompts that end at a stop text, several sampled responses, and a batch that rows leave early.
    "asked": _variant(
        {"guided": NO_NOISE},
        machines={"device": {}},
        dataset={"num_test": 6},
        prompt={"layout": "question_answer", "num_examples": 1, "instruction": "Answer briefly."},
        training={"epochs": 1},
        evaluation={**_SHORT, "sampling": {"temperature": 0.8, "num_samples": 2}},
    ),
    "checkpointed": _variant(
        {"guided": {"description": "noise on all operators", "operator_noise": ALL_OPERATORS}},
        machines={"device": {}},
        dataset={"num_test": 6},
        training={"gradient_checkpointing": True, "epochs": 1, "prompts_per_step": 2, "micro_batch_size": 4},
        evaluation={**_SHORT, "operators": "all"},
    ),
    # The dead-zone study: AQN on hidden states, on a machine with a fault.
    "hidden": _variant(
        {"guided": {"description": "AQN on hidden states", "machine": "target", "aqn": HIDDEN_AQN}},
        dataset={"num_test": 6},
        evaluation=_SHORT,
    ),
    "adapters": _variant(
        {"guided": {"description": "noise, low-rank adapters in bfloat16", "operator_noise": MATMUL}},
        models={"base": {"source": "tiny", "dtype": "bfloat16"}},
        machines={"device": {}},
        # In shorter responses the noise changes no token, which is refused.
        dataset={"num_test": 6, "max_steps": 2},
        training={"lora": {"rank": 4, "alpha": 8}, "learning_rate": 2e-3, "max_response_tokens": 24},
        evaluation={**_SHORT, "max_response_tokens": 24},
    ),
    "mixture": _variant(
        {"guided": {"description": "noise on a mixture of experts", "operator_noise": MATMUL}},
        models={"base": {"source": "mixture"}},
        machines={"device": {}},
        dataset={"num_test": 6},
        training={"max_response_tokens": 8},
        evaluation={**_SHORT, "max_response_tokens": 8},
    ),
}
"""Studies by name. Arm `guided`, seed 0 is the one that is attacked."""
