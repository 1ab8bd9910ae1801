"""Comparisons of a study that declares none: the questions for which its arms were designed."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from types import MappingProxyType
from typing import Literal

from aqnpipe.config.analysis import (
    DEFAULT_FAMILY,
    PRETRAINED,
    ArmComparison,
    Comparison,
    DegradationComparison,
    LevelComparison,
)
from aqnpipe.config.arm import Arm


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
    found: list[Comparison] = []
    clean = 0.0 in noise_levels
    levels = sorted(noise_levels) if every_level else [max(noise_levels)]
    noisy = [level for level in (*levels, *names) if level > 0]
    for name, control in pairs:
        if clean:
            found.append(_accuracy(name, control, usual[name], 0.0, names))
        for level in noisy if control != PRETRAINED else ():
            found.append(_accuracy(name, control, usual[name], level, names))
    if clean:
        found += [_level(name, level, names) for level in noisy for name in usual]
        found += [
            _degradation(name, control, level, names, "higher")
            for level in noisy
            for name, control in pairs
            if control != PRETRAINED
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
        *(_difference(*pair, level, names) for pair in pairs for level in levels),
        *(_level(name, level, names) for name in checkpoints for level in noisy),
        *(_degradation(*pair, level, names, "different") for level in last for pair in pairs),
    )


def _difference(first: str, second: str, level: float, names: Mapping[float, str]) -> ArmComparison:
    where, where_zh = _where(level, names)
    return ArmComparison(
        treatment=first,
        control=second,
        noise_level=level,
        expected="different",
        family="arms",
        claim=f"{first} and {second} differ in accuracy{where}",
        claim_zh=f"{where_zh}{first} 与 {second} 的准确率不同",
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
    arm = arms[name]
    # Arms on other machines are no candidates, because their evaluations differ in more than the training.
    others = {
        other_name: other
        for other_name, other in arms.items()
        if other_name != name and other.model == arm.model and other.machine == arm.machine
    }
    if arm.aqn is not None and not arm.aqn.is_uniform:
        everywhere = {"layer_sigmas_from": None, "layer_sigmas_strategy": "published", "sigmas": None}
        uniform = arm.aqn.model_copy(update={**everywhere, "target_layers": None})
        same = [key for key, other in others.items() if other.aqn == uniform and _noise(other) == _noise(arm)]
        if same:
            return same[0]
    if arm.aqn is not None:
        same = [key for key, other in others.items() if other.aqn is None and _noise(other) == _noise(arm)]
        if same:
            return same[0]
    if _uses_noise(arm):
        noiseless = [key for key, other in others.items() if not _uses_noise(other)]
        if noiseless:
            return noiseless[0]
    return PRETRAINED


def _noise(arm: Arm) -> dict[str, object]:
    """Return the settings of the arm other than AQN that define its noise."""
    return arm.model_dump(
        exclude={"description", "description_zh", "model", "aqn", "machine", "aa_control_of", "seed_offset"}
    )


def _uses_noise(arm: Arm) -> bool:
    return arm.aqn is not None or _noise(arm) != _noise(Arm(description=""))


def _accuracy(name: str, counterpart: str, arm: Arm, level: float, names: Mapping[float, str]) -> ArmComparison:
    hurts = counterpart != PRETRAINED and arm.aqn is None and level == 0
    word, word_zh = ("lower", "低于") if hurts else ("higher", "高于")
    where, where_zh = _where(level, names)
    return ArmComparison(
        treatment=name,
        control=counterpart,
        noise_level=level,
        expected="lower" if hurts else "higher",
        family=DEFAULT_FAMILY if counterpart == PRETRAINED else "arms",
        role="control" if counterpart == PRETRAINED else "secondary",
        claim=f"{name} has {word} accuracy than {counterpart}{where}",
        claim_zh=f"{where_zh}{name} 的准确率{word_zh} {counterpart}",
    )


def _level(name: str, level: float, names: Mapping[float, str]) -> LevelComparison:
    noise, noise_zh = _noise_in_words(level, names)
    return LevelComparison(
        arm=name,
        noise_level=level,
        role="control",
        claim=f"{noise} costs {name} accuracy",
        claim_zh=f"{noise_zh}降低 {name} 的准确率",
    )


def _degradation(
    name: str, counterpart: str, level: float, names: Mapping[float, str], expected: Literal["higher", "different"]
) -> DegradationComparison:
    noise, noise_zh = _noise_in_words(level, names)
    if expected == "higher":
        claim = f"{name} loses less to {noise} than {counterpart}"
        claim_zh = f"{noise_zh}下 {name} 的损失小于 {counterpart}"
    else:
        claim = f"{name} and {counterpart} differ in what {noise} costs them"
        claim_zh = f"{noise_zh}对 {name} 与 {counterpart} 的影响不同"
    return DegradationComparison(
        treatment=name,
        control=counterpart,
        noise_level=level,
        expected=expected,
        family="degradation",
        claim=claim,
        claim_zh=claim_zh,
    )


def _where(level: float, names: Mapping[float, str]) -> tuple[str, str]:
    """Return where a comparison is made, in English and Chinese, to be put into a claim; empty without noise."""
    if level == 0:
        return "", ""
    noise, noise_zh = _noise_in_words(level, names)
    return (f" under {noise}" if level in names else f" at {noise}"), f"{noise_zh}下"


def _noise_in_words(level: float, names: Mapping[float, str]) -> tuple[str, str]:
    """Return an evaluation noise in English and Chinese."""
    if level in names:
        return f"the noise {names[level]}", f"噪声 {names[level]} "
    percent = f"{100 * level:.3g} %"
    return f"{percent} evaluation noise", f"{percent} 评估噪声"
