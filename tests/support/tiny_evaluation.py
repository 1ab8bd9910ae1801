"""The settings of a small evaluation for tests: two samples of every question, without noise and with 20 %."""

from typing import Any

from aqnpipe.config.run import EvaluationSpec


def evaluation_spec(evaluation: dict[str, Any] | None = None, **changes: Any) -> EvaluationSpec:
    """Return the evaluation of step 1; keywords replace its settings, `evaluation` those of the evaluation itself."""
    settings = {
        "model_role": "base",
        "arm_id": "test",
        "seed": 0,
        "step": 1,
        "device": "cpu",
        "dtype": "float32",
        "attention": "eager",
        "prompt": {},
        "evaluation": {
            "noise_levels": (0.0, 0.2),
            "max_response_tokens": 4,
            "batch_size": 2,
            "sampling": {"temperature": 1.0, "num_samples": 2},
            **(evaluation or {}),
        },
    }
    return EvaluationSpec.model_validate(settings | changes)
