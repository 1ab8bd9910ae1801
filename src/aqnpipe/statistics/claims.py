"""Verdicts and the sentences that say them: what the numbers support, and nothing typed by hand."""

from collections.abc import Sequence
from typing import Literal

from statsmodels.stats.multitest import multipletests

from aqnpipe.statistics.contrasts import Contrast
from aqnpipe.statistics.seeds import (
    MAX_SEEDS_SEARCHED,
    Estimate,
    Method,
    minimum_detectable,
    questions_needed,
    seeds_needed,
)

NBSP = "\u00a0"
Verdict = Literal["supported", "refuted", "not_shown", "invalid"]

METHODS: dict[Method, str] = {
    "two_way": "paired differences, seeds and questions as crossed random effects, t with Satterthwaite's df",
    "mcnemar": "one run: exact McNemar, Newcombe's interval; the luck of training is not covered",
    "questions": "one run: t over questions, noise seeds averaged; the luck of training is not covered",
    "no_variance": "no difference varies: exact McNemar and Newcombe's interval over the questions",
}


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm-adjusted p-values in the given order."""
    if not p_values:
        return []
    return [float(p) for p in multipletests(p_values, method="holm")[1]]


def needs_several_seeds(contrast: Contrast) -> bool:
    """Whether the claim is about arms, which a single run cannot carry; a level claim is about given weights."""
    return contrast.treatment.arm != contrast.control.arm


def verdict_of(contrast: Contrast, estimate: Estimate, p_holm: float, alpha: float) -> Verdict:
    """Return supported or refuted where the adjusted p is below alpha and the data can carry the claim."""
    if p_holm >= alpha or (needs_several_seeds(contrast) and not estimate.covers_training_luck):
        return "not_shown"
    direction = "higher" if estimate.difference > 0 else "lower"
    return "supported" if direction == contrast.comparison.expected else "refuted"


def detectable(estimate: Estimate, alpha: float, power: float) -> float | None:
    """Return the minimum detectable difference at the error seen; None where no error could be estimated."""
    if estimate.standard_error is None or estimate.degrees_of_freedom is None:
        return None
    return minimum_detectable(estimate.standard_error, estimate.degrees_of_freedom, alpha, power)


def sentence_of(
    contrast: Contrast,
    estimate: Estimate,
    verdict: Verdict,
    p_holm: float,
    family_alpha: float,
    power: float,
    level: float,
) -> str:
    """Put an estimate into words; `family_alpha` is the strictest level of Holm's family, `level` the confidence."""
    parts = [_numbers(contrast, estimate, p_holm, level)]
    if verdict == "refuted":
        parts.append("The effect goes against the claim.")
    if verdict == "not_shown":
        parts += _why_not_shown(contrast, estimate, family_alpha, power)
    return " ".join(parts)


def points(fraction: float, sign: bool = False) -> str:
    """Format a fraction as percentage points with one decimal and a true minus, which zero does not get."""
    value = round(100 * fraction, 1) + 0.0
    return (f"{value:+.1f}" if sign else f"{value:.1f}").replace("-", "−")


def percent(fraction: float, digits: int = 1) -> str:
    """Format a fraction as percent with its sign, held together by a no-break space."""
    return f"{100 * fraction:.{digits}f}{NBSP}%"


def level_text(noise_level: float) -> str:
    """Format a noise level as percent: `10 % noise`."""
    return f"{100 * noise_level:.3g}{NBSP}% noise"


def p_text(p_value: float) -> str:
    """Format a p-value with its relation: `= 0.034`, `< 0.001`."""
    if p_value < 0.001:
        return f"<{NBSP}0.001"
    return f"={NBSP}{p_value:.3f}" if p_value < 0.1 else f"={NBSP}{p_value:.2f}"


def _numbers(contrast: Contrast, estimate: Estimate, p_holm: float, level: float) -> str:
    treatment, control = contrast.treatment, contrast.control
    first, second = contrast.treatment_scores.mean(), contrast.control_scores.mean()
    if treatment.arm == control.arm:
        who = (
            f"{treatment.arm} answers {percent(first)} correctly at {level_text(treatment.noise_level)} "
            f"and {percent(second)} without"
        )
    else:
        where = f" at {level_text(treatment.noise_level)}" if treatment.noise_level else ""
        who = f"{treatment.arm} answers {percent(first)} correctly{where}, {control.arm} {percent(second)}"
    if estimate.method == "no_variance" and estimate.difference == 0:
        return f"{who}: every question is answered equally well by both sides ({_sample(estimate)})."
    return (
        f"{who}: a difference of {points(estimate.difference, sign=True)} percentage points "
        f"({percent(level, 0)} CI {points(estimate.ci_low, sign=True)} to {points(estimate.ci_high, sign=True)}; "
        f"p{NBSP}{p_text(estimate.p_value)}, after Holm {p_text(p_holm)}; {_sample(estimate)})."
    )


def _sample(estimate: Estimate) -> str:
    seeds = "1 seed" if estimate.num_seeds == 1 else f"{estimate.num_seeds} seeds"
    return f"{seeds}, {estimate.num_questions:,} questions"


def _why_not_shown(contrast: Contrast, estimate: Estimate, family_alpha: float, power: float) -> list[str]:
    if needs_several_seeds(contrast) and not estimate.covers_training_luck:
        return [
            "With a single training run the effect of the arm cannot be told from the luck of training; "
            "it takes at least two seeds."
        ]
    limit = detectable(estimate, family_alpha, power)
    parts = []
    if limit is not None and limit < 1:
        parts.append(
            f"Only a true difference of about {points(limit)} points would have been found "
            f"with {percent(power, 0)} power."
        )
    if estimate.method == "two_way":
        needed = seeds_needed(contrast.treatment_scores - contrast.control_scores, family_alpha, power)
        if needed is not None:
            parts.append(f"To show a difference as small as the observed one it takes about {needed} seeds per arm.")
        elif estimate.difference != 0:
            parts.append(f"Even {MAX_SEEDS_SEARCHED:,} seeds would not show so small a difference on these questions.")
    elif estimate.standard_error:
        number = questions_needed(
            estimate.standard_error, estimate.num_questions, estimate.difference, family_alpha, power
        )
        if number is not None:
            parts.append(f"To show a difference as small as the observed one it takes about {number:,} questions.")
    return parts
