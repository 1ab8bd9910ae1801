"""Makes one forward pass of the measurement of the distance fail in its midst, as a device without memory does."""

import torch
from torch.nn import Module

from aqnpipe.models.layout import decoder_layers
from aqnpipe.training.distance.probe import DistanceProbe

OUT_OF_MEMORY = torch.OutOfMemoryError("made up")


def fail_in_measurement(monkeypatch, number: int, error: Exception = OUT_OF_MEMORY) -> None:
    """Raise `error` within the last decoder layer of the measurement's `number`-th forward pass, of this process."""
    measure, passes = DistanceProbe._compute, []

    def fail(module: Module, args) -> None:
        passes.append(module)
        if len(passes) == number:
            raise error

    def failing(self, step, measurement):
        handle = decoder_layers(step.passes.network)[-1].mlp.register_forward_pre_hook(fail)
        try:
            measure(self, step, measurement)
        finally:
            handle.remove()

    monkeypatch.setattr(DistanceProbe, "_compute", failing)
