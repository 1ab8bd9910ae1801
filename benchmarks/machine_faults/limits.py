"""Why some faults are not found: reasons by group and name, shown on the page beside the measured misses."""

from machine_faults.base import MachineFault

REASONS: dict[str, str] = {
    "intermittent": "a rare fault strikes no call of one diagnosis; `--duration` repeats it",
}
"""Reason by name of a fault, or by group where one reason holds for all: what cannot be seen, not what was missed."""

UNKNOWN = "not known"


def reason_for(fault: MachineFault) -> str:
    """Return the reason why a fault is missed, as far as it is known."""
    return REASONS.get(fault.name) or REASONS.get(fault.group) or UNKNOWN
