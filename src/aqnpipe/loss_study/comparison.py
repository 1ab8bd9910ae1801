"""The compare_losses stage: compare the conditions of a loss study, paired over its texts and noise seeds.

Losses are in nats per token. d[noise seed, text] is the treatment's loss minus the control's on the same text. A side
without noise has one pass, which is paired with every noise seed of the other side.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl

from aqnpipe.artifacts.base import Statement, statement
from aqnpipe.artifacts.comparisons import ClaimVerdict, Family
from aqnpipe.artifacts.files import read_json, read_table, write_json
from aqnpipe.artifacts.loss_studies import LossStudyComparison, LossStudyCondition, LossStudyFile, LossStudyTable
from aqnpipe.artifacts.runs import RunRecord, StageFiles, record_problems
from aqnpipe.config.analysis import Direction, StatisticsConfig
from aqnpipe.config.plan import StudyPlan
from aqnpipe.errors import DataError
from aqnpipe.noise.receipts.receipt import LossStudyPass, LossStudyReceipts
from aqnpipe.statistics.arrays import FloatArray
from aqnpipe.statistics.clusters import Clusters, neighbours_vary_together
from aqnpipe.statistics.crossed_effects import Estimate, estimate_difference
from aqnpipe.statistics.multiple_testing import holm_within_families

_NOISY_CONDITIONS = ("global", "targeted", "healthy_layers", "wrong_layers", "random_layers")
"""Conditions with a fault and with noise, named by the place of the noise."""


_KEYS = ("condition", "magnitude", "order")
"""What a side of a comparison is: one condition at one magnitude and order."""


@dataclass(frozen=True)
class _Side:
    """One condition at one magnitude and order, with its losses [noise seed, text]."""

    condition: str
    magnitude: float
    order: str | None
    losses: FloatArray
    mean_text_loss: float


@dataclass(frozen=True)
class _Contrast:
    """Two sides to compare, the claim about their losses and its direction."""

    family: Literal["harm", "noise", "place"]
    treatment: _Side
    control: _Side
    expected: Direction
    claim: Statement

    @property
    def comparison_id(self) -> str:
        """The conditions, magnitude and order in one name."""
        order = f"_{self.treatment.order}" if self.treatment.order else ""
        return f"{self.treatment.condition}_vs_{self.control.condition}_{self.treatment.magnitude:g}{order}"

    def above(self, uniform: float) -> tuple[Statement, ...]:
        """Return which sides are worse than guessing, so that their comparison says nothing."""
        means = {side.condition: float(side.losses.mean()) for side in (self.treatment, self.control)}
        return tuple(
            statement("reason.above_uniform", name=name, loss=mean, uniform=uniform)
            for name, mean in means.items()
            if mean > uniform
        )


def existing_losses(plan: StudyPlan) -> list[tuple[StageFiles, Path]]:
    """Return the loss studies whose table, receipt and record exist, each with the path of its comparisons."""
    suffixes = ("parquet", "receipt.json", "run.json", "claims.json")
    files = zip(*(map(Path, plan.loss_study_files(suffix)) for suffix in suffixes), strict=True)
    studies = ((StageFiles(*paths), claims) for *paths, claims in files)
    return [(found, claims) for found, claims in studies if found.exist]


def compare_losses(inputs: StageFiles, settings: StatisticsConfig, output: Path) -> None:
    """Test every comparison of a loss study and write a `LossStudyFile`.

    Raises DataError if a file is malformed, a receipt is refused, table and receipts are not of the same passes, or
    there is a single text or cluster of texts.
    """
    table = read_table(inputs.table, LossStudyTable)
    unit = "cluster" if "cluster" in table.columns else "question_id"
    if table[unit].n_unique() < 2:
        raise DataError(f"{inputs.table}: {unit}: found 1 value, expected at least 2 to compare over; raise num_texts")
    receipts = read_json(inputs.receipt, LossStudyReceipts)
    record = read_json(inputs.record, RunRecord)
    for problem in [*_mismatches(table, receipts), *receipts.problems()]:
        raise DataError(f"{inputs.receipt}: {problem}")
    for problem in record_problems(record, outputs={"table": inputs.table, "receipt": inputs.receipt}):
        raise DataError(f"{inputs.record}: {problem}")
    write_json(output, loss_file(table, receipts, record, settings))


def loss_file(
    table: pl.DataFrame, receipts: LossStudyReceipts, record: RunRecord, settings: StatisticsConfig
) -> LossStudyFile:
    """Return conditions and tested comparisons of a loss study; Holm adjusts within each family."""
    sides, uniform, alpha = _sides(table), math.log(receipts.vocabulary_size), settings.alpha
    # In the order of the losses of a side.
    by_text = table.unique("question_id").sort("question_id")
    clusters = Clusters.of(by_text["cluster"].to_list()) if "cluster" in table.columns else None
    contrasts = list(_contrasts(sides))
    estimates = [estimate_difference(one.treatment.losses, one.control.losses, clusters=clusters) for one in contrasts]
    tested = [index for index, one in enumerate(contrasts) if not one.above(uniform)]
    families = [contrasts[index].family for index in tested]
    adjusted = holm_within_families(families, [estimates[index].two_sided_p() for index in tested])
    p_holm = dict(zip(tested, adjusted, strict=True))
    return LossStudyFile(
        name=str(record.identity["name"]),
        model=str(record.identity["model"]),
        gamma=receipts.gamma,
        num_layers=receipts.num_layers,
        faulty_layers=receipts.faulty_layers,
        num_texts=len(by_text),
        uniform=uniform,
        alpha=alpha,
        families=tuple(Family(name=name, size=size) for name, size in Counter(families).items()),
        conditions=tuple(_condition(side, receipts, uniform) for side in sides),
        comparisons=tuple(
            _comparison(contrast, estimates[index], p_holm.get(index), uniform, alpha, clusters)
            for index, contrast in enumerate(contrasts)
        ),
    )


def _sides(table: pl.DataFrame) -> list[_Side]:
    ordered = table.sort("noise_seed", "question_id", maintain_order=True)
    text_losses = {key: float(part["text_loss"].to_numpy().mean()) for key, part in table.group_by(_KEYS)}
    return [
        _Side(
            str(condition),
            float(magnitude),
            order,
            part["loss"].to_numpy().reshape(part["noise_seed"].n_unique(), -1).astype(np.float64),
            text_losses[condition, magnitude, order],
        )
        for (condition, magnitude, order), part in ordered.group_by(_KEYS, maintain_order=True)
    ]


def _contrasts(sides: Sequence[_Side]) -> Iterator[_Contrast]:
    """Yield the comparisons of a loss study: does the fault hurt, does noise help, and does its place matter?"""
    known = {(side.condition, side.magnitude, side.order): side for side in sides}
    clean = known.get(("clean", 0.0, None))
    for side in sides:
        if side.condition == "fault_only" and clean is not None:
            claim = statement("loss_claim.fault_raises_loss", magnitude=side.magnitude)
            yield _Contrast("harm", side, clean, "higher", claim)
        elif side.condition == "noise_only" and clean is not None:
            yield _Contrast("harm", side, clean, "higher", statement("loss_claim.noise_raises_loss"))
        elif side.condition in _NOISY_CONDITIONS:
            alone = known.get(("fault_only", side.magnitude, None))
            if alone is not None:
                yield _Contrast("noise", side, alone, "lower", _placed_claim("noise_lowers_loss", side, side.condition))
            for place in ("global", "wrong_layers") if side.condition == "targeted" else ():
                other = known.get((place, side.magnitude, side.order if place == "global" else None))
                if other is not None:
                    yield _Contrast("place", side, other, "lower", _placed_claim("place_matters", side, place))


def _placed_claim(name: Literal["noise_lowers_loss", "place_matters"], side: _Side, place: str) -> Statement:
    """Return a claim about noise in `place`, at the magnitude and order of `side`."""
    layers = statement(f"noise_place.{place}")
    if side.order is None:
        return statement(f"loss_claim.placed.{name}", place=layers, magnitude=side.magnitude)
    order = statement(f"order.{side.order}")
    return statement(f"loss_claim.placed_in_order.{name}", place=layers, magnitude=side.magnitude, order=order)


def _comparison(
    contrast: _Contrast,
    estimate: Estimate,
    p_holm: float | None,
    uniform: float,
    alpha: float,
    clusters: Clusters | None,
) -> LossStudyComparison:
    treatment, control, difference = contrast.treatment, contrast.control, estimate.difference
    (low, high), p_value = estimate.interval(1 - alpha), estimate.two_sided_p()
    verdict: ClaimVerdict = "invalid"
    conclusion = statement("evidence.invalid", reasons=contrast.above(uniform))
    p_values = statement("detail.p", p=p_value)
    if p_holm is not None:
        is_as_claimed = ("higher" if difference > 0 else "lower") == contrast.expected
        verdict = "not_shown" if p_holm >= alpha else "supported" if is_as_claimed else "refuted"
        conclusion = statement(f"conclusion.{verdict}")
        p_values = statement("detail.p_and_holm", p=p_value, p_holm=p_holm)
    details = [statement("detail.interval.nats", level=1 - alpha, low=low, high=high), p_values]
    if clusters is not None:
        seeds, questions, number = estimate.num_seeds, estimate.num_questions, clusters.number
        details.append(statement("detail.sample_in_clusters", seeds=seeds, questions=questions, clusters=number))
    numbers = statement(
        "result.nats",
        treatment=treatment.condition,
        control=control.condition,
        difference=difference,
        details=tuple(details),
    )
    by_text = (treatment.losses - control.losses).mean(axis=0)
    is_clustered = clusters is None and neighbours_vary_together(by_text)
    return LossStudyComparison(
        comparison_id=contrast.comparison_id,
        family=contrast.family,
        magnitude=treatment.magnitude,
        order=treatment.order,
        treatment=treatment.condition,
        control=control.condition,
        num_seeds=estimate.num_seeds,
        num_texts=estimate.num_questions,
        difference=difference,
        ci_low=low,
        ci_high=high,
        p_value=p_value,
        p_holm=p_holm,
        claim=contrast.claim,
        verdict=verdict,
        statements=(numbers, conclusion, *([statement("claim.clustered")] if is_clustered else [])),
    )


def _condition(side: _Side, receipts: LossStudyReceipts, uniform: float) -> LossStudyCondition:
    passes = [one for one in receipts.passes if _key(one)[:3] == (side.condition, side.magnitude, side.order)]
    cells = [cell for one in passes for cell in one.receipt.fault_cells]
    flows = [flow for one in passes for flow in one.receipt.gradient_flows]
    changed = _share([cell.changed for cell in cells], [cell.elements for cell in cells])
    zeroed, arriving = ([(getattr(flow, name) ** 0.5) ** 2 for flow in flows] for name in ("zeroed_squares", "squares"))
    seed_means = side.losses.mean(axis=1)
    return LossStudyCondition(
        condition=side.condition,
        magnitude=side.magnitude,
        order=side.order,
        noised_layers=passes[0].noised_layers,
        mean_loss=float(side.losses.mean()),
        seed_sd=float(seed_means.std(ddof=1)) if len(seed_means) > 1 else None,
        mean_text_loss=side.mean_text_loss,
        survival_rate=None if changed is None else 1 - changed,
        gradient_zeroed_share=_share([flow.zeroed for flow in flows], [flow.elements for flow in flows]),
        gradient_zeroed_norm_share=_share(zeroed, arriving, power=0.5),
        above_uniform=bool(side.losses.mean() > uniform),
    )


def _share(part: Sequence[float], whole: Sequence[float], power: float = 1.0) -> float | None:
    return (sum(part) / sum(whole)) ** power if sum(whole) else None


def _key(study_pass: LossStudyPass) -> tuple[str, float, str | None, int]:
    return study_pass.condition, study_pass.magnitude, study_pass.order, study_pass.noise_seed


def _mismatches(table: pl.DataFrame, receipts: LossStudyReceipts) -> list[str]:
    columns = [*_KEYS, "noise_seed"]
    in_table = set(table.select(columns).unique().iter_rows())
    in_receipts = {_key(study_pass) for study_pass in receipts.passes}
    problems = [f"no receipt for evaluation {key}" for key in sorted(in_table - in_receipts, key=str)]
    problems += [f"no rows for evaluation {key}" for key in sorted(in_receipts - in_table, key=str)]
    texts = table.group_by(columns).agg(pl.col("question_id").sort().str.join("\n"))["question_id"].n_unique()
    return problems + (["the evaluations hold different texts"] if texts > 1 else [])
