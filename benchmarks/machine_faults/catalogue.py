"""All faults, with the faults that every layer shares derived from those of one layer."""

from dataclasses import replace

from machine_faults import (
    attention,
    backward,
    decoding,
    elementwise,
    ends,
    flash,
    later,
    linears,
    precision,
    rare,
    stored,
)
from machine_faults.base import MachineFault

_MODULES = (linears, elementwise, precision, attention, decoding, flash, stored, rare, ends, backward)
_ONE_LAYER = tuple(fault for module in _MODULES for fault in module.FAULTS)

DEVICE = "same fault in every layer"
_SHARED_BY_ALL = (
    "q: exponent bit 1 stuck at 1, one channel",
    "down: channel 1 % too large",
    "o: channel 25 % too large",
    "down: two channels swapped",
    "k: top mantissa bit stuck at 0, one channel",
    "up: tile of 16 reversed",
    "v: one head's channels dead",
    "down: every 8th row wrong in 4 channels",
    "q: multiplier 1/8 off for one bit pattern of the weights",
    "dead head",
    "norm1: top mantissa bit stuck at 0",
    "norm2: values in [1, 1.25) 3 % off",
    "act * up: values in [2, 3) 10 % off",
    "residual after attention: third mantissa bit stuck at 0",
    "silu replaced by relu",
    "silu 5 % off for inputs in [-1, -0.5)",
    "norm1: rsqrt 5 % off unless near 1024",
    "softmax: probabilities in [0.1, 0.2) 5 % off",
    "mask: the next token is visible",
    "scores: one key lane of 16 zero",
    "rotary: sine 5 % off",
    "values: one key lane of 16 ignored",
    "cache: every 8th position is zero",
    "decoding: q, dead channels, one row only",
    "rows from the 512th on: down, tile 12 % off",
    "more than 64 keys: scores of later keys 10 % off",
    "sdpa: the first key is hidden",
    "down: NaN channel",
    "expert 1: dead channel of down",
    "down: gradient of the inputs 5 % off",
)


def _catalogue() -> dict[str, MachineFault]:
    faults = {fault.name: fault for fault in _ONE_LAYER}
    names = [fault.name for fault in (*_ONE_LAYER, *later.FAULTS)]
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise ValueError(f"faults of one name: {repeated}")
    shared = (
        replace(faults[name], name=f"everywhere: {name}", group=DEVICE, where="device") for name in _SHARED_BY_ALL
    )
    # Last, because the number of a fault chooses its model and layer.
    return faults | {fault.name: fault for fault in (*shared, *later.FAULTS)}


FAULTS: dict[str, MachineFault] = _catalogue()
