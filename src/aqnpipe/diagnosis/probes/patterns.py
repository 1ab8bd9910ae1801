"""Operands whose results are known bit for bit: powers of two, one-hot weights, norm inputs, small integers.

The input of a probe determines which faults it detects. A dead zone leaves large values unchanged and a clamp leaves
small ones unchanged, each relative to the largest value of the call. Therefore every channel carries the largest and
the smallest value of the whole tensor, with both signs, at some token: a Latin square. Products with powers of two, and
sums of one term, are exact.

All mantissa bits of a power of two are 0, so a bit stuck at 0 does not show. Every second square, and the weights of
one probe, therefore have random mantissas of all bits.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from aqnpipe.diagnosis.checks import Check, compare
from aqnpipe.error_bounds import sum_bound

FLOAT32_EPS = 2.0**-23
"""Normalisations, softmax and sums of 16-bit models are computed in float32."""

PRODUCT_BITS = 11
"""Significant bits of operands whose product is exact in float32, also after rounding to TF32."""

LEAST_ROWS = 513
"""More rows than a large tile of matrix units has; a fault of the rows behind them shows in no smaller batch."""

FEW_ROWS = (1, 4, 8)
"""Rows of a decode of one to eight sequences; kernels are chosen by their number."""

_MANTISSA_BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}
_ALLOWED_BITS = {"highest": 24, "high": 11, "medium": 8}
"""Bits of float32 operands that products keep, by torch.get_float32_matmul_precision: IEEE, TF32, bfloat16."""


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


def opening_of(dtype: torch.dtype) -> float:
    """Return a gate at which silu and gelu return their input exactly, because the sigmoid rounds to 1 in `dtype`."""
    return 16.0 if dtype == torch.float16 else 128.0


def mantissa_bits(dtype: torch.dtype) -> int:
    """Return the significant bits of `dtype`, with the leading one."""
    return _MANTISSA_BITS[dtype]


def full_mantissas(shape: tuple[int, ...], bits: int, generator: torch.Generator) -> Tensor:
    """Return signed numbers with `bits` random significant bits, magnitudes in [1, 2), float64 on the CPU."""
    low = 2 ** (bits - 1)
    drawn = torch.randint(-low, low, shape, generator=generator).double()
    return torch.where(drawn < 0, drawn + (1 - low), drawn + low) / low


def operand_bits(dtype: torch.dtype) -> int:
    """Return the significant bits that products of `dtype` must keep under the settings of torch."""
    bits = _MANTISSA_BITS.get(dtype, 24)
    return min(bits, _ALLOWED_BITS[torch.get_float32_matmul_precision()]) if dtype == torch.float32 else bits


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


@dataclass(frozen=True)
class Selection:
    """A weight whose row j has `factors[j]` in column `chosen[j]` and 0 elsewhere: every output copies one input."""

    chosen: Tensor
    factors: Tensor

    @property
    def num_outputs(self) -> int:
        """Number of rows."""
        return len(self.chosen)

    def times(self, factors: Tensor) -> "Selection":
        """Return the same choice with other factors, which are multiplied with these."""
        return replace(self, factors=self.factors * factors)

    def weight(self, like: Tensor) -> Tensor:
        """Return the weight in the form of `like` [out, in]."""
        result = torch.zeros_like(like)
        rows = torch.arange(len(self.chosen), device=like.device)
        result[rows, self.chosen.to(like.device)] = self.factors.to(like)
        return result

    def product(self, x: Tensor) -> Tensor:
        """Return what a linear with this weight has to output for `x` [..., in]."""
        return x[..., self.chosen.to(x.device)].mul_(self.factors.to(x))


def selection(out_features: int, in_features: int, *, skip: int = 0) -> Selection:
    """Return a selection with signs that copies none of the first `skip` inputs.

    Neighbouring outputs copy distant inputs, so that a kernel that confuses rows or columns is detected.
    """
    usable = in_features - skip
    stride = max(1, int(usable * 0.618))
    while usable > 1 and math.gcd(stride, usable) != 1:
        stride -= 1
    outputs = torch.arange(out_features)
    return Selection(skip + (outputs * stride) % usable, (1 - 2 * ((outputs // 2) % 2)).double())


def selection_of(module: nn.Linear) -> Selection:
    """Return the selection of the size of a linear."""
    return selection(module.out_features, module.in_features)


def selecting_weights(module: nn.Linear, chosen: Selection | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the replacement of the weight of a linear by one that selects, and of the bias by 0."""
    yield module.weight, (chosen or selection_of(module)).weight(module.weight)
    yield from zero_bias(module)


def zero_bias(module: nn.Linear) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the replacement of the bias of a linear by zeros, if it has one."""
    if module.bias is not None:
        yield module.bias, torch.zeros_like(module.bias)


@dataclass(frozen=True)
class OuterProducts:
    """A weight that is a sum of outer products of `rows` [out, terms] and `columns` [terms, in], float64.

    So its products are known without the kernel under test.
    """

    rows: Tensor
    columns: Tensor

    @property
    def num_outputs(self) -> int:
        """Number of rows."""
        return len(self.rows)

    def weight(self, like: Tensor) -> Tensor:
        """Return the weight in the form of `like` [out, in]; its values are small integers."""
        result = torch.zeros(like.shape, dtype=like.dtype)
        for row, column in zip(self.rows.T, self.columns, strict=True):
            result.addcmul_(row.to(like.dtype).unsqueeze(1), column.to(like.dtype))
        return result.to(like.device)

    def product(self, x: Tensor) -> Tensor:
        """Return what a linear with this weight has to output for `x` [..., in]."""
        return (x @ self.columns.T) @ self.rows.T


@dataclass(frozen=True)
class Product:
    """Operands whose product is known: `x` [rows, in], a weight, and a bias, without which it is 0.

    `allowed`: absolute deviation [rows, 1] of sums that need wide accumulators; without it every bit has to agree.
    """

    x: Tensor
    weight: Selection | OuterProducts
    allowed: Tensor | None = None
    bias: Tensor | float = 0.0

    def check(self, probe: str, layer: int, site: str, observed: Tensor, rows: slice = slice(None)) -> Check:
        """Compare the observed product of some rows; sums in float32 are exact in any order."""
        x = self.x[rows]
        answer = self.weight.product(x) + self.bias
        if self.allowed is None or observed.dtype == torch.float32:
            return compare(probe, layer, site, answer, observed)
        bound = self.allowed[rows]
        return compare(probe, layer, site, answer, observed, allowed=lambda: with_cuts(bound, x, answer, observed))


def selecting_product(
    num_rows: int, out_features: int, in_features: int, dtype: torch.dtype, generator: torch.Generator
) -> Product:
    """Return a product in which every output copies one input, times a factor, both with full mantissas.

    The products have 24 bits, or as many as exact products of the dtype have. Random numbers decide which inputs are
    copied where there are more of them than outputs.
    """
    x = full_mantissas((num_rows, in_features), min(operand_bits(dtype), 24 - PRODUCT_BITS), generator)
    factors = full_mantissas((out_features,), min(operand_bits(dtype), PRODUCT_BITS), generator)
    shift = int(torch.randint(0, in_features, (1,), generator=generator))
    chosen = (selection(out_features, in_features).chosen + shift) % in_features
    return Product(x.float(), Selection(chosen, factors))


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


def integer_product(
    num_rows: int, out_features: int, in_features: int, dtype: torch.dtype, generator: torch.Generator
) -> Product:
    """Return a product of integers.

    The weight is a sum of three outer products of signs. In any order of summation, no partial sum exceeds the integers
    that `dtype` represents exactly (2^8, 2^11 or 2^24). In float32 this uses most of the bits with operands of at most
    eight bits, which narrower matrix units represent exactly too.
    """
    is_wide = dtype not in (torch.bfloat16, torch.float16)
    largest = {torch.bfloat16: 2**8, torch.float16: 2**11}.get(dtype, 2**24)
    parts = torch.tensor([1.0, 4.0, 16.0] if is_wide else [1.0, 1.0, 1.0], dtype=torch.float64)
    bound = int(parts.sum()) * in_features
    every, amplitude = -(-bound // largest), max(1, min(255, largest // bound))
    token, channel = torch.arange(num_rows).unsqueeze(1), torch.arange(in_features).unsqueeze(0)
    values = torch.randint(-amplitude, amplitude, (num_rows, in_features), generator=generator).double()
    values = torch.where(values >= 0, values + 1, values)  # never 0
    x = torch.where((token + channel) % every == 0, values, 0.0)
    return Product(x, OuterProducts(signs((out_features, 3), generator) * parts, signs((3, in_features), generator)))


def _cancelling(num_rows: int, in_features: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return [rows, in] whose sums, under weights that are equal within blocks of four, need accumulators of 24 bits.

    Aligned blocks of four inputs hold a large number, its negative and two signs in random order. Every sum is small,
    but partial sums need up to 23 bits, all exact in float32 in any order. An accumulator of 8 or 11 bits loses the
    signs. A kernel that splits a sum and rounds its parts to 16 bits loses them where it cuts a block, so in 16 bits a
    token has one block, in which the signs are equal and at least one is between the large numbers: a narrow
    accumulator is wrong for all tokens, a split sum for few (see `with_cuts`).
    """
    large = {torch.bfloat16: 2.0**16, torch.float16: 2.0**14}.get(dtype, 2.0**17)
    num_blocks = in_features // 4
    used = torch.randperm(num_blocks, generator=generator)[: min(32, num_blocks)]
    x = torch.zeros(num_rows, num_blocks, 4, dtype=torch.float64)
    if dtype in (torch.bfloat16, torch.float16):
        order = torch.tensor(_AROUND_A_SIGN)[torch.randint(0, len(_AROUND_A_SIGN), (num_rows,), generator=generator)]
        block = torch.tensor([large, -large, 1.0, 1.0], dtype=torch.float64)[order] * signs((num_rows, 1), generator)
        x[torch.arange(num_rows), used[torch.arange(num_rows) % len(used)]] = block
    else:
        small = signs((num_rows, len(used), 2), generator)
        pair = torch.tensor([large, -large], dtype=torch.float64).expand_as(small)
        order = torch.rand(num_rows, len(used), 4, generator=generator).argsort(-1)
        x[:, used] = torch.cat([pair, small], -1).gather(-1, order)
    blocks = signs((num_blocks, 1), generator)
    return torch.nn.functional.pad((x * blocks).flatten(1), (0, in_features - 4 * num_blocks))


def with_cuts(allowed: Tensor | float, x: Tensor, expected: Tensor, observed: Tensor) -> Tensor:
    """Return `allowed` and the roundings of the tokens whose sum a split sum cuts, [tokens, out]; see `_cancelling`.

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


def _running(num_rows: int, in_features: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return [rows, in] whose sums, under weights of 1, have a large number that waits for its negative.

    The first product is large and the last its negative. Between them up to 44 ones are spread over the inputs. Their
    sum is 2.75 units in the last place of the large number in 16 bits (those of bfloat16 for a float32 model), but that
    of any eighth of them less than half a unit. An accumulator that is rounded to 16 bits after some products loses
    them all. In float32 the sum is exact in any order, and a kernel that rounds the parts of a split sum, and their
    total, loses two units at most.
    """
    bits = 11 if dtype == torch.float16 else 8
    count = min(in_features - 2, _NUM_WAITING)
    large = 2.0 ** (int(math.log2(count / 2.6)) + bits - 1)
    x = torch.zeros(num_rows, in_features, dtype=torch.float64)
    x[:, 1 + torch.arange(count) * (in_features - 2) // count] = 1.0
    x[:, 0], x[:, -1] = large, -large
    return x * signs((num_rows, 1), generator)


def accumulating_product(
    num_rows: int, out_features: int, in_features: int, dtype: torch.dtype, generator: torch.Generator
) -> Product:
    """Return sums that need wide accumulators: half of the rows cancel at once, the others at the end.

    In 16 bits, kernels that split a sum may round its parts in the latter.
    """
    half = num_rows // 2
    columns = signs((1, in_features), generator)
    cancelling = _cancelling(half, in_features, dtype, generator)
    running = _running(num_rows - half, in_features, dtype, generator)
    allowed = torch.zeros(num_rows, 1, dtype=torch.float64)
    if dtype in (torch.bfloat16, torch.float16):
        allowed[half:] = sum_bound(running.abs().sum(1, keepdim=True), in_features, dtype)
    weight = OuterProducts(signs((out_features, 1), generator), columns)
    return Product(torch.cat([cancelling, running]) * columns, weight, allowed)


def signs(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return random numbers that are 1 or -1, float64."""
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
            values = full_mantissa_square(self.num_tokens, num_channels, self.ladder, bits, self.seed)
            self._squares[num_channels, bits] = values.unsqueeze(1).to(self.device, self.dtype)
        return self._squares[num_channels, bits]
