"""The compare_losses stage: what a loss study shows, paired over its texts and noise seeds.

Losses are in nats per token. d[noise seed, text] is the treatment's loss minus the control's on the same text; a side
without noise has one pass, which stands against every noise seed of the other.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import polars as pl

from aqnpipe.artifacts.comparisons import ClaimVerdict, Family
from aqnpipe.artifacts.files import read_json, read_table, write_json
from aqnpipe.artifacts.lineage import record_problems
from aqnpipe.artifacts.loss_studies import LossStudyComparison, LossStudyCondition, LossStudyFile, LossStudyTable
from aqnpipe.artifacts.runs import RunRecord
from aqnpipe.comparison.judgement import METHODS, holm
from aqnpipe.config.analysis import Direction, StatisticsConfig
from aqnpipe.config.plan import StudyPlan
from aqnpipe.errors import DataError
from aqnpipe.noise.receipts.loss_study_receipt import LossStudyPass, LossStudyReceipts
from aqnpipe.published import wording as audit_wording
from aqnpipe.published.tests import Result
from aqnpipe.report.wording import Text, joined, say
from aqnpipe.statistics.crossed_effects import Estimate, estimate_difference

FloatArray = npt.NDArray[np.float64]

_HARM = Text("A fault of magnitude {magnitude} raises the loss", "强度 {magnitude} 的故障使损失升高")
_NOISE_ONLY = Text("Noise in all layers raises the loss of the healthy machine", "所有层的噪声使健康机器的损失升高")
_NOISE = Text(
    "Noise in {place} lowers the loss under a fault of magnitude {magnitude}{order}",
    "强度 {magnitude} 的故障下，{place}的噪声降低损失{order}",
)
_PLACE = Text(
    "Noise in the faulty layers gives a lower loss than noise in {place}, magnitude {magnitude}{order}",
    "故障层的噪声比{place}的噪声损失更低，强度 {magnitude}{order}",
)
_PLACES = {
    "global": Text("all layers", "所有层"),
    "targeted": Text("the faulty layers", "故障层"),
    "healthy_layers": Text("the healthy layers", "健康层"),
    "wrong_layers": Text("as many layers far from the fault", "同样多的远离故障的层"),
    "random_layers": Text("as many healthy layers drawn at random", "同样多的随机健康层"),
}
_ORDERS = {
    None: Text("", ""),
    "after_noise": Text(" (noise, then fault)", "（先噪声后故障）"),
    "before_noise": Text(" (fault, then noise)", "（先故障后噪声）"),
    "around_noise": Text(" (fault, noise, fault)", "（故障、噪声、故障）"),
}


@dataclass(frozen=True)
class LossInputs:
    """Files of one loss study."""

    table: Path
    receipt: Path
    record: Path


@dataclass(frozen=True)
class _Side:
    """One condition: its losses [noise seed, text], and what identifies it."""

    condition: str
    magnitude: float
    order: str | None
    losses: FloatArray


@dataclass(frozen=True)
class _Contrast:
    """A comparison of two sides, the claim it tests and the direction of that claim."""

    family: Literal["harm", "noise", "place"]
    treatment: _Side
    control: _Side
    expected: Direction
    claim: Text

    @property
    def comparison_id(self) -> str:
        """A short name that says all."""
        order = f"_{self.treatment.order}" if self.treatment.order else ""
        return f"{self.treatment.condition}_vs_{self.control.condition}_{self.treatment.magnitude:g}{order}"


def existing_losses(plan: StudyPlan) -> list[tuple[LossInputs, Path]]:
    """Return the loss studies of which table, receipt and record exist, each with the place of its comparisons."""
    suffixes = ("parquet", "receipt.json", "run.json", "claims.json")
    files = zip(*(map(Path, plan.loss_study_files(suffix)) for suffix in suffixes), strict=True)
    return [(LossInputs(*paths), claims) for *paths, claims in files if all(path.is_file() for path in paths)]


def compare_losses(inputs: LossInputs, settings: StatisticsConfig, output: Path) -> None:
    """Test every comparison of a loss study and write a `LossStudyFile`.

    Raises DataError where a file is malformed, a receipt is refused, or table and receipts are not of the same passes.
    """
    table = read_table(inputs.table, LossStudyTable)
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
    sides = _sides(table)
    uniform = math.log(receipts.vocabulary_size)
    contrasts = list(_contrasts(sides))
    estimates = [estimate_difference(one.treatment.losses, one.control.losses, seed=settings.seed) for one in contrasts]
    above = [_above_uniform(one, uniform) for one in contrasts]
    adjusted = _adjusted(contrasts, estimates, above)
    families = Counter(contrasts[index].family for index in adjusted)
    return LossStudyFile(
        name=str(record.identity["name"]),
        model=str(record.identity["model"]),
        gamma=receipts.gamma,
        num_layers=receipts.num_layers,
        faulty_layers=receipts.faulty_layers,
        num_texts=table["question_id"].n_unique(),
        uniform=uniform,
        alpha=settings.alpha,
        families=tuple(Family(name=name, size=size) for name, size in families.items()),
        conditions=tuple(_condition(side, table, receipts, uniform) for side in sides),
        comparisons=tuple(
            _comparison(contrast, estimate, adjusted.get(index), above[index], settings.alpha)
            for index, (contrast, estimate) in enumerate(zip(contrasts, estimates, strict=True))
        ),
    )


def _sides(table: pl.DataFrame) -> list[_Side]:
    ordered = table.sort("noise_seed", "question_id", maintain_order=True)
    return [
        _Side(
            str(condition),
            float(magnitude),
            order,
            part["loss"].to_numpy().reshape(part["noise_seed"].n_unique(), -1).astype(np.float64),
        )
        for (condition, magnitude, order), part in ordered.group_by(
            "condition", "magnitude", "order", maintain_order=True
        )
    ]


def _contrasts(sides: Sequence[_Side]) -> Iterator[_Contrast]:
    """Yield what a loss study asks: does the fault hurt, does noise help, and does its place matter?"""
    known = {(side.condition, side.magnitude, side.order): side for side in sides}
    clean = known.get(("clean", 0.0, None))
    for side in sides:
        magnitude = f"{side.magnitude:g}"
        if side.condition == "fault_only" and clean is not None:
            yield _Contrast("harm", side, clean, "higher", say(_HARM, magnitude=magnitude))
        elif side.condition == "noise_only" and clean is not None:
            yield _Contrast("harm", side, clean, "higher", _NOISE_ONLY)
        elif side.condition in _PLACES:
            values: dict[str, str | Text] = {"magnitude": magnitude, "order": _ORDERS[side.order]}
            alone = known.get(("fault_only", side.magnitude, None))
            if alone is not None:
                claim = say(_NOISE, place=_PLACES[side.condition], **values)
                yield _Contrast("noise", side, alone, "lower", claim)
            for place in ("global", "wrong_layers") if side.condition == "targeted" else ():
                other = known.get((place, side.magnitude, side.order if place == "global" else None))
                if other is not None:
                    yield _Contrast("place", side, other, "lower", say(_PLACE, place=_PLACES[place], **values))


def _above_uniform(contrast: _Contrast, uniform: float) -> tuple[Text, ...]:
    return tuple(
        audit_wording.above_uniform(side.condition, float(side.losses.mean()), uniform)
        for side in (contrast.treatment, contrast.control)
        if side.losses.mean() > uniform
    )


def _adjusted(
    contrasts: Sequence[_Contrast], estimates: Sequence[Estimate], above: Sequence[tuple[Text, ...]]
) -> dict[int, float]:
    """Holm-adjusted p by position, each family by itself; sides worse than guessing are not tested."""
    adjusted: dict[int, float] = {}
    valid = [index for index, reasons in enumerate(above) if not reasons]
    for family in dict.fromkeys(contrasts[index].family for index in valid):
        members = [index for index in valid if contrasts[index].family == family]
        values = holm([estimates[index].two_sided_p() for index in members])
        adjusted |= dict(zip(members, values, strict=True))
    return adjusted


def _comparison(
    contrast: _Contrast, estimate: Estimate, p_holm: float | None, above: tuple[Text, ...], alpha: float
) -> LossStudyComparison:
    low, high = estimate.interval(1 - alpha)
    result = Result(
        treatment=contrast.treatment.condition,
        control=contrast.control.condition,
        unit="nats",
        scale=1.0,
        difference=estimate.difference,
        ci_low=low,
        ci_high=high,
        p_value=estimate.two_sided_p(),
        method=METHODS[estimate.method],
    )
    verdict: ClaimVerdict = "invalid"
    conclusion = audit_wording.invalid(above)
    if p_holm is not None:
        verdict = _verdict(contrast, estimate, p_holm, alpha)
        conclusion = audit_wording.CONCLUSIONS[verdict]
    sentence = joined([audit_wording.numbers(result, p_holm), conclusion])
    return LossStudyComparison(
        comparison_id=contrast.comparison_id,
        family=contrast.family,
        magnitude=contrast.treatment.magnitude,
        order=contrast.treatment.order,
        treatment=contrast.treatment.condition,
        control=contrast.control.condition,
        num_seeds=estimate.num_seeds,
        num_texts=estimate.num_questions,
        difference=estimate.difference,
        ci_low=low,
        ci_high=high,
        p_value=estimate.two_sided_p(),
        p_holm=p_holm,
        p_seed_t=estimate.p_seed_t,
        claim=contrast.claim.en,
        claim_zh=contrast.claim.zh,
        verdict=verdict,
        sentence=sentence.en,
        sentence_zh=sentence.zh,
    )


def _verdict(contrast: _Contrast, estimate: Estimate, p_holm: float, alpha: float) -> ClaimVerdict:
    if p_holm >= alpha:
        return "not_shown"
    return "supported" if ("higher" if estimate.difference > 0 else "lower") == contrast.expected else "refuted"


def _condition(side: _Side, table: pl.DataFrame, receipts: LossStudyReceipts, uniform: float) -> LossStudyCondition:
    rows = table.filter(
        pl.col("condition") == side.condition,
        pl.col("magnitude") == side.magnitude,
        pl.col("order").eq_missing(pl.lit(side.order)),
    )
    passes = [one for one in receipts.passes if _key(one)[:3] == (side.condition, side.magnitude, side.order)]
    flows = [flow for one in passes for flow in one.receipt.gradient_flows]
    seed_means = side.losses.mean(axis=1)
    return LossStudyCondition(
        condition=side.condition,
        magnitude=side.magnitude,
        order=side.order,
        noised_layers=passes[0].noised_layers,
        mean_loss=float(side.losses.mean()),
        seed_sd=float(seed_means.std(ddof=1)) if len(seed_means) > 1 else None,
        mean_text_loss=float(rows["text_loss"].to_numpy().mean()),
        survival_rate=_survival(passes),
        gradient_zeroed_share=_share([flow.zeroed_elements for flow in flows], [flow.elements for flow in flows]),
        gradient_zeroed_norm_share=_share(
            [flow.zeroed_norm**2 for flow in flows], [flow.norm**2 for flow in flows], power=0.5
        ),
        above_uniform=bool(side.losses.mean() > uniform),
    )


def _survival(passes: Sequence[LossStudyPass]) -> float | None:
    cells = [cell for one in passes for cell in one.receipt.fault_cells]
    elements = sum(cell.elements for cell in cells)
    return 1 - sum(cell.affected_elements for cell in cells) / elements if elements else None


def _share(part: Sequence[float], whole: Sequence[float], power: float = 1.0) -> float | None:
    return (sum(part) / sum(whole)) ** power if sum(whole) else None


def _key(one: LossStudyPass) -> tuple[str, float, str | None, int]:
    return one.condition, one.magnitude, one.order, one.noise_seed


def _mismatches(table: pl.DataFrame, receipts: LossStudyReceipts) -> list[str]:
    columns = ["condition", "magnitude", "order", "noise_seed"]
    in_table = set(table.select(columns).unique().iter_rows())
    in_receipts = {_key(one) for one in receipts.passes}
    problems = [f"no receipt for pass {key}" for key in sorted(in_table - in_receipts, key=str)]
    problems += [f"no rows for pass {key}" for key in sorted(in_receipts - in_table, key=str)]
    texts = table.group_by(columns).agg(pl.col("question_id").sort().str.join("\n"))["question_id"].n_unique()
    return problems + (["passes hold different texts"] if texts > 1 else [])
