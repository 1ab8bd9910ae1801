"""What a study compares where it declares nothing: the questions that its arms were made for."""

from collections.abc import Iterator, Mapping, Sequence

from aqnpipe.config.analysis import PRETRAINED, ArmComparison, Comparison, DegradationComparison, LevelComparison
from aqnpipe.config.arm import Arm
from aqnpipe.config.diagnosis import SigmaStrategy

ENERGY_CONTROLS: tuple[SigmaStrategy, ...] = ("healthy_layers", "random_layers", "wrong_layers")
"""Strategies that put the energy of `targeted` elsewhere (ADR 7)."""


def default_comparisons(arms: Mapping[str, Arm], noise_levels: Sequence[float]) -> tuple[Comparison, ...]:
    """Return the usual comparisons for `arms` (sham controls aside), in three families.

    arms: a clean arm against the pretrained model, a noise arm against the clean one, an AQN arm against its
    counterpart without AQN (the same noise), sigmas from a diagnosis against uniform ones and, where they target the
    fault, against their controls of equal energy. levels: every arm at the highest noise level against itself without
    noise. degradation: what that level costs a noise or AQN arm against what it costs its counterparts. What needs the
    level 0 or a level above is left out where the study has none.
    """
    usual = {name: arm for name, arm in arms.items() if arm.aa_control_of is None}
    pairs = [(name, control) for name in usual for control in _controls(name, usual)]
    found: list[Comparison] = []
    clean, top = 0.0 in noise_levels, max(noise_levels)
    for name, control in pairs:
        if clean:
            found.append(_accuracy(name, control, usual[name], 0.0))
        if top > 0 and control != PRETRAINED:
            found.append(_accuracy(name, control, usual[name], top))
    if clean and top > 0:
        found += [_level(name, top) for name in usual]
        found += [_degradation(name, control, top) for name, control in pairs if control != PRETRAINED]
    return tuple(found)


def _controls(name: str, arms: Mapping[str, Arm]) -> list[str]:
    """Return what an arm is compared with; a control of equal energy is compared by the arm that it controls."""
    arm = arms[name]
    strategy = arm.aqn.layer_sigmas_strategy if arm.aqn is not None else "published"
    if strategy in ENERGY_CONTROLS:
        return []
    return [_counterpart(name, arms), *(_energy_controls(arm, arms) if strategy == "targeted" else [])]


def _energy_controls(arm: Arm, arms: Mapping[str, Arm]) -> Iterator[str]:
    for other, one in arms.items():
        if arm.aqn is None or one.aqn is None or one.aqn.layer_sigmas_strategy not in ENERGY_CONTROLS:
            continue
        same = one.aqn.model_copy(update={"layer_sigmas_strategy": arm.aqn.layer_sigmas_strategy})
        if same == arm.aqn and _noise(one) == _noise(arm) and one.model == arm.model:
            yield other


def _counterpart(name: str, arms: Mapping[str, Arm]) -> str:
    """Return the arm that lacks just the step that `name` adds; the pretrained model where the study has none."""
    arm = arms[name]
    # Evaluations on different machines differ in more than training.
    others = {
        other: one
        for other, one in arms.items()
        if other != name and one.model == arm.model and one.machine == arm.machine
    }
    if arm.aqn is not None and arm.aqn.layer_sigmas_from is not None:
        uniform = arm.aqn.model_copy(update={"layer_sigmas_from": None, "layer_sigmas_strategy": "published"})
        same = [other for other, one in others.items() if one.aqn == uniform and _noise(one) == _noise(arm)]
        if same:
            return same[0]
    if arm.aqn is not None:
        same = [other for other, one in others.items() if one.aqn is None and _noise(one) == _noise(arm)]
        if same:
            return same[0]
    if _uses_noise(arm):
        quiet = [other for other, one in others.items() if not _uses_noise(one)]
        if quiet:
            return quiet[0]
    return PRETRAINED


def _noise(arm: Arm) -> dict[str, object]:
    """Return everything that the arm adds besides AQN."""
    return arm.model_dump(exclude={"description", "model", "aqn", "machine", "aa_control_of", "seed_offset"})


def _uses_noise(arm: Arm) -> bool:
    return arm.aqn is not None or _noise(arm) != _noise(Arm(description=""))


def _accuracy(name: str, counterpart: str, arm: Arm, level: float) -> ArmComparison:
    hurts = counterpart != PRETRAINED and arm.aqn is None and level == 0
    word, word_zh = ("lower", "低于") if hurts else ("higher", "高于")
    where, where_zh = (
        (f" at {_percent(level)} evaluation noise", f"{_percent(level)} 评估噪声下") if level else ("", "")
    )
    return ArmComparison(
        treatment=name,
        control=counterpart,
        noise_level=level,
        expected="lower" if hurts else "higher",
        family="arms",
        claim=f"{name} has {word} accuracy than {counterpart}{where}",
        claim_zh=f"{where_zh}{name} 的准确率{word_zh} {counterpart}",
    )


def _level(name: str, level: float) -> LevelComparison:
    return LevelComparison(
        arm=name,
        noise_level=level,
        family="levels",
        claim=f"{_percent(level)} evaluation noise costs {name} accuracy",
        claim_zh=f"{_percent(level)} 评估噪声降低 {name} 的准确率",
    )


def _degradation(name: str, counterpart: str, level: float) -> DegradationComparison:
    return DegradationComparison(
        treatment=name,
        control=counterpart,
        noise_level=level,
        expected="higher",
        family="degradation",
        claim=f"{name} loses less to {_percent(level)} evaluation noise than {counterpart}",
        claim_zh=f"{_percent(level)} 评估噪声下 {name} 的损失小于 {counterpart}",
    )


def _percent(level: float) -> str:
    return f"{100 * level:.3g} %"
