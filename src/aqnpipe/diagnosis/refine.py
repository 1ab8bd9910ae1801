"""Refines a detected fault: determines whether its threshold is dynamic or cached, and narrows its magnitude."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aqnpipe.artifacts.diagnoses import LocatedFault
from aqnpipe.diagnosis.again import as_repeated
from aqnpipe.diagnosis.checks import Check, Mismatch
from aqnpipe.diagnosis.classify import Mark, mark_of, most_informative
from aqnpipe.diagnosis.inputs import ProbeInputs
from aqnpipe.diagnosis.probes import LayerProber, subtracts_mean

_LOWERED_BY = 4
"""The largest value of the second call is smaller by this many powers of two."""

_WITH_REFERENCE = ("dead_zone", "saturation", "bias", "noise")


def refine_fault(
    fault: LocatedFault, evidence: Sequence[Check], prober: LayerProber, inputs: ProbeInputs
) -> LocatedFault:
    """Return `fault` with its `threshold`, found by a second call with a smaller maximum and the same small values.

    If the level decreases with the maximum, the threshold is dynamic, else cached. The magnitude of a dynamic dead zone
    is narrowed from a power of two to 2 %. The magnitude of a cached fault is removed, because it refers to an earlier,
    unknown call. A noise or spike that is the same in every call is changed to type other.
    """
    drive = _drive(fault.site, prober)
    mark = mark_of(most_informative(evidence))
    if drive is not None and fault.type in ("noise", "spike") and _is_repeatable(fault.site, drive, inputs):
        return as_repeated(fault, "the same in every call")
    if drive is None or fault.type not in _WITH_REFERENCE or mark.level is None:
        return fault
    lowered = ProbeInputs(inputs.num_tokens, inputs.dtype, inputs.device, _lowered(inputs.ladder))
    lowered.top_gain = inputs.top_gain / 2.0**_LOWERED_BY
    again = _mismatch_at(fault.site, drive(lowered))
    threshold = "cached" if _kept_level(mark, again) else "dynamic"
    if threshold == "cached":
        unknown = {"magnitude": None, "magnitude_low": None, "magnitude_high": None}
        words = f"{fault.evidence}; absolute level {mark.level:.4g}, which does not change with the largest value"
        return fault.model_copy(update={"threshold": threshold, "evidence": words, **unknown})
    # The mean square of norm inputs is fixed, so they cannot take other values.
    can_narrow = fault.type == "dead_zone" and fault.site not in prober.sites.norms
    narrowed = _narrowed(fault.site, mark, drive, inputs) if can_narrow else {}
    return fault.model_copy(update={"threshold": threshold, **narrowed})


def _is_repeatable(site: str, drive: Callable[[ProbeInputs], list[Check]], inputs: ProbeInputs) -> bool:
    """Return whether two more calls have the same wrong output, which rules out a random fault."""
    first, second = (_mismatch_at(site, drive(inputs)) for _ in range(2))
    return first is not None and second is not None and torch.equal(first.observed, second.observed)


def _drive(site: str, prober: LayerProber) -> Callable[[ProbeInputs], list[Check]] | None:
    """Return the probe with known answers that covers `site`; None if there is none."""
    linears = prober.sites.linears
    if site in linears:
        return lambda inputs: prober.linear(site, inputs)
    if site in prober.sites.norms and not subtracts_mean(prober.sites.norms[site]):
        return lambda inputs: prober.norm(site, inputs)
    if site == "layer_output" and {"o_proj", "down_proj"} <= linears.keys():
        return prober.identity
    if site == "attention_output" and {"v_proj", "o_proj", "down_proj"} <= linears.keys():
        return prober.attention
    if site == "mlp_output" and {"gate_proj", "up_proj", "down_proj"} <= linears.keys():
        return prober.mlp
    return None


def _lowered(ladder: Tensor) -> Tensor:
    """Return a ladder of the same length in which the largest values are replaced by the smallest ones."""
    return torch.cat([ladder[:_LOWERED_BY], ladder[:-_LOWERED_BY]])


def _mismatch_at(site: str, checks: Sequence[Check]) -> Mismatch | None:
    """Return the mismatch of the most informative check of `site`; None if nothing differs."""
    differing = [check for check in checks if check.site == site and check.mismatch]
    return most_informative(differing) if differing else None


def _kept_level(mark: Mark, again: Mismatch | None) -> bool:
    """Return whether the level stayed the same although the reference decreased by a factor of 2^4."""
    if again is None:
        # A limit that the smaller values no longer reach is absolute. A dead zone that now passes all values has moved.
        return mark.kind == "saturation"
    second = mark_of(again)
    if second.kind != mark.kind or not second.level or not mark.level:
        return False
    return abs(second.level / mark.level) > 2.0 ** (-_LOWERED_BY / 2)


def _narrowed(
    site: str, mark: Mark, drive: Callable[[ProbeInputs], list[Check]], inputs: ProbeInputs
) -> dict[str, float]:
    """Return magnitudes from a probe with about 60 steps between the largest zeroed and the smallest kept value."""
    if mark.level is None:
        return {}
    steps = len(inputs.ladder) - 1
    # Seven fractional bits are exact in every dtype.
    fractions = (torch.arange(steps, dtype=torch.float64) * 128 / steps).round() / 128
    ladder = torch.cat([mark.level * (1 + fractions), inputs.ladder[-1:]])
    finer = ProbeInputs(inputs.num_tokens, inputs.dtype, inputs.device, ladder)
    mismatch = _mismatch_at(site, drive(finer))
    second = mark_of(mismatch) if mismatch else None
    if second is None or second.kind != "dead_zone" or second.low is None or second.high is None:
        return {}
    return {"magnitude": (second.low * second.high) ** 0.5, "magnitude_low": second.low, "magnitude_high": second.high}
