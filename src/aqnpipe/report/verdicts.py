"""The answer of a study: claims as cards, and how sure it is. Everything follows from verdicts and numbers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from aqnpipe.artifacts import Claim, ClaimsFile, Verdict
from aqnpipe.config.study import Study
from aqnpipe.report import numbers
from aqnpipe.report.inputs import Diagnosis
from aqnpipe.report.tables import Row, Table

VERDICT_LABELS = {"supported": "supported", "refuted": "refuted", "not_shown": "not shown", "invalid": "invalid"}
VERDICT_SYMBOLS = {"supported": "✓", "refuted": "✕", "not_shown": "?", "invalid": "!"}

FEW_SEEDS = 5
"""From this many seeds on the two-way analysis kept its error rate in simulations, see statistics/seeds.py."""

_SHARED_NAMES = {"noise": "noise_or_spike", "spike": "noise_or_spike"}
"""Fault types that the published scans cannot tell apart, and their common name."""


@dataclass(frozen=True)
class Strip:
    """An interval as a line: positions in percent of a width that all cards of the report share."""

    low: float
    middle: float
    high: float
    zero: float
    text: str


@dataclass(frozen=True)
class Card:
    """One claim with its verdict."""

    comparison_id: str
    claim: str
    verdict: str
    label: str
    symbol: str
    sentence: str
    strip: Strip | None


def cards(claims: ClaimsFile, comparisons: pl.DataFrame) -> list[Card]:
    """Return the claims in the study's order, each with its interval on a common scale."""
    by_id = {row["comparison_id"]: row for row in comparisons.iter_rows(named=True)}
    bounds = [abs(value) for row in by_id.values() for value in (row["ci_low"], row["ci_high"]) if value is not None]
    reach = max(bounds, default=0.0)
    return [_card(claim, by_id[claim.comparison_id], reach) for claim in claims.claims]


def summary(claims: ClaimsFile) -> str:
    """Return the count of verdicts in one line."""
    counts: Counter[str] = Counter(claim.verdict for claim in claims.claims)
    parts = [f"{counts[verdict]} {label}" for verdict, label in VERDICT_LABELS.items() if counts[verdict]]
    return f"Of {len(claims.claims)} claims: {', '.join(parts)}."


def limits(study: Study, claims: ClaimsFile, comparisons: pl.DataFrame) -> list[str]:
    """Return what the study cannot show, from its sizes and verdicts."""
    counts = Counter(claim.verdict for claim in claims.claims)
    settings, num_seeds = study.config.statistics, len(study.config.seeds)
    sentences = []
    if num_seeds == 1:
        sentences.append("One training run per arm: differences between arms cannot be told from the luck of training.")
    between = comparisons.filter((pl.col("kind") == "arms") & pl.col("minimum_detectable_difference").is_not_null())
    if num_seeds > 1 and not between.is_empty():
        low, high = (between["minimum_detectable_difference"].min(), between["minimum_detectable_difference"].max())
        sentences.append(
            f"With {num_seeds} seeds per arm, a true difference between arms had to reach "
            f"{_range(float(low), float(high))} points to be found with {100 * settings.power:.0f}\u00a0% power."  # type: ignore[arg-type]
        )
    if counts["not_shown"]:
        sentences.append("Not shown means that the data do not decide; it is no evidence that there is no effect.")
    if counts["invalid"]:
        sentences.append("Invalid comparisons were not made; the reason stands with each.")
    if 1 < num_seeds < FEW_SEEDS:
        sentences.append(
            f"With {num_seeds} seeds error rates are approximate: they rise to about twice the nominal "
            "where the luck of training far outweighs the choice of questions."
        )
    sentences.append(
        f"The chance of any false claim is kept at {100 * settings.alpha:.3g}\u00a0% "
        f"(Holm over {claims.family_size} comparisons). Findings hold for these models, questions and settings."
    )
    return sentences


def seed_table(claim: Claim, level: float) -> Table:
    """The paired 2x2 table of every seed of one comparison."""
    rows = tuple(
        Row(
            (
                str(seed.seed),
                str(seed.noise_seed),
                numbers.count(seed.both_correct),
                numbers.count(seed.only_treatment),
                numbers.count(seed.only_control),
                numbers.count(seed.neither),
                numbers.points(seed.difference),
                f"{numbers.points(seed.ci_low)} to {numbers.points(seed.ci_high)}",
                numbers.p_value(seed.mcnemar_p),
            )
        )
        for seed in claim.seeds
    )
    headers = (
        "seed",
        "noise seed",
        "both right",
        "only treatment",
        "only control",
        "neither",
        "difference, points",
        f"{100 * level:.3g}\u00a0% interval",
        "McNemar p",
    )
    return Table(claim.comparison_id, headers, rows, 0)


def diagnosis_verdicts(diagnoses: Sequence[Diagnosis]) -> Table:
    """What the scans said about every machine, against the fault that was simulated."""
    rows = tuple(
        Row(
            (
                one.machine,
                _fault_text(one.verdict),
                one.verdict.verdict
                if one.verdict.layer is None
                else f"{one.verdict.verdict}, layer {one.verdict.layer}",
                (one.verdict.type or numbers.MISSING).replace("_", " "),
                judgement(one.verdict),
                one.verdict.reason,
                f"{one.verdict.forward_equivalents:.0f}",
            )
        )
        for one in diagnoses
    )
    headers = ("machine", "simulated fault", "verdict", "type", "right?", "reason", "cost, model forwards")
    return Table("Verdicts of the diagnosis", headers, rows, 6)


def judgement(verdict: Verdict) -> str:
    """Compare a verdict with the fault that was simulated."""
    fault = verdict.simulated_fault
    if verdict.verdict == "abstain":
        return "abstained"
    if fault is None:
        return "right" if verdict.verdict == "healthy" else "false alarm"
    if verdict.verdict == "healthy":
        return "missed"
    if verdict.layer != fault.get("layer"):
        return "wrong layer"
    kind = str(fault.get("type"))
    return "right" if verdict.type in (kind, _SHARED_NAMES.get(kind)) else "right layer, wrong type"


def _card(claim: Claim, row: dict[str, float | None], reach: float) -> Card:
    low, middle, high = row["ci_low"], row["difference"], row["ci_high"]
    strip = None
    if low is not None and middle is not None and high is not None and reach > 0:
        text = f"{numbers.points(middle)} points, interval {numbers.points(low)} to {numbers.points(high)}"
        left, centre, right = (round(50 + 47 * value / reach, 1) for value in (low, middle, high))
        strip = Strip(left, centre, right, zero=50.0, text=text)
    return Card(
        comparison_id=claim.comparison_id,
        claim=claim.claim,
        verdict=claim.verdict,
        label=VERDICT_LABELS[claim.verdict],
        symbol=VERDICT_SYMBOLS[claim.verdict],
        sentence=claim.sentence,
        strip=strip,
    )


def _range(low: float, high: float) -> str:
    first, second = numbers.percent(low), numbers.percent(high)
    return first if first == second else f"{first} to {second}"


def _fault_text(verdict: Verdict) -> str:
    fault = verdict.simulated_fault
    if fault is None:
        return "none"
    details = ", ".join(f"{key} {fault[key]}" for key in ("layer", "magnitude", "sparsity") if key in fault)
    return f"{str(fault.get('type', '')).replace('_', ' ')} ({details})"
