"""From a declared comparison to two aligned score matrices, or to the reason why there can be none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from aqnpipe.artifacts import SeedComparison
from aqnpipe.config.analysis import PRETRAINED, ArmComparison, Comparison
from aqnpipe.config.study import Study
from aqnpipe.statistics.evaluations import LoadedEvaluation, setting_difference
from aqnpipe.statistics.paired import mcnemar_exact_p, newcombe_interval, paired_counts

FloatArray = npt.NDArray[np.float64]
RunKey = tuple[str, str, int]
"""(model role, arm, seed)."""


@dataclass(frozen=True)
class Side:
    """One side of a comparison: an arm of a model at a noise level."""

    model: str
    arm: str
    noise_level: float


@dataclass(frozen=True)
class Contrast:
    """A declared comparison with its data: scores[seed, question] in [0, 1], or `invalid_reason`.

    A control of one row (the pretrained model) stands against every treatment seed.
    """

    comparison_id: str
    comparison: Comparison
    treatment: Side
    control: Side
    seeds: tuple[int, ...]
    treatment_scores: FloatArray
    control_scores: FloatArray
    seed_tables: tuple[SeedComparison, ...]
    invalid_reason: str | None


class RefusedError(Exception):
    """A comparison cannot be made; the message is the reason (it becomes the verdict `invalid`, never a traceback)."""


def last_evaluations(evaluations: Sequence[LoadedEvaluation]) -> dict[RunKey, LoadedEvaluation]:
    """Return the evaluation of the last step of every run."""
    latest: dict[RunKey, LoadedEvaluation] = {}
    for evaluation in evaluations:
        source = evaluation.source
        key = (source.model, source.arm, source.seed)
        if key not in latest or latest[key].source.step < source.step:
            latest[key] = evaluation
    return latest


def build_contrasts(study: Study, latest: Mapping[RunKey, LoadedEvaluation], alpha: float) -> list[Contrast]:
    """Resolve every declared comparison of the study against the evaluations of the last steps."""
    contrasts: list[Contrast] = []
    for comparison in study.config.comparisons:
        treatment, control = _sides(study, comparison)
        wanted = _comparison_id(treatment, control)
        number = sum(one.comparison_id.split("#")[0] == wanted for one in contrasts) + 1
        identifier = wanted if number == 1 else f"{wanted}#{number}"
        contrasts.append(_contrast(identifier, comparison, treatment, control, study, latest, alpha))
    return contrasts


def _contrast(
    identifier: str,
    comparison: Comparison,
    treatment: Side,
    control: Side,
    study: Study,
    latest: Mapping[RunKey, LoadedEvaluation],
    alpha: float,
) -> Contrast:
    nothing = np.zeros((0, 0))
    try:
        pairs = _paired_runs(treatment, control, latest)
        for first, second in pairs:
            _refuse_bad_pair(first, second, treatment, control, study)
        _refuse_unlike_runs([run for pair in pairs for run in pair])
        one_control = control.arm == PRETRAINED and treatment.arm != PRETRAINED
        return Contrast(
            comparison_id=identifier,
            comparison=comparison,
            treatment=treatment,
            control=control,
            seeds=tuple(first.source.seed for first, _ in pairs),
            treatment_scores=_scores([first for first, _ in pairs], treatment.noise_level),
            control_scores=_scores(
                [second for _, second in (pairs[:1] if one_control else pairs)], control.noise_level
            ),
            seed_tables=tuple(_seed_table(*pair, treatment, control, alpha) for pair in pairs),
            invalid_reason=None,
        )
    except RefusedError as refusal:
        return Contrast(identifier, comparison, treatment, control, (), nothing, nothing, (), str(refusal))


def _sides(study: Study, comparison: Comparison) -> tuple[Side, Side]:
    if isinstance(comparison, ArmComparison):
        names = (comparison.treatment, comparison.control)
        trained = [name for name in names if name != PRETRAINED]
        model_of = {name: study.arms[name].model for name in trained}
        model_of[PRETRAINED] = model_of[trained[0]]
        level = comparison.noise_level
        first, second = (Side(model_of[name], name, level) for name in names)
        return first, second
    role = study.model_roles()[0] if comparison.arm == PRETRAINED else study.arms[comparison.arm].model
    return Side(role, comparison.arm, comparison.noise_level), Side(role, comparison.arm, 0.0)


def _comparison_id(treatment: Side, control: Side) -> str:
    if treatment.arm == control.arm:
        return f"{treatment.arm}@{treatment.noise_level:g}-vs-{control.noise_level:g}"
    return f"{treatment.arm}-vs-{control.arm}@{treatment.noise_level:g}"


def _paired_runs(
    treatment: Side, control: Side, latest: Mapping[RunKey, LoadedEvaluation]
) -> list[tuple[LoadedEvaluation, LoadedEvaluation]]:
    """Pair runs of equal seed; a pretrained model, which has one "seed", stands against every run of the other side."""
    if treatment.model != control.model:
        raise RefusedError(
            f"{treatment.arm} trains the model {treatment.model}, {control.arm} the model {control.model}"
        )
    seeds = {
        side: sorted(seed for model, arm, seed in latest if (model, arm) == (side.model, side.arm))
        for side in (treatment, control)
    }
    for side in (treatment, control):
        if not seeds[side]:
            raise RefusedError(f"no evaluation of {side.model}/{side.arm}")
    if treatment.arm != control.arm and PRETRAINED in (treatment.arm, control.arm):
        trained = control if treatment.arm == PRETRAINED else treatment
        fixed = seeds[treatment if treatment.arm == PRETRAINED else control][0]
        pairs = [(fixed, seed) if trained is control else (seed, fixed) for seed in seeds[trained]]
    else:
        if seeds[treatment] != seeds[control]:
            raise RefusedError(
                f"seeds differ: {seeds[treatment]} for {treatment.arm}, {seeds[control]} for {control.arm}"
            )
        pairs = [(seed, seed) for seed in seeds[treatment]]
    return [
        (latest[treatment.model, treatment.arm, first], latest[control.model, control.arm, second])
        for first, second in pairs
    ]


def _refuse_bad_pair(
    first: LoadedEvaluation, second: LoadedEvaluation, treatment: Side, control: Side, study: Study
) -> None:
    for evaluation, side in ((first, treatment), (second, control)):
        if evaluation.problems:
            raise RefusedError(evaluation.problems[0])
        expected_step = 0 if side.arm == PRETRAINED else study.num_steps
        if evaluation.source.step != expected_step:
            raise RefusedError(f"{evaluation.source.name}: the last evaluated step should be {expected_step}")
        if side.noise_level not in evaluation.levels:
            raise RefusedError(f"{evaluation.source.name}: noise level {side.noise_level:g} was not evaluated")
        if evaluation.levels[side.noise_level].same_responses_as_clean:
            raise RefusedError(
                f"{evaluation.source.name}: every response at noise level {side.noise_level:g} equals the response "
                "without noise, so the noise was probably absent"
            )
    if first.levels[treatment.noise_level].question_ids != second.levels[control.noise_level].question_ids:
        raise RefusedError(f"{first.source.name} and {second.source.name} answered different questions")
    if treatment.noise_level == control.noise_level:
        seeds = [side.levels[treatment.noise_level].noise_seeds for side in (first, second)]
        if seeds[0] != seeds[1]:
            raise RefusedError(
                f"noise seeds differ: {seeds[0]} for {first.source.name}, {seeds[1]} for {second.source.name}"
            )


def _refuse_unlike_runs(runs: Sequence[LoadedEvaluation]) -> None:
    for first, second in pairwise(runs):
        difference = setting_difference(first, second)
        if difference:
            raise RefusedError(f"evaluated differently: {difference}")


def _scores(runs: Sequence[LoadedEvaluation], noise_level: float) -> FloatArray:
    return np.stack([run.levels[noise_level].correct.mean(axis=0) for run in runs])


def _seed_table(
    first: LoadedEvaluation, second: LoadedEvaluation, treatment: Side, control: Side, alpha: float
) -> SeedComparison:
    ours, theirs = first.levels[treatment.noise_level], second.levels[control.noise_level]
    counts = paired_counts(ours.correct[0], theirs.correct[0])
    low, high = newcombe_interval(counts, alpha)
    return SeedComparison(
        seed=second.source.seed if treatment.arm == PRETRAINED else first.source.seed,
        noise_seed=ours.noise_seeds[0],
        both_correct=counts.both_correct,
        only_treatment=counts.only_treatment,
        only_control=counts.only_control,
        neither=counts.neither,
        difference=counts.difference,
        ci_low=low,
        ci_high=high,
        mcnemar_p=mcnemar_exact_p(counts),
    )
