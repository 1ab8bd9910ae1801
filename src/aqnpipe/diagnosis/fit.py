"""Fit of a probe to the structure of a layer, found on a copy of the layer on the host.

A probe expects something of the structure of a layer: that its output is the input plus two branches, or that a gate
multiplies. Layers of other families do something else, and the probe then fails on every healthy device. A copy of the
layer on the CPU, without hooks, decides which of the two it is: where the copy fails too, the probe does not fit. It is
in float64, whose kernels share little with those under test; in float32 where the probe runs fused experts, because
torch multiplies groups of matrices in no wider format. Other layers decide nothing, because a fault of the device is in
all of them.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aqnpipe.diagnosis.inputs import ProbeInputs
from aqnpipe.diagnosis.probes import LayerProber
from aqnpipe.models.sites import layer_sites

STRUCTURAL = ("identity", "attention", "mlp", "norm")
"""Probes that expect something of the structure of a layer; a linear is a linear in every family."""


def misfits(prober: LayerProber, probe: str, inputs: ProbeInputs) -> set[str]:
    """Return the sites at which the structural `probe` does not give the known answer on a copy on the host."""
    host = _on_host(prober, runs_experts=probe == "identity")
    dtype = next(iter(host.sites.layer.parameters())).dtype
    small = ProbeInputs(2 * len(inputs.ladder), dtype, torch.device("cpu"), inputs.ladder)
    if probe == "norm":
        checks = [check for name in host.sites.norms for check in host.norm(name, small)]
    else:
        checks = getattr(host, probe)(small)
    return {check.site for check in checks if check.mismatch}


def _on_host(prober: LayerProber, *, runs_experts: bool) -> LayerProber:
    layer = copy.deepcopy(prober.sites.layer)
    for module in layer.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.clear()
    has_fused_experts = any(parameter.ndim > 2 for parameter in layer.parameters())
    dtype = torch.float32 if has_fused_experts and runs_experts else torch.float64
    return replace(
        prober,
        sites=layer_sites(layer.to("cpu", dtype)),
        one_token_kwargs=_to_host(prober.one_token_kwargs, dtype),
        attention_kwargs=_to_host(prober.attention_kwargs, dtype),
    )


def _to_host(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with the floating-point tensors in it as `dtype` on the CPU."""
    if isinstance(value, Tensor):
        return value.to("cpu", dtype) if value.is_floating_point() else value.cpu()
    if isinstance(value, Mapping):
        return {key: _to_host(item, dtype) for key, item in value.items()}
    return type(value)(_to_host(item, dtype) for item in value) if type(value) in (tuple, list) else value
