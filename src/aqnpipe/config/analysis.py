"""Training seeds, declared comparisons and the usual ones of a study without, and settings of statistics and report."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter, WithJsonSchema

from aqnpipe.config.arm import Arm
from aqnpipe.config.base import EACH_ONCE, FrozenModel, TrainingSeed
from aqnpipe.config.noise import AdaptiveNoise

PRETRAINED = "pretrained"
"""Used in place of an arm id: the model before training."""

ComparedLevel = Annotated[
    float, Field(ge=0), WithJsonSchema({"anyOf": [{"type": "number", "minimum": 0}, {"type": "string"}]})
]
"""A noise level that the study evaluates, or the name of a noise, which `load_study` replaces by its number."""

Direction = Literal["higher", "lower", "different"]
"""different: in either direction."""
TestKind = Literal["superiority", "non_inferiority", "equivalence"]
ClaimRole = Literal["primary", "secondary", "control"]
TestedUnit = Literal["question", "batch"]
DEFAULT_FAMILY = "main"


class TestedClaim(FrozenModel):
    """A claim, how it is tested, and the family of secondary claims that shares its error rate.

    - superiority: the difference is above 0, below 0, or not 0 (see `expected`).
    - non_inferiority: the difference is above -margin ("loses no more than").
    - equivalence: the difference is between -margin and margin (two one-sided tests).
    """

    claim: str
    """the claim as a sentence"""
    claim_zh: str | None = None
    """the claim in Chinese; null: reports use `claim`"""
    test: TestKind = "superiority"
    margin: float | None = Field(default=None, gt=0, lt=1)
    """for non_inferiority and equivalence; a fraction: 0.02 is 2 percentage points"""
    expected: Direction | None = None
    """for superiority: the sign of the difference that is claimed"""
    family: str = Field(default=DEFAULT_FAMILY, min_length=1)
    """group of secondary claims that are tested together, by Holm's adjustment"""
    role: ClaimRole = "secondary"
    """primary: the claim that answers the study's question, at most one, tested by itself; control: expected to hold in
    any working study, a check that is tested by itself; secondary: shares the error rate of its `family`"""
    equivalent_within: float | None = Field(default=None, gt=0, lt=1)
    """for superiority in a study with adaptive seeds: differences smaller than this do not matter, and the claim may
    end as equivalent; a fraction"""

    def _problems(self) -> Iterator[str]:
        if self.role != "secondary" and self.family != DEFAULT_FAMILY:
            yield f"family: found {self.family!r}, expected none: a {self.role} claim is tested by itself"
        if self.equivalent_within is not None and self.test != "superiority":
            yield f"equivalent_within is for test: superiority; {self.test} uses margin"
        if self.test == "superiority":
            if self.margin is not None:
                yield "margin is for test: non_inferiority or equivalence"
            if self.direction is None:
                yield "superiority needs expected: higher, lower or different"
        else:
            if self.margin is None:
                yield f"{self.test} needs a margin, fixed before the data are seen"
            if self.expected is not None:
                yield f"expected is for test: superiority; {self.test} uses margin"

    @property
    def direction(self) -> Direction | None:
        """The claimed direction of a superiority test; None for tests against a margin."""
        return self.expected


class TwoArms(TestedClaim):
    """A comparison of one arm with another, both after their last step."""

    treatment: str
    control: str

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.treatment == self.control:
            yield "treatment and control must differ"


class ArmComparison(TwoArms):
    """Accuracy of treatment minus accuracy of control, at one evaluation noise level."""

    kind: Literal["arms"] = "arms"
    noise_level: ComparedLevel = 0.0


class DegradationComparison(TwoArms):
    """Accuracy change from level 0 to `noise_level` of the treatment minus that of the control.

    Higher means that the treatment loses less.
    """

    kind: Literal["degradation"] = "degradation"
    noise_level: Annotated[ComparedLevel, Field(gt=0)]


class LevelComparison(TestedClaim):
    """Accuracy of one arm at a noise level minus its accuracy without noise."""

    kind: Literal["levels"] = "levels"
    arm: str
    noise_level: Annotated[ComparedLevel, Field(gt=0)]

    @property
    def direction(self) -> Direction | None:
        """The claimed direction; by default noise is expected to lower accuracy."""
        return self.expected or ("lower" if self.test == "superiority" else None)


Comparison = Annotated[ArmComparison | LevelComparison | DegradationComparison, Field(discriminator="kind")]


class StatisticsConfig(FrozenModel):
    """Error rate and power of the analysis, and the published figures to check."""

    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    """error rate of the primary claim, of each control, and of each `family` of secondary claims"""
    power: float = Field(default=0.8, gt=0.5, lt=1)
    """power for which the minimum detectable difference is computed"""
    compared_levels: Literal["highest", "all"] = "highest"
    """noise levels of the usual comparisons besides 0: the highest, or all; Holm's correction then covers more of
    them"""
    unit: TestedUnit = "question"
    """unit of tests and intervals: the question, or its cluster if the data set names clusters; batch: the questions
    that were decoded in one batch, where their noise has a part in common"""
    published: str | None = None
    """file of published figures to check along with the study; null: none"""


class ArmPair(FrozenModel):
    """Two arms at one evaluation noise level."""

    treatment: str
    control: str
    noise_level: ComparedLevel = 0.0


class ReportConfig(FrozenModel):
    """Title, language and content of the report."""

    title: str
    title_zh: str | None = None
    """the title in a Chinese report; null: the English one, marked"""
    question: str
    """the question of the study, shown at the top"""
    question_zh: str | None = None
    """the question in a Chinese report; null: the English one, marked"""
    language: Literal["en", "zh"] = "en"
    """language of the report and the summary"""
    explore: ArmPair | None = None
    """arms whose flipped questions are shown; null: of the primary claim, else the first"""


MAX_LOOKS = 50
MOST_SEEDS = 10_000
"""Most seeds of an arm. Planning takes time in proportion, and no study needs as many."""

FixedSeeds = Annotated[tuple[TrainingSeed, ...], Field(min_length=1, max_length=MOST_SEEDS), EACH_ONCE]


class AdaptiveSeeds(FrozenModel):
    """Seeds that are added while claims are open: 0 to start - 1, then `step` per interim analysis, up to `max`.

    Arms of open claims get more seeds, other arms keep theirs. Raising `max` continues a finished study.
    """

    start: int = Field(default=2, ge=2)
    """seeds of every arm before the first look at the claims"""
    step: int = Field(default=2, ge=1)
    """seeds added after an interim analysis to arms with open claims"""
    max: int = Field(le=MOST_SEEDS)
    """most seeds of an arm: `start` plus a multiple of `step`; may be raised later"""
    futility: float = Field(default=0.05, ge=0, lt=0.5)
    """a claim stays open without more seeds where its probability of being decided by `max` is lower"""
    reserve: float = Field(default=0.1, ge=0, lt=0.5)
    """share of the error rate kept for analyses after `max` is raised; 0: `max` cannot be raised"""

    def _problems(self) -> Iterator[str]:
        if self.max < self.start or (self.max - self.start) % self.step:
            above = self.start + -(-max(self.max - self.start, 0) // self.step) * self.step
            yield (
                f"max: found {self.max}, expected start plus a multiple of step, for example {above} "
                f"(start {self.start}, step {self.step})"
            )
        if self.num_looks > MAX_LOOKS:
            yield f"max: {self.num_looks} interim analyses, expected at most {MAX_LOOKS}"

    @property
    def num_looks(self) -> int:
        """Number of looks up to `max` seeds."""
        return 1 + (self.max - self.start) // self.step

    def seeds_at(self, look: int) -> int:
        """Return the number of seeds at a look; the first look is 1."""
        return self.start + (look - 1) * self.step


Seeds = Annotated[
    Annotated[FixedSeeds, Tag("list")] | Annotated[AdaptiveSeeds, Tag("AdaptiveSeeds")],
    Discriminator(lambda seeds: "AdaptiveSeeds" if isinstance(seeds, Mapping | AdaptiveSeeds) else "list"),
]
"""A list of seeds, or the rule by which they are added; mistakes in one form are not judged as the other."""


def seed_numbers(seeds: tuple[int, ...] | AdaptiveSeeds) -> tuple[int, ...]:
    """Return all seeds that a study may use: those of the list, or 0 to max - 1."""
    return tuple(range(seeds.max)) if isinstance(seeds, AdaptiveSeeds) else seeds


def default_comparisons(
    arms: Mapping[str, Arm],
    noise_levels: Sequence[float],
    names: Mapping[float, str] = MappingProxyType({}),
    *,
    every_level: bool = False,
) -> tuple[Comparison, ...]:
    """Return the usual comparisons for `arms`, A/A controls excluded; the controls among them are in no family.

    - arms: a clean arm against the pretrained model; a noise arm against the clean arm; an AQN arm against the arm with
      the same noise and no AQN; an arm with sigmas from a diagnosis against the one with uniform sigmas and, if it
      is robust_first, against the same sigmas in a random order.
    - levels (controls): every arm at the highest noise level, and under each named noise, against itself without noise.
    - degradation: accuracy lost to that level, by a noise or AQN arm against each of its counterparts.

    `names` of the named noises by level, under which arms are compared as at the highest level. With `every_level` they
    are compared like that at all levels.
    Comparisons that need level 0, or a level above 0, are omitted if the study does not evaluate it.
    """
    usual = {name: arm for name, arm in arms.items() if arm.aa_control_of is None}
    pairs = [(name, control) for name in usual for control in _controls(name, usual)]
    # What costs accuracy without noise is the noise in training.
    is_lower = {pair: pair[1] != PRETRAINED and usual[pair[0]].aqn is None for pair in pairs}
    of_training = [pair for pair in pairs if pair[1] != PRETRAINED]
    clean = 0.0 in noise_levels
    levels = sorted(noise_levels) if every_level else [max(noise_levels)]
    noisy = [level for level in (*levels, *names) if level > 0]
    found: list[Comparison] = []
    for pair in pairs:
        kept = {"family": "arms"} if pair in of_training else {"role": "control"}
        if clean:
            found.append(_claimed("arms", "lower" if is_lower[pair] else "higher", 0.0, names, *pair, **kept))
        for level in noisy if pair in of_training else ():
            found.append(_claimed("arms", "higher", level, names, *pair, **kept))
    if clean:
        found += [_claimed("levels", None, level, names, name, role="control") for level in noisy for name in usual]
        found += [
            _claimed("degradation", "higher", level, names, *pair, family="degradation")
            for level in noisy
            for pair in of_training
        ]
    return tuple(found)


def all_pairs(
    checkpoints: Sequence[str], noise_levels: Sequence[float], names: Mapping[float, str] = MappingProxyType({})
) -> tuple[Comparison, ...]:
    """Return the comparisons of given checkpoints, in two families, and controls.

    - arms: every pair at every level. Controls: every checkpoint at every level above 0 against itself without noise.
    - degradation: accuracy lost to the highest level and to each named noise, for every pair.

    `names` of the named noises by level. Comparisons that need level 0 are omitted if the study does not evaluate it.
    """
    levels = [*sorted(noise_levels), *names]
    noisy = [level for level in levels if level > 0] if 0.0 in levels else []
    last = [level for level in noisy if level in names or level == max(noise_levels)]
    pairs = list(combinations(checkpoints, 2))
    return (
        *(_claimed("arms", "different", level, names, *pair, family="arms") for pair in pairs for level in levels),
        *(_claimed("levels", None, level, names, name, role="control") for name in checkpoints for level in noisy),
        *(
            _claimed("degradation", "different", level, names, *pair, family="degradation")
            for level in last
            for pair in pairs
        ),
    )


def _controls(name: str, arms: Mapping[str, Arm]) -> list[str]:
    """Return the controls of an arm; none for shuffled sigmas, which are themselves a control (ADR 7)."""
    arm = arms[name]
    strategy = arm.aqn.layer_sigmas_strategy if arm.aqn is not None else "published"
    if strategy == "shuffled_layers":
        return []
    return [_counterpart(name, arms), *_shuffled(arm, arms)]


def _shuffled(arm: Arm, arms: Mapping[str, Arm]) -> Iterator[str]:
    """Yield the arms with the sigmas of `arm` in a random order, if it has robust_first and there are any."""
    if arm.aqn is None or arm.aqn.layer_sigmas_strategy != "robust_first":
        return
    wanted = arm.aqn.model_copy(update={"layer_sigmas_strategy": "shuffled_layers"})
    for name, other in arms.items():
        if other.aqn == wanted and _noise(other) == _noise(arm) and other.model == arm.model:
            yield name


def _counterpart(name: str, arms: Mapping[str, Arm]) -> str:
    """Return the arm that lacks only the last addition of `name`; the pretrained model if the study has no such arm."""
    arm, noise = arms[name], _noise(arms[name])
    wanted: list[tuple[AdaptiveNoise | None, dict[str, object]]] = []
    if arm.aqn is not None and not arm.aqn.is_uniform:
        everywhere = {"layer_sigmas_from": None, "layer_sigmas_strategy": "published", "sigmas": None}
        wanted.append((arm.aqn.model_copy(update={**everywhere, "target_layers": None}), noise))
    if arm.aqn is not None:
        wanted.append((None, noise))
    if arm.aqn is not None or noise != _noise(Arm(description="")):
        wanted.append((None, _noise(Arm(description=""))))
    # Arms on other machines are no candidates, because their evaluations differ in more than the training.
    others = {
        key: one for key, one in arms.items() if key != name and (one.model, one.machine) == (arm.model, arm.machine)
    }
    found = (key for each in wanted for key, one in others.items() if (one.aqn, _noise(one)) == each)
    return next(found, PRETRAINED)


def _noise(arm: Arm) -> dict[str, object]:
    """Return the settings of the arm other than AQN that define its noise."""
    return arm.model_dump(
        exclude={"description", "description_zh", "model", "aqn", "machine", "aa_control_of", "seed_offset"}
    )


_CLAIMS: dict[tuple[str, Direction | None], tuple[str, str]] = {
    ("arms", "higher"): ("{first} has higher accuracy than {second}{where}", "{where_zh}{first} 的准确率高于 {second}"),
    ("arms", "lower"): ("{first} has lower accuracy than {second}{where}", "{where_zh}{first} 的准确率低于 {second}"),
    ("arms", "different"): (
        "{first} and {second} differ in accuracy{where}",
        "{where_zh}{first} 与 {second} 的准确率不同",
    ),
    ("degradation", "higher"): (
        "{first} loses less to {noise} than {second}",
        "{noise_zh}下 {first} 的损失小于 {second}",
    ),
    ("degradation", "different"): (
        "{first} and {second} differ in what {noise} costs them",
        "{noise_zh}对 {first} 与 {second} 的影响不同",
    ),
    ("levels", None): ("{noise} costs {first} accuracy", "{noise_zh}降低 {first} 的准确率"),
}
"""Claims by kind and expected direction, in English and Chinese."""

_COMPARISON: TypeAdapter[Comparison] = TypeAdapter(Comparison)


def _claimed(
    kind: str,
    expected: Direction | None,
    level: float,
    names: Mapping[float, str],
    first: str,
    second: str = "",
    **more: str,
) -> Comparison:
    """Return a comparison at a level with its claim in words; `more`: its role or family."""
    percent = f"{100 * level:.3g} %"
    noise, noise_zh = f"{percent} evaluation noise", f"{percent} 评估噪声"
    if level in names:
        noise, noise_zh = f"the noise {names[level]}", f"噪声 {names[level]} "
    where = f" {'under' if level in names else 'at'} {noise}" if level else ""
    words = {"first": first, "second": second, "noise": noise, "noise_zh": noise_zh, "where": where}
    claim, claim_zh = (
        text.format(**words, where_zh=f"{noise_zh}下" if level else "") for text in _CLAIMS[kind, expected]
    )
    sides = {"treatment": first, "control": second, "expected": expected} if second else {"arm": first}
    return _COMPARISON.validate_python(
        {"kind": kind, "noise_level": level, "claim": claim, "claim_zh": claim_zh, **sides, **more}
    )
