"""Every arm against one reference arm at every noise level, for the figure of differences. Not part of a family."""

from collections.abc import Iterator
from typing import Any

from aqnpipe.comparison.contrasts import Contrast, Contrasts
from aqnpipe.comparison.judgement import possible_interval
from aqnpipe.config.analysis import PRETRAINED, ArmComparison
from aqnpipe.config.arm import Arm
from aqnpipe.config.study import Study


def difference_rows(study: Study, contrasts: Contrasts) -> list[dict[str, Any]]:
    """Return a row per arm and level, after the last step, as in `artifacts.comparisons.DifferenceTable`."""
    return [row for role in study.model_roles() for row in _rows_of_model(study, role, contrasts)]


def reference_arm(study: Study, role: str) -> str:
    """Return the first arm of a model without noise, AQN or simulated machine; else the pretrained model."""
    plain = (name for name, arm in study.arms.items() if arm.model == role and arm.aa_control_of is None)
    return next((name for name in plain if _is_plain(study.arms[name])), PRETRAINED)


def _is_plain(arm: Arm) -> bool:
    return not (arm.operator_noise or arm.module_noise or arm.aqn or arm.machine)


def _rows_of_model(study: Study, role: str, contrasts: Contrasts) -> Iterator[dict[str, Any]]:
    reference, alpha = reference_arm(study, role), study.config.statistics.alpha
    for name in (name for name, arm in study.arms.items() if arm.model == role and name != reference):
        for level in sorted(study.config.evaluation.all_levels()):
            comparison = ArmComparison(
                kind="arms", treatment=name, control=reference, noise_level=level, expected="higher", claim=name
            )
            identity = {"model": role, "arm": name, "reference": reference, "noise_level": level}
            yield identity | _estimated(contrasts.of(comparison, name), alpha)


def _estimated(contrast: Contrast, alpha: float) -> dict[str, Any]:
    if contrast.scores is None:
        return {"num_seeds": 0, "num_questions": 0, "problem": contrast.refusal.reason if contrast.refusal else None}
    estimate = contrast.scores.estimate()
    low, high = possible_interval(contrast.comparison, estimate, 1 - alpha)
    return {
        "num_seeds": estimate.num_seeds,
        "num_questions": estimate.num_questions,
        "difference": estimate.difference,
        "ci_low": low,
        "ci_high": high,
    }
