"""Inputs of the probes with known answers: Latin squares, created once per width."""

import torch
from torch import Tensor

from aqnpipe.diagnosis.patterns import exponent_ladder, full_mantissa_square, latin_square
from aqnpipe.diagnosis.reference import operand_bits


class ProbeInputs:
    """Latin squares of a diagnosis, created once per width. Another `ladder`, to refine a fault, is used as it is."""

    def __init__(
        self,
        num_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        ladder: Tensor | None = None,
        seed: int = 0,
    ) -> None:
        self.num_tokens = num_tokens
        self.dtype = dtype
        self.device = device
        self.seed = seed
        self.ladder = exponent_ladder(dtype) if ladder is None else ladder
        self.bits = 1 if ladder is not None else operand_bits(dtype)
        self.top_gain = 2.0**8
        self._squares: dict[tuple[int, int], Tensor] = {}

    def square(self, num_channels: int) -> Tensor:
        """Return one-token sequences [tokens, 1, channels]; every second Latin square has full mantissas."""
        return self._square(num_channels, self.bits)

    def powers(self, num_channels: int) -> Tensor:
        """Return the same with powers of two only."""
        return self._square(num_channels, 1)

    def _square(self, num_channels: int, bits: int) -> Tensor:
        if (num_channels, bits) not in self._squares:
            plain = bits == 1
            values = (
                latin_square(self.num_tokens, num_channels, self.ladder)
                if plain
                else full_mantissa_square(self.num_tokens, num_channels, self.ladder, bits, self.seed)
            )
            self._squares[num_channels, bits] = values.unsqueeze(1).to(self.device, self.dtype)
        return self._squares[num_channels, bits]
