"""Forms of operators that only vLLM has: norms that add the residual stream themselves."""

from dataclasses import dataclass

import torch
from torch import Tensor

from aqnpipe.parity import algorithms
from aqnpipe.parity.algorithms import Candidates
from aqnpipe.parity.expected import Expected
from aqnpipe.parity.forms import Inputs, NormForm

UNROUNDED = "of the sum before its rounding"


@dataclass(frozen=True)
class FusedNormForm:
    """A norm of a sum that it computes itself. Inputs are the rounded sum and the two addends, if there were two."""

    norm: NormForm

    def expected(self, inputs: Inputs, positions: Tensor, channels: Tensor, dtype: torch.dtype) -> Expected:
        """See `Form`: the norm of the rounded sum, so that engines which do not fuse expect the same."""
        return self.norm.expected(inputs[:1], positions, channels, dtype)

    def candidates(self, inputs: Inputs, positions: Tensor, dtype: torch.dtype) -> Candidates:
        """See `Form`."""
        found = dict(self.norm.candidates(inputs[:1], positions, dtype))
        if len(inputs) == 1 or self.norm.subtracts_mean:
            return found
        total = inputs[1].cpu().float() + inputs[2].cpu().float()
        unrounded = algorithms.rms_norms(total, self.norm.gain, self.norm.epsilon, dtype)
        names = (algorithms.CAST_BEFORE, algorithms.CAST_AFTER)
        return found | {f"{name}, {UNROUNDED}": unrounded[name] for name in names}
