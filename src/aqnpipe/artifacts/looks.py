"""Artifacts of a study that adds seeds until its claims are decided: its design, and a record of every look."""

from typing import Literal

from aqnpipe.artifacts.base import Artifact

ClaimState = Literal["open", "supported", "refuted", "equivalent", "futile", "invalid"]
"""State of a claim after a look: `open` and `futile` are not decided; only `open` gets more seeds.

futile: unlikely to be decided by the planned maximum. invalid: the comparison cannot be made.
"""


class LookDesign(Artifact):
    """results/looks/design.json: what is fixed before the first look, because a change would void the error rates.

    `planned`: the maximum number of seeds when the study began; `start`, `step`, `futility` and `reserve` as in the
    study. `claims`: each claim as it is tested, by comparison id. `settings`: digests of what decides the outcomes, by
    name (`data`, and the arms with claims).
    """

    start: int
    step: int
    planned: int
    futility: float
    reserve: float
    alpha: float
    scorer: str
    claims: dict[str, str]
    settings: dict[str, str]


class ClaimAtLook(Artifact):
    """A claim at a look; fractions. Of a claim that ended at an earlier look, the values of that look.

    `look`, `seeds`: when the claim was tested. `p_value`: of that look alone. `p_looks`: adjusted for all looks;
    `p_holm`: that one adjusted by Holm's method over the family, the same for a claim that is tested by itself.
    `p_other`, `p_other_holm`: the same for the claim's other test, that the difference is smaller than
    `equivalent_within`, or beyond the margin. `ci_low`, `ci_high`: repeated confidence interval, which covers the true
    difference at all looks together with probability `interval_level` (Jennison & Turnbull 1989), that of the test that
    decides the state. `chance`: predicted probability that the claim is decided by the planned maximum.
    """

    comparison_id: str
    state: ClaimState
    look: int
    seeds: int
    difference: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    interval_level: float | None = None
    p_value: float | None = None
    p_looks: float | None = None
    p_holm: float | None = None
    p_other: float | None = None
    p_other_holm: float | None = None
    chance: float | None = None
    reason: str | None = None


class LookFile(Artifact):
    """results/looks/look<N>.json: the claims after a look. `seeds`: of the arms whose claims were open.

    `seeds_per_arm`: seeds of every arm at this look. `previous_sha256`: of the record of the look before; null for the
    first.
    """

    look: int
    seeds: int
    seeds_per_arm: dict[str, int]
    design: LookDesign
    previous_sha256: str | None
    claims: tuple[ClaimAtLook, ...]
