"""Collectives between processes: operands with one right result, every element of which is compared on the host.

Sums are of integers, times a power of two per element. No sum over some of the ranks has more bits than the number
format, so that the result is exact whatever order, tree or split a library adds in. Maxima and copies have full
mantissas. Every rank draws the operands of all ranks, so that it knows its result without any communication.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log2

import torch
from torch import Tensor, distributed

from aqnpipe.artifacts.diagnoses import Collectives, WrongCollective
from aqnpipe.config.fault_spec import Collective, CollectiveFault
from aqnpipe.diagnosis.api import describe_fault
from aqnpipe.noise.injection.faults import FaultHook
from aqnpipe.noise.receipts.table import Row
from aqnpipe.seeding import keyed_generator

CALLS = {1: 10, 1_021: 20, 65_537: 8, 1_048_579: 3}
"""Calls of every collective by the elements of a rank: libraries choose algorithms by size; the last are 2 to 4 MiB."""

_WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@dataclass(frozen=True)
class Call:
    """One call of a collective on this rank: `size` elements per rank, and the generator of the operands of all."""

    rank: int
    num_ranks: int
    device: torch.device
    dtype: torch.dtype
    size: int
    generator: torch.Generator

    def summands(self, size: int) -> tuple[Tensor, Tensor]:
        """Return operands [ranks, size] and their sum [size], both exact in the number format."""
        form = torch.finfo(self.dtype)
        bits = 1 - int(log2(form.eps))
        most = 2**bits // self.num_ranks
        integers = torch.randint(-most, most + 1, (self.num_ranks, size), generator=self.generator).double()
        # From the smallest normal number on, and no sum above the largest one.
        low, high = int(log2(form.tiny)), int(log2(form.max)) - bits
        exponents = torch.randint(low, high, (size,), generator=self.generator)
        operands = torch.ldexp(integers, exponents)
        return operands.to(self.dtype), operands.sum(0).to(self.dtype)

    def numbers(self) -> Tensor:
        """Return operands [ranks, size] of any sign, exponent and mantissa, without zeros and subnormal numbers."""
        words = torch.iinfo(_WORDS[self.dtype])
        drawn = torch.randint(words.min, words.max + 1, (self.num_ranks, self.size), generator=self.generator)
        found = drawn.to(_WORDS[self.dtype]).view(self.dtype)
        is_normal = found.isfinite() & (found.abs() >= torch.finfo(self.dtype).tiny)
        return torch.where(is_normal, found, torch.ones_like(found))

    def own(self, operands: Tensor) -> Tensor:
        """Return a copy of the operand of this rank on its device."""
        return operands[self.rank].to(self.device, copy=True)


def _all_reduce(call: Call) -> tuple[Tensor, Tensor]:
    operands, total = call.summands(call.size)
    result = call.own(operands)
    distributed.all_reduce(result)
    return result, total


def _all_reduce_max(call: Call) -> tuple[Tensor, Tensor]:
    operands = call.numbers()
    result = call.own(operands)
    distributed.all_reduce(result, op=distributed.ReduceOp.MAX)
    return result, operands.amax(0)


def _all_gather(call: Call) -> tuple[Tensor, Tensor]:
    operands = call.numbers()
    own = call.own(operands)
    results = [torch.full_like(own, torch.nan) for _ in operands]
    distributed.all_gather(results, own)
    return torch.cat(results), operands.flatten()


def _reduce_scatter(call: Call) -> tuple[Tensor, Tensor]:
    operands, total = call.summands(call.num_ranks * call.size)
    chunks = list(call.own(operands).chunk(call.num_ranks))
    result = torch.full_like(chunks[0], torch.nan)
    distributed.reduce_scatter(result, chunks)
    return result, total.chunk(call.num_ranks)[call.rank]


def _broadcast(call: Call) -> tuple[Tensor, Tensor]:
    operands = call.numbers()
    source = int(torch.randint(call.num_ranks, (), generator=call.generator))
    result = call.own(operands)
    distributed.broadcast(result, src=source)
    return result, operands[source]


COLLECTIVES: dict[Collective, Callable[[Call], tuple[Tensor, Tensor]]] = {
    "all_reduce": _all_reduce,
    "all_reduce_max": _all_reduce_max,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
}
"""Each returns the result on its device and what the host expects."""


def compare_collectives(
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    faults: Sequence[CollectiveFault],
    show_progress: Callable[[str], None],
) -> Collectives:
    """Run every collective in the group of this process and return what was wrong on this rank.

    `faults` are simulated on the results of their rank. Raises RuntimeError if torch cannot run a collective,
    ReceiptError if a simulated fault changed nothing.
    """
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    simulated = [(fault, FaultHook(fault.of_results, Row("forward"))) for fault in faults if fault.rank == rank]
    faulty = []
    for name, run in COLLECTIVES.items():
        wrong = []
        for size, number in ((size, number) for size, calls in CALLS.items() for number in range(calls)):
            show_progress(f"{name} of {size:,} elements, call {number + 1}")
            generator = keyed_generator("cpu", seed, f"collectives.{name}", size, number)
            call = Call(rank, num_ranks, device, dtype, size, generator)
            result, expected = run(call)
            observed = result.cpu()
            for hook in (hook for fault, hook in simulated if fault.site == name):
                observed = hook.apply(observed)
            if not torch.equal(observed, expected):  # no right element is NaN; zeros have any sign
                wrong.append((expected, observed))
        faulty += [_in_all_calls(name, call, wrong)] if wrong else []
    return Collectives(
        verdict="fault" if faulty else "healthy",
        reason=f"rank {rank}",
        calls=len(COLLECTIVES) * sum(CALLS.values()),
        faults=tuple(faulty),
        simulated_faults=tuple(describe_fault(fault, hook.row) for fault, hook in simulated),
    )


def _in_all_calls(name: str, call: Call, wrong: Sequence[tuple[Tensor, Tensor]]) -> WrongCollective:
    """Return what is wrong in the (expected, observed) results of the wrong calls of a collective."""
    indices = [(expected != observed).nonzero() for expected, observed in wrong]
    first = int(indices[0][0])
    expected, observed = (float(result[first]) for result in wrong[0])
    return WrongCollective(
        collective=name,
        rank=call.rank,
        device=str(call.device),
        dtype=str(call.dtype).removeprefix("torch."),
        sizes=tuple(dict.fromkeys(len(observed) for _, observed in wrong)),
        wrong_elements=sum(map(len, indices)),
        first_index=first,
        expected=repr(expected),
        observed=repr(observed),
        wrong_calls=len(wrong),
        calls=sum(CALLS.values()),
    )
