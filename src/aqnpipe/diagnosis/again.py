"""Test of whether a fault that looks random is: the probes that showed it run once more on the same operands.

Values that are wrong by changing amounts look like noise, and few wrong values like spikes, also where the cause is a
narrow accumulator or one entry of a table. Only a second run with the same operands tells them apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from aqnpipe.artifacts.diagnoses import LocatedFault
from aqnpipe.diagnosis.checks import Check

_RANDOM = ("noise", "spike")


@dataclass
class Part:
    """A part of a diagnosis that has run, and can run again with the same operands, which it does once at most."""

    run: Callable[[], list[Check]]
    checks: list[Check] = field(init=False)

    def __post_init__(self) -> None:
        """Run the probes."""
        self.checks = self.run()

    @cached_property
    def again(self) -> list[Check]:
        """The checks of a second run."""
        return self.run()


def without_false_noise(fault: LocatedFault, layer: int, parts: Sequence[Part]) -> LocatedFault:
    """Return a noise or a spike in `layer` as of type other if every part that showed it shows the same again."""
    if fault.type not in _RANDOM:
        return fault
    showing = [part for part in parts if _wrong(part.checks, layer, fault.site)]
    same = all(_are_equal(*(_wrong(found, layer, fault.site) for found in (p.checks, p.again))) for p in showing)
    return as_repeated(fault, "the same in a second run") if showing and same else fault


def as_repeated(fault: LocatedFault, words: str) -> LocatedFault:
    """Return a fault that was taken for a random one as one that is not."""
    unclassified = {"type": "other", "magnitude": None, "magnitude_low": None, "magnitude_high": None}
    return fault.model_copy(update={**unclassified, "evidence": f"{fault.evidence}; {words}"})


def _wrong(checks: Sequence[Check], layer: int, site: str) -> list[Check]:
    return [check for check in checks if check.mismatch and (check.layer, check.site) == (layer, site)]


def _are_equal(first: Sequence[Check], second: Sequence[Check]) -> bool:
    """Return whether two runs have the same wrong values at the same places."""
    if len(first) != len(second):
        return False
    pairs = [(own.mismatch, other.mismatch) for own, other in zip(first, second, strict=True)]
    return all(
        a is not None
        and b is not None
        and torch.equal(a.channels, b.channels)
        and torch.equal(a.observed.nan_to_num(nan=torch.inf), b.observed.nan_to_num(nan=torch.inf))
        for a, b in pairs
    )
