"""Resolve a comparison to two aligned score matrices, or to the reason why it cannot be made."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from aqnpipe.artifacts.comparisons import SeedComparison
from aqnpipe.comparison.evaluations import LoadedEvaluation, Refusal, RefusedError, setting_difference
from aqnpipe.config.analysis import PRETRAINED, Comparison
from aqnpipe.config.study import Study
from aqnpipe.data.scoring import NUMBER_SCORERS, SCORERS
from aqnpipe.statistics.arrays import FloatArray
from aqnpipe.statistics.clusters import Batches, Clusters
from aqnpipe.statistics.crossed_effects import Estimate, estimate_difference
from aqnpipe.statistics.seed_blocks import SeedBlocks, SeedVariance, distinct_runs

Checkpoint = tuple[str, str, int, int]
"""(model role, arm, seed, step)."""

_MAX_NAMED = 3
_SIDES_KEPT = 64
_DIGITS = 9
"""Means of the same answers differ by rounding alone beyond these."""


@dataclass(frozen=True)
class Side:
    """One side of a comparison: an arm of a model at a noise level."""

    model: str
    arm: str
    noise_level: float


@dataclass(frozen=True)
class _SideScores:
    """Scores [seed, question] of a side, averaged over samples and noise seeds, and their mean, also by other scorers.

    `draws`: [noise seed, question], averaged over seeds. `by_scorer`: of those of numbers, if the primary one is of
    numbers.
    """

    correct: FloatArray
    draws: FloatArray
    accuracy: float
    by_scorer: Mapping[str, float]

    def minus(self, other: "_SideScores") -> "_SideScores":
        """Return the differences; a single seed is that of all seeds of the other side."""
        by_scorer = {name: value - other.by_scorer[name] for name, value in self.by_scorer.items()}
        accuracy = self.accuracy - other.accuracy
        return _SideScores(self.correct - other.correct, self.draws - other.draws, accuracy, by_scorer)


@dataclass(frozen=True)
class Scores:
    """Scores[seed, question] of both sides, averaged over samples and noise seeds.

    Correctness in [0, 1]; in a degradation comparison the change due to the noise level, in [-1, 1]. A control of one
    row (the pretrained model) is compared with every treatment seed. The accuracies are those at the sides' noise
    levels. `seed_variance`: variance of this difference between training seeds, moderated by the other arms of the
    model; None with a single seed. `seeds`: of the rows. `bound`: no difference is larger. `by_scorer`: the same
    difference by the other scorers of numbers, if the primary one is of numbers. `clusters`: of the questions; None:
    each is its own. `question_ids`: of the columns. `draws`: differences [noise draw, question], averaged over seeds.
    `batches`: of the questions; None: not known, or they are the clusters. `unchanged`: runs all of whose responses
    equal those at a lower noise level.
    """

    treatment: FloatArray
    control: FloatArray
    treatment_accuracy: float
    control_accuracy: float
    seed_variance: SeedVariance | None
    seeds: tuple[int, ...] = ()
    bound: float = 1.0
    by_scorer: Mapping[str, float] = field(default_factory=dict)
    clusters: Clusters | None = None
    question_ids: tuple[str, ...] = ()
    draws: FloatArray = field(default_factory=lambda: np.empty((0, 0)))
    batches: Batches | None = None
    unchanged: tuple[str, ...] = ()

    def estimate(self) -> Estimate:
        """Return the mean difference and what its tests need."""
        return estimate_difference(self.treatment, self.control, self.seed_variance, self.clusters)

    def by_seed(self, level: float) -> Iterator[SeedComparison]:
        """Yield what each seed shows by itself, with intervals at confidence `level`."""
        for number, seed in enumerate(self.seeds):
            one, other = self.treatment[number][None], self.control[number % len(self.control)][None]
            estimate = estimate_difference(one, other, None, self.clusters)
            rounded = np.round(one - other, _DIGITS)
            better, worse = np.count_nonzero(rounded > 0), np.count_nonzero(rounded < 0)
            yield SeedComparison(
                seed=seed,
                treatment_better=better,
                control_better=worse,
                equal=one.size - better - worse,
                **estimate.columns(level, self.bound),
                p_value=estimate.two_sided_p(),
            )

    @property
    def differences(self) -> FloatArray:
        """Differences [seed, question], or [seed, cluster]."""
        found = self.treatment - self.control
        return found if self.clusters is None else self.clusters.collapsed(found)


@dataclass(frozen=True)
class Contrast:
    """A comparison with its data or with the reason for its refusal: exactly one of `scores` and `refusal` is null.

    of_weights: it is about given checkpoints, not about arms, whose training varies. has_other_tokens: their prompts
    are other tokens, or their responses end otherwise; the questions are the same.
    """

    comparison_id: str
    comparison: Comparison
    treatment: Side
    control: Side
    scores: Scores | None
    refusal: Refusal | None
    of_weights: bool = False
    has_other_tokens: bool = False

    @property
    def bound(self) -> float:
        """The largest value that the difference can have."""
        return 2.0 if self.comparison.kind == "degradation" else 1.0


class Contrasts:
    """Resolves comparisons of a study against the evaluations of the last steps."""

    def __init__(self, study: Study, evaluations: Mapping[Checkpoint, LoadedEvaluation]) -> None:
        self._study = study
        self._evaluations = evaluations
        self._study_seeds = study.seeds
        self._variances: dict[tuple[str, float, bool], ArmVariances] = {}
        # A control is part of every comparison, and a side of several in a row.
        self._at = lru_cache(maxsize=_SIDES_KEPT)(self._side_scores)

    def of(self, comparison: Comparison, identifier: str) -> Contrast:
        """Return a comparison with its data or with the reason for its refusal."""
        treatment, control = self._sides(comparison)
        of_weights = not self._study.has_training
        try:
            pairs = self._pairs(treatment, control)
            for pair in pairs:
                _refuse_bad_pair(*pair, treatment, control, comparison)
            _refuse_unlike_runs([run for pair in pairs for run in pair], of_tokenizers=not of_weights)
            scores = self._scores(pairs, treatment, control, comparison)
        except RefusedError as error:
            return Contrast(identifier, comparison, treatment, control, None, error.refusal, of_weights)
        other_tokens = of_weights and any(setting_difference(*pair) is not None for pair in pairs)
        return Contrast(identifier, comparison, treatment, control, scores, None, of_weights, other_tokens)

    def runs_of(self, model: str, arm: str) -> list[LoadedEvaluation]:
        """Return the evaluations of the last step of every seed of an arm; RefusedError names missing ones."""
        wanted = self._keys(Side(model, arm, 0.0))
        self._refuse_missing(wanted)
        return [self._evaluations[key] for key in wanted]

    def _last_step(self, arm: str) -> int:
        return 0 if arm == PRETRAINED else self._study.num_steps

    def _sides(self, comparison: Comparison) -> tuple[Side, Side]:
        level = comparison.noise_level
        if comparison.kind == "levels":
            arm = comparison.arm
            role = self._study.model_roles()[0] if arm == PRETRAINED else self._study.arms[arm].model
            return Side(role, arm, level), Side(role, arm, 0.0)
        names = (comparison.treatment, comparison.control)
        trained = [name for name in names if name != PRETRAINED]
        model_of = {name: self._study.arms[name].model for name in trained}
        model_of[PRETRAINED] = model_of[trained[0]]
        first, second = (Side(model_of[name], name, level) for name in names)
        return first, second

    def _pairs(self, treatment: Side, control: Side) -> list[tuple[LoadedEvaluation, LoadedEvaluation]]:
        """Pair runs of equal seed; the single evaluation of the pretrained model is paired with every run."""
        if treatment.model != control.model:
            raise RefusedError(
                "model", f"{treatment.arm} trains the model {treatment.model}, {control.arm} the model {control.model}"
            )
        sides = dict.fromkeys((treatment, control))
        self._refuse_missing([key for side in sides for key in self._keys(side)])
        # In a study that adds seeds an arm may have fewer than others, always the first ones.
        number = min((len(self._keys(side)) for side in sides if side.arm != PRETRAINED), default=1)
        return list(zip(self._runs(treatment, number), self._runs(control, number), strict=True))

    def _keys(self, side: Side) -> list[Checkpoint]:
        seeds = (0,) if side.arm == PRETRAINED else self._study.seeds_of(side.arm)
        return [(side.model, side.arm, seed, self._last_step(side.arm)) for seed in seeds]

    def _runs(self, side: Side, number: int) -> list[LoadedEvaluation]:
        """Return the first runs of a side; the pretrained model has one, which is repeated."""
        keys = self._keys(side)
        return [self._evaluations[key] for key in (keys * number if side.arm == PRETRAINED else keys)[:number]]

    def _refuse_missing(self, wanted: Sequence[Checkpoint]) -> None:
        missing = [checkpoint_name(key) for key in dict.fromkeys(wanted) if key not in self._evaluations]
        if missing:
            more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
            raise RefusedError("missing", f"missing evaluations: {', '.join(missing[:_MAX_NAMED])}{more}")

    def _scores(
        self,
        pairs: Sequence[tuple[LoadedEvaluation, LoadedEvaluation]],
        treatment: Side,
        control: Side,
        comparison: Comparison,
    ) -> Scores:
        number = len(pairs)
        num_controls = 1 if control.arm == PRETRAINED and treatment.arm != PRETRAINED else number
        treated, untreated = self._at(treatment, number), self._at(control, num_controls)
        ours, theirs, is_degradation = treated, untreated, comparison.kind == "degradation"
        if is_degradation:
            ours = treated.minus(self._at(replace(treatment, noise_level=0.0), number))
            theirs = untreated.minus(self._at(replace(control, noise_level=0.0), num_controls))
        found, level = ours.minus(theirs), pairs[0][0].levels[treatment.noise_level]
        return Scores(
            treatment=ours.correct,
            control=theirs.correct,
            treatment_accuracy=treated.accuracy,
            control_accuracy=untreated.accuracy,
            seed_variance=self._seed_variance(treatment, control, comparison),
            seeds=tuple(pair[1 if treatment.arm == PRETRAINED else 0].source.seed for pair in pairs),
            bound=2.0 if is_degradation else 1.0,
            by_scorer=found.by_scorer,
            clusters=level.clusters,
            draws=found.draws,
            batches=level.batches,
            question_ids=level.question_ids,
            unchanged=_unchanged([pair[0] for pair in pairs], treatment)
            + _unchanged([pair[1] for pair in pairs], control),
        )

    def _side_scores(self, side: Side, number: int) -> _SideScores:
        """Return the scores of `number` runs of a side."""
        runs, level = self._runs(side, number), side.noise_level
        primary = self._study.config.evaluation.primary_scorer
        if len({run.levels[level].noise_seeds for run in runs}) > 1:
            raise RefusedError("noise_seeds", f"{side.arm}: seeds were evaluated with different noise seeds")
        scores = np.stack([run.levels[level].correct for run in runs])
        correct = scores.mean(axis=1)
        return _SideScores(
            correct,
            scores.mean(axis=0),
            float(correct.mean()),
            {
                scorer: float(np.mean([run.accuracy_at[level][f"accuracy_{scorer}"] for run in runs]))
                for scorer in (SCORERS if primary in NUMBER_SCORERS else ())
                if scorer != primary
            },
        )

    def _seed_variance(self, treatment: Side, control: Side, comparison: Comparison) -> SeedVariance | None:
        compared = [arm for arm in dict.fromkeys((treatment.arm, control.arm)) if arm != PRETRAINED]
        change = comparison.kind != "arms"
        key = (treatment.model, treatment.noise_level, change)
        if key not in self._variances:
            levels = [0.0, treatment.noise_level] if change else [treatment.noise_level]
            self._variances[key] = self.variances(treatment.model, dict(self._means_of_arms(treatment.model, levels)))
        return self._variances[key].of(*compared)

    def variances(self, model: str, means: Mapping[str, FloatArray]) -> "ArmVariances":
        """Return the variances between seeds of trained arms of a model, from means[arm][seed].

        The seeds are those of the study; a mean is NaN where the run is missing.
        """
        return ArmVariances(
            means,
            {arm: self._weights(model, arm) for arm in means},
            {arm: self._study.arms[arm].seed_offset for arm in means},
        )

    def _weights(self, model: str, arm: str) -> list[str | None]:
        step = self._last_step(arm)
        found = (self._evaluations.get((model, arm, seed, step)) for seed in self._study_seeds)
        return [None if one is None else one.weights for one in found]

    def _means_of_arms(self, model: str, levels: Sequence[float]) -> Iterator[tuple[str, FloatArray]]:
        """Yield every trained arm with its mean scores [seed] at the last level, less those at the first of two."""
        for arm in (name for name, settings in self._study.arms.items() if settings.model == model):
            yield arm, np.array([self._mean(model, arm, seed, levels) for seed in self._study_seeds])

    def _mean(self, model: str, arm: str, seed: int, levels: Sequence[float]) -> float:
        """Return the mean of a run; NaN if it was not evaluated or must not be used."""
        evaluation = self._evaluations.get((model, arm, seed, self._last_step(arm)))
        if evaluation is None:
            return math.nan
        try:
            refuse_bad_evaluation(evaluation, levels)
        except RefusedError:
            return math.nan
        first, last = (evaluation.levels[level].mean for level in (levels[0], levels[-1]))
        return last - first if len(levels) > 1 else last


class ArmVariances:
    """Variances between seeds of arms: of one arm, or of the difference of two.

    means, weights: mean scores, and digests of weights, of each arm [seed]. offsets: of the seeds of each arm.
    """

    def __init__(
        self,
        means: Mapping[str, FloatArray],
        weights: Mapping[str, Sequence[str | None]],
        offsets: Mapping[str, int],
    ) -> None:
        self._means, self._weights, self._offsets = means, weights, offsets
        runs = Counter(identity for row in weights.values() for identity in row if identity is not None)
        self._repeated = {arm for arm, row in weights.items() if any(runs[str(identity)] > 1 for identity in row)}
        self._shared: dict[int, tuple[dict[str, int], SeedBlocks]] = {}

    def of(self, *compared: str) -> SeedVariance | None:
        """Return the variance of one arm or of the difference of two; None without any, and with a single seed."""
        if not compared or any(name not in self._means for name in compared):
            return None
        rows, blocks = self._blocks(compared)
        return blocks.of_arm(rows[compared[0]]) if len(compared) == 1 else blocks.of_pair(*(rows[a] for a in compared))

    def _blocks(self, compared: Sequence[str]) -> tuple[Mapping[str, int], SeedBlocks]:
        """Return the arms that estimate the variance, with their rows; they are the same for nearly every pair."""
        # Only arms whose seeds are those of all compared ones: an A/A control may have seeds of its own.
        first, *others = {self._offsets[name] for name in compared}
        if others:
            return self._stacked(compared)
        is_own = not self._repeated.isdisjoint(compared)
        if is_own or first not in self._shared:
            # Of runs that occur several times, those of the compared arms are kept.
            order = [*compared, *self._means] if is_own else self._means
            stacked = self._stacked([name for name in dict.fromkeys(order) if self._offsets[name] == first])
            return stacked if is_own else self._shared.setdefault(first, stacked)
        return self._shared[first]

    def _stacked(self, arms: Sequence[str]) -> tuple[dict[str, int], SeedBlocks]:
        means = distinct_runs(np.stack([self._means[arm] for arm in arms]), [self._weights[arm] for arm in arms])
        return {arm: row for row, arm in enumerate(arms)}, SeedBlocks(means)


def checkpoint_name(checkpoint: Checkpoint) -> str:
    """Return the name of an evaluated checkpoint in messages."""
    model, arm, seed, step = checkpoint
    return f"{model}/{arm} seed {seed} step {step}"


def _refuse_bad_pair(
    first: LoadedEvaluation, second: LoadedEvaluation, treatment: Side, control: Side, comparison: Comparison
) -> None:
    for evaluation, side in ((first, treatment), (second, control)):
        levels = [0.0, side.noise_level] if comparison.kind == "degradation" else [side.noise_level]
        refuse_bad_evaluation(evaluation, levels)
    treated, untreated = first.levels[treatment.noise_level], second.levels[control.noise_level]
    if treated.question_ids != untreated.question_ids:
        raise RefusedError("questions", f"{first.source.name} and {second.source.name} answered different questions")
    if treatment.noise_level == control.noise_level and treated.noise_seeds != untreated.noise_seeds:
        raise RefusedError(
            "noise_seeds",
            f"noise seeds differ: {treated.noise_seeds} for {first.source.name}, "
            f"{untreated.noise_seeds} for {second.source.name}",
        )
    if treated.num_samples != untreated.num_samples:
        raise RefusedError(
            "setting",
            f"samples per question differ: {treated.num_samples} for {first.source.name}, "
            f"{untreated.num_samples} for {second.source.name}",
        )
    if treatment.arm != control.arm and first.weights is not None and first.weights == second.weights:
        raise RefusedError("model", f"{first.source.name} and {second.source.name} are the same weights")


def _unchanged(runs: Sequence[LoadedEvaluation], side: Side) -> tuple[str, ...]:
    """Return the runs of a side whose responses are those of a lower level: noise too small to change an answer."""
    names = (run.source.name for run in runs if run.levels[side.noise_level].same_responses_as is not None)
    return tuple(dict.fromkeys(names))


def refuse_bad_evaluation(evaluation: LoadedEvaluation, levels: Sequence[float]) -> None:
    """Raise RefusedError if an evaluation cannot be used at `levels`."""
    for problem in evaluation.problems:
        raise RefusedError(problem.kind, problem.reason)
    for level in levels:
        if level not in evaluation.levels:
            raise RefusedError("level", f"{evaluation.source.name}: noise level {level:g} was not evaluated")


def _refuse_unlike_runs(runs: Sequence[LoadedEvaluation], *, of_tokenizers: bool) -> None:
    for first, second in pairwise(runs):
        difference = setting_difference(first, second, of_tokenizers=of_tokenizers)
        if difference:
            raise RefusedError("setting", f"evaluated differently: {difference}")
