"""Replaces the names of noises in the comparisons of a study by the levels that stand for them."""

from collections.abc import Mapping
from typing import Any

from aqnpipe.config.evaluation_noise import numbered_levels
from aqnpipe.config.validation_messages import did_you_mean
from aqnpipe.errors import ConfigError


def with_numbered_noises(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Return a study's content, not validated, with the level of a noise wherever a comparison names it.

    Raises ConfigError if it names none of `evaluation.noises`, or if its level is a number that is no noise level.
    Content of another form than a study's is returned as it is, for validation to refuse.
    """
    evaluation = config.get("evaluation")
    noises = evaluation.get("noises") if isinstance(evaluation, Mapping) else None
    levels = numbered_levels(noises) if isinstance(noises, Mapping) else {}
    changed = dict(config)
    comparisons = config.get("comparisons")
    if isinstance(comparisons, list | tuple):
        changed["comparisons"] = [
            _numbered(content, levels, f"{source}: comparisons.{index}") for index, content in enumerate(comparisons)
        ]
    report = config.get("report")
    if isinstance(report, Mapping) and "explore" in report:
        changed["report"] = {**report, "explore": _numbered(report["explore"], levels, f"{source}: report.explore")}
    return changed


def _numbered(content: Any, levels: Mapping[str, float], where: str) -> Any:
    level = content.get("noise_level") if isinstance(content, Mapping) else None
    if isinstance(level, str) and level in levels:
        return {**content, "noise_level": levels[level]}
    if isinstance(level, str):
        near = did_you_mean(level, levels) or (f", or one of {', '.join(levels)}" if levels else "")
        raise ConfigError(f"{where}.noise_level: found {level!r}, expected a number{near}")
    if isinstance(level, int | float) and level >= 1:
        raise ConfigError(
            f"{where}.noise_level: found {level:g}, expected a number below 1 or the name of one of evaluation.noises"
        )
    return content
