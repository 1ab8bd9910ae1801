"""Why some faults are not found: reasons by group and name, shown on the page beside the measured misses."""

from machine_faults.base import MachineFault

REASONS: dict[str, str] = {
    "weights in memory": "probes replace the weights by known ones; nothing compares those in memory with the file",
    "MLP output channel halved": "the output of an MLP without a gate has no known answer; the report lists it as "
    "untested",
    "silu 2 % low for inputs below -1": "2 % is 3 to 5 units in the last place of bfloat16",
    "norm1: LayerNorm variance 2 % off": "1 % of the output is 1 to 3 units in the last place of bfloat16",
}
"""Reason by name of a fault, or by group where one reason holds for all."""

UNKNOWN = "not known"


def reason_for(fault: MachineFault) -> str:
    """Return the reason why a fault is missed, as far as it is known."""
    return REASONS.get(fault.name) or REASONS.get(fault.group) or UNKNOWN
