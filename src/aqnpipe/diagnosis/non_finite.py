"""The verdict on a machine on which a layer outputs NaN or infinity for an ordinary text, so that no scan is made."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from aqnpipe.artifacts.diagnoses import LocatedFault, Verdict
from aqnpipe.diagnosis.capture import NonFiniteOutputError
from aqnpipe.models.layout import decoder_layers


def verdict_without_scans(
    found: NonFiniteOutputError, exact: Verdict | None, model: nn.Module, simulated: Sequence[dict[str, object]]
) -> Verdict:
    """Return the verdict on exact probes, if they ran, and on a layer that outputs NaN or infinity.

    Exact probes that find a fault decide, because they know its site. Otherwise the layer is faulty, except in float16,
    in which healthy layers of some models overflow: no verdict.
    """
    reason = f"{found}, so that there are no scans"
    if exact is not None and exact.verdict == "fault":
        return exact.model_copy(update={"reason": f"{exact.reason}; {reason}", "method": "all"})
    if exact is not None:
        reason += f"; of the exact probes: {exact.reason}"
    if next(model.parameters()).dtype == torch.float16:
        overflow = f"{reason}; in float16 this may be the overflow of a healthy layer, bfloat16 or float32 shows which"
        decided: dict[str, Any] = {"verdict": "abstain", "reason": overflow}
    else:
        fault = _fault_of(found)
        decided = {"verdict": "fault", "reason": reason, "layer": found.layer, "type": fault.type, "site": fault.site}
        decided |= {"faults": (fault,)}
    if exact is not None:
        return exact.model_copy(update={**decided, "method": "all"})
    shared: dict[str, Any] = {"findings": (), "layer": None, "type": None, "forward_equivalents": 0.0}
    shared |= {"method": "statistical", "num_layers": len(decoder_layers(model)), "simulated_faults": tuple(simulated)}
    return Verdict.model_validate({**shared, **decided})


def _fault_of(found: NonFiniteOutputError) -> LocatedFault:
    unknown = ("num_faulty_channels", "num_channels", "magnitude", "magnitude_low", "magnitude_high", "threshold")
    return LocatedFault.model_validate(
        {
            **dict.fromkeys(unknown),
            "layer": found.layer,
            "site": "embedding" if found.layer is None else "layer",
            "scope": "model" if found.layer is None else "layer",
            "type": "other",
            "faulty_channel_indices": (),
            "probes": ("scan",),
            "evidence": "outputs NaN or infinity for an ordinary text",
        }
    )
