"""Operands whose results are known bit for bit: powers of two, one-hot weights, norm inputs, small integers.

The input of a probe determines which faults it detects. A dead zone leaves large values unchanged and a clamp leaves
small ones unchanged, each relative to the largest value of the call. Therefore every channel carries the largest and
the smallest value of the whole tensor, with both signs, at some token: a Latin square. Products with powers of two, and
sums of one term, are exact.

All mantissa bits of a power of two are 0, so a bit stuck at 0 does not show. Every second square, and the weights of
one probe, therefore have random mantissas of all bits.
"""

import math

import torch
from torch import Tensor

from aqnpipe.diagnosis.probes.reference import operand_bits
from aqnpipe.error_bounds import sum_bound

_WIDE_EXPONENTS = (-30, 29)
_FLOAT16_EXPONENTS = (-10, 11)
"""Their products with the gate of the MLP probe are normal float16 numbers (2^-14 to 65504)."""

_NORM_MOTIF = (4.0, *[2.0**-5] * 4, *[2.0**-4] * 3, *[2.0**-3] * 3, *[2.0**-2] * 3, *[2.0**-1] * 3)
"""17 powers of two with mean square exactly 1: 16 + 4*4^-5 + 3*(4^-4 + 4^-3 + 4^-2 + 4^-1) = 17."""

_NUM_WAITING = 44
_AROUND_A_SIGN = ((0, 2, 3, 1), (0, 2, 1, 3), (2, 0, 3, 1))
"""Orders of a large number, its negative and two signs, in which a sign comes between the large ones."""

NORM_INPUT_SCALE = 32.0
"""Root mean square of norm inputs. Its square, 1024, absorbs the epsilon of a norm (1e-5 or less) in rounding."""


def exponent_ladder(dtype: torch.dtype) -> Tensor:
    """Return the powers of two of a Latin square, float64 [values]; products in `dtype` limit their range."""
    low, high = _FLOAT16_EXPONENTS if dtype == torch.float16 else _WIDE_EXPONENTS
    return 2.0 ** torch.arange(low, high + 1, dtype=torch.float64)


def latin_square(num_tokens: int, num_channels: int, ladder: Tensor) -> Tensor:
    """Return [tokens, channels] in which every channel carries every value of `ladder` with both signs.

    This takes 2*len(ladder) tokens; ValueError if `num_tokens` is smaller.
    """
    if num_tokens < 2 * len(ladder):
        raise ValueError(
            f"{num_tokens} tokens cannot hold {len(ladder)} values with both signs, expected twice as many"
        )
    token, channel = torch.arange(num_tokens).unsqueeze(1), torch.arange(num_channels).unsqueeze(0)
    sign = 1 - 2 * ((token // len(ladder) + channel) % 2)
    return ladder[(token + channel) % len(ladder)] * sign


def mantissas(shape: tuple[int, ...], bits: int, generator: torch.Generator) -> Tensor:
    """Return random numbers in [1, 2) with `bits` significant bits, the leading one included, float64."""
    unit = 2 ** (bits - 1)
    return torch.randint(unit, 2 * unit, shape, generator=generator).double() / unit


def full_mantissa_square(num_tokens: int, num_channels: int, ladder: Tensor, bits: int, seed: int) -> Tensor:
    """Return a Latin square whose odd repeats have random mantissas of `bits` bits.

    The largest magnitude stays a power of two, so that every channel still carries the largest value of the tensor.
    """
    square = latin_square(num_tokens, num_channels, ladder)
    is_odd = (torch.arange(num_tokens) // len(ladder)) % 2 == 1
    generator = torch.Generator().manual_seed(seed)
    factors = mantissas((int(is_odd.sum()), num_channels), bits, generator)
    odd = square[is_odd]
    square[is_odd] = torch.where(odd.abs() < ladder.max(), odd * factors, odd)
    return square


def selection(out_features: int, in_features: int, *, skip: int = 0) -> tuple[Tensor, Tensor]:
    """Return the input that each output copies (never one of the first `skip`) and its sign, both [out].

    Neighbouring outputs copy distant inputs, so that a kernel that confuses rows or columns is detected.
    """
    usable = in_features - skip
    stride = max(1, int(usable * 0.618))
    while usable > 1 and math.gcd(stride, usable) != 1:
        stride -= 1
    outputs = torch.arange(out_features)
    return skip + (outputs * stride) % usable, (1 - 2 * ((outputs // 2) % 2)).double()


def selection_weight(chosen: Tensor, factors: Tensor, weight: Tensor) -> Tensor:
    """Return a weight like `weight` [out, in]: row j has `factors[j]` in column `chosen[j]` and 0 elsewhere."""
    result = torch.zeros_like(weight)
    rows = torch.arange(len(chosen), device=weight.device)
    result[rows, chosen.to(weight.device)] = factors.to(weight.device, weight.dtype)
    return result


def norm_input(num_tokens: int, num_channels: int) -> Tensor:
    """Return [tokens, channels] of powers of two whose mean square over channels is exactly NORM_INPUT_SCALE^2.

    The motif shifts by one channel per token, so every channel carries the largest and the smallest value. The squares
    are integers with a sum below 2^24, so every order of summation is exact. Fewer than 17 channels carry only ones.
    """
    repeats = num_channels // len(_NORM_MOTIF)
    base = torch.ones(num_channels, dtype=torch.float64)
    base[: repeats * len(_NORM_MOTIF)] = torch.tensor(_NORM_MOTIF * repeats, dtype=torch.float64)
    token, channel = torch.arange(num_tokens).unsqueeze(1), torch.arange(num_channels).unsqueeze(0)
    sign = 1 - 2 * ((token // len(_NORM_MOTIF) + channel) % 2)
    return NORM_INPUT_SCALE * base[(token + channel) % num_channels] * sign


def norm_gains(num_channels: int, turn: int) -> Tensor:
    """Return gains 2^-8, 1, 2^8 in turn, float64 [channels]; over turns 0, 1, 2 every channel has each gain."""
    return 2.0 ** (8.0 * ((torch.arange(num_channels) + turn) % 3 - 1).double())


def integer_operands(
    num_tokens: int, out_features: int, in_features: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x [tokens, in], weight [out, in], x @ weight.T [tokens, out]) of integers, float64 on the CPU.

    The weight is a sum of three outer products of signs, so the product is known without the kernel under test. In any
    order of summation, no partial sum exceeds the integers that `dtype` represents exactly (2^8, 2^11 or 2^24). In
    float32 this uses most of the bits with operands of at most eight bits, which narrower matrix units represent
    exactly too.
    """
    is_wide = dtype not in (torch.bfloat16, torch.float16)
    largest = {torch.bfloat16: 2**8, torch.float16: 2**11}.get(dtype, 2**24)
    parts = torch.tensor([1.0, 4.0, 16.0] if is_wide else [1.0, 1.0, 1.0], dtype=torch.float64)
    bound = int(parts.sum()) * in_features
    every, amplitude = -(-bound // largest), max(1, min(255, largest // bound))
    token, channel = torch.arange(num_tokens).unsqueeze(1), torch.arange(in_features).unsqueeze(0)
    values = torch.randint(-amplitude, amplitude, (num_tokens, in_features), generator=generator).double()
    values = torch.where(values >= 0, values + 1, values)  # never 0
    x = torch.where((token + channel) % every == 0, values, 0.0)
    rows, columns = _signs((out_features, 3), generator) * parts, _signs((3, in_features), generator)
    return x, rows @ columns, (x @ columns.T) @ rows.T


def cancelling_operands(
    num_tokens: int, out_features: int, in_features: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x [tokens, in], weight [out, in], x @ weight.T) whose sums need accumulators of 24 bits, float64.

    Aligned blocks of four inputs hold a large number, its negative and two signs in random order, under equal weights.
    Every sum is small, but partial sums need up to 23 bits, all exact in float32 in any order. An accumulator of 8 or
    11 bits loses the signs. A kernel that splits a sum and rounds its parts to 16 bits loses them where it cuts a
    block, so in 16 bits a token has one block, in which the signs are equal and at least one is between the large
    numbers: a narrow accumulator is wrong for all tokens, a split sum for few (see `with_cuts`). The weight has rank 1,
    so the product is known without the kernel under test.
    """
    large = {torch.bfloat16: 2.0**16, torch.float16: 2.0**14}.get(dtype, 2.0**17)
    num_blocks = in_features // 4
    used = torch.randperm(num_blocks, generator=generator)[: min(32, num_blocks)]
    x = torch.zeros(num_tokens, num_blocks, 4, dtype=torch.float64)
    if dtype in (torch.bfloat16, torch.float16):
        order = torch.tensor(_AROUND_A_SIGN)[torch.randint(0, len(_AROUND_A_SIGN), (num_tokens,), generator=generator)]
        block = torch.tensor([large, -large, 1.0, 1.0], dtype=torch.float64)[order] * _signs((num_tokens, 1), generator)
        x[torch.arange(num_tokens), used[torch.arange(num_tokens) % len(used)]] = block
    else:
        small = _signs((num_tokens, len(used), 2), generator)
        pair = torch.tensor([large, -large], dtype=torch.float64).expand_as(small)
        order = torch.rand(num_tokens, len(used), 4, generator=generator).argsort(-1)
        x[:, used] = torch.cat([pair, small], -1).gather(-1, order)
    rows, blocks = _signs((out_features,), generator), _signs((num_blocks,), generator)
    rest = torch.zeros(in_features - 4 * num_blocks, dtype=torch.float64)
    columns = torch.cat([blocks.repeat_interleave(4), rest])
    inputs = torch.cat([x.flatten(1), rest.expand(num_tokens, -1)], 1)
    return inputs, rows.unsqueeze(1) * columns, (inputs @ columns).unsqueeze(1) * rows


def with_cuts(allowed: Tensor | float, x: Tensor, expected: Tensor, observed: Tensor) -> Tensor:
    """Return `allowed` and the roundings of the tokens of `cancelling_operands` that a split sum cuts, [tokens, out].

    Those of an output that is wrong for at most half of the tokens that have to be exact: a cut is at few places.
    """
    bound = torch.zeros(expected.shape, dtype=torch.float64) + allowed
    if observed.dtype == torch.float32:
        return bound
    exact = bound == 0
    wrong = exact & (observed.detach().cpu().double().reshape(expected.shape) != expected)
    is_few = 2 * wrong.sum(0) <= exact.sum(0)
    roundings = torch.finfo(observed.dtype).eps * x.abs().sum(-1, keepdim=True)
    return torch.where(exact & is_few, roundings, bound)


def running_operands(
    num_tokens: int, out_features: int, in_features: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x [tokens, in], weight [out, in], x @ weight.T): sums in which a large number waits for its negative.

    The first product is large and the last its negative. Between them up to 44 ones are spread over the inputs. Their
    sum is 2.75 units in the last place of the large number in 16 bits (those of bfloat16 for a float32 model), but that
    of any eighth of them less than half a unit. An accumulator that is rounded to 16 bits after some products loses
    them all. In float32 the sum is exact in any order, and a kernel that rounds the parts of a split sum, and their
    total, loses two units at most.
    """
    bits = 11 if dtype == torch.float16 else 8
    count = min(in_features - 2, _NUM_WAITING)
    large = 2.0 ** (int(math.log2(count / 2.6)) + bits - 1)
    x = torch.zeros(num_tokens, in_features, dtype=torch.float64)
    x[:, 1 + torch.arange(count) * (in_features - 2) // count] = 1.0
    x[:, 0], x[:, -1] = large, -large
    x *= _signs((num_tokens, 1), generator)
    rows, columns = _signs((out_features,), generator), _signs((in_features,), generator)
    return x * columns, rows.unsqueeze(1) * columns, x.sum(1, keepdim=True) * rows


def accumulating_operands(
    num_tokens: int, out_features: int, in_features: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (x, weight, x @ weight.T, allowed deviation [tokens, 1]): both kinds of sums under one weight.

    The first half of the tokens are those of `cancelling_operands`, the second half those of `running_operands`. There
    kernels of 16 bits that split a sum may round its parts.
    """
    half = num_tokens // 2
    size = (out_features, in_features, dtype, generator)
    cancelling, under, _ = cancelling_operands(half, *size)
    running, weight, _ = running_operands(num_tokens - half, *size)
    x = torch.cat([cancelling * under[0] * weight[0], running])
    allowed = torch.zeros(num_tokens, 1, dtype=torch.float64)
    if dtype in (torch.bfloat16, torch.float16):
        allowed[half:] = sum_bound(running.abs().sum(1, keepdim=True), in_features, dtype)
    return x, weight, (x @ weight[0]).unsqueeze(1) * (weight[:, 0] * weight[0, 0]), allowed


def _signs(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return 2.0 * torch.randint(0, 2, shape, generator=generator).double() - 1


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
