"""What an exact diagnosis did not test. A verdict says no more than was tested, so every gap has a line."""

from collections.abc import Sequence

import torch
from torch import nn

from aqnpipe.artifacts.diagnoses import Untested
from aqnpipe.diagnosis.checks import Check
from aqnpipe.diagnosis.cost import is_transposed
from aqnpipe.diagnosis.inputs import ProbeInputs
from aqnpipe.models.sites import LayerSites

WITHOUT_ANSWER = ("repeat", "monomial", "finite")
"""Probes that compare the device with itself."""

_ONLY_REPEATED = "no known answer for this structure, only repeated"
_TRANSPOSED = "a linear with a transposed weight (Conv1D), only repeated as a part of its block"
_NOT_COMPARED = "no known answer for this structure, and no repeats that could be compared on this device"

PARTS = {
    "embedding": ("embedding",),
    "lm_head": ("head",),
    "final norm": ("final_norm",),
    "activation outside the probed point": ("activation",),
    "norms outside a mean square of 1024": ("norm_range",),
    "attention over more than one key": ("attention_one_hot", "attention_uniform"),
    "KV cache and decode": ("cache",),
    "inputs of attention": ("attention_input",),
    "inputs of MLPs": ("mlp_input",),
    "weights in memory": ("weights",),
    "backward pass": ("backward",),
    "kernels for other shapes": ("shapes",),
}
"""Parts of a model, and the probes or sites that test them; a part is tested if one of them was compared."""


def untested_sites(layers: Sequence[LayerSites], checks: Sequence[Check]) -> tuple[Untested, ...]:
    """Return the sites of layers without a known answer; they were only repeated, or not compared at all.

    Repeats are not compared on a device that adds in another order in every call, where they have no error bound.
    """
    repeated = {(check.layer, check.site) for check in checks if check.probe == "repeat" and check.elements_per_channel}
    known = {(check.layer, check.site) for check in checks if check.probe not in WITHOUT_ANSWER}
    missing: dict[tuple[str, str], list[int]] = {}
    for index, sites in enumerate(layers):
        inside = {path.rsplit(".", 1)[-1] for path, m in sites.layer.named_modules() if isinstance(m, nn.Linear)}
        transposed = {_two_parts(path) for path, m in sites.layer.named_modules() if is_transposed(m)}
        for name in sorted({*sites.modules} | inside | transposed):
            if (index, name) not in known:
                reason = _ONLY_REPEATED if (index, name) in repeated else _NOT_COMPARED
                reason = _TRANSPOSED if name in transposed else reason
                missing.setdefault((name, reason), []).append(index)
    return tuple(
        Untested(part=name, layers=tuple(found), reason=reason) for (name, reason), found in sorted(missing.items())
    )


def _two_parts(path: str) -> str:
    """Return the end of a path with its owner: GPT-2 has two modules of the name c_proj in every layer."""
    return ".".join(path.split(".")[-2:])


def untested_parts(checks: Sequence[Check], dtype: torch.dtype, inputs: ProbeInputs) -> tuple[Untested, ...]:
    """Return the parts of the model that no probe that ran tests, and the shapes and bits that probes leave out."""
    ran = {name for check in checks for name in (check.probe, check.site)}
    found = [Untested(part=part, reason="no probe of it ran") for part, names in PARTS.items() if not ran & set(names)]
    if dtype == torch.float32 and inputs.bits < 24:
        reason = f"torch allows products that keep {inputs.bits} bits (torch.get_float32_matmul_precision)"
        found.append(Untested(part=f"mantissa bits of float32 products below the first {inputs.bits}", reason=reason))
    return tuple(found)
