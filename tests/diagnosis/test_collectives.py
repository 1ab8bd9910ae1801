"""Collectives between ranks: libraries that are right in other ways are healthy, and wrong elements are found."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from multiprocessing import get_context

import pytest
import torch
from torch import distributed

from aqnpipe.artifacts.diagnoses import Collectives
from aqnpipe.config.fault_spec import CollectiveFault
from aqnpipe.diagnosis import collectives
from aqnpipe.diagnosis.collectives import CALLS, COLLECTIVES, compare_collectives
from aqnpipe.diagnosis.node_reports import of_all_ranks
from aqnpipe.errors import ReceiptError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPU = torch.device("cpu")


class Library:
    """A library of collectives between threads, each of which is a rank; subclasses are right or wrong otherwise."""

    ReduceOp = distributed.ReduceOp

    def __init__(self, num_ranks):
        self.num_ranks = num_ranks
        self.rank = threading.local()
        self.calls = threading.local()
        self._given = [None] * num_ranks
        self._barrier = threading.Barrier(num_ranks, timeout=60)

    def get_rank(self):
        return self.rank.number

    def get_world_size(self):
        return self.num_ranks

    def exchange(self, given):
        self._given[self.get_rank()] = given
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        self.calls.number = getattr(self.calls, "number", -1) + 1
        return found

    def add(self, operands):
        return reduce(torch.add, operands)

    def copy(self, operand):
        return operand

    def all_reduce(self, x, op=distributed.ReduceOp.SUM):
        operands = self.exchange(x.clone())
        x.copy_(self.add(operands) if op == self.ReduceOp.SUM else torch.stack(operands).amax(0))

    def all_gather(self, results, x):
        for result, operand in zip(results, self.exchange(x), strict=True):
            result.copy_(self.copy(operand))

    def reduce_scatter(self, result, chunks):
        result.copy_(self.add([given[self.get_rank()] for given in self.exchange(chunks)]))

    def broadcast(self, x, src):
        x.copy_(self.copy(self.exchange(x.clone())[src]))


class AnotherOrder(Library):
    def add(self, operands):
        return reduce(torch.add, operands[::-1])


class WideAccumulator(Library):
    def add(self, operands):
        return reduce(torch.add, [x.double() for x in operands]).to(operands[0].dtype)


class Loses(Library):
    """The contribution of the last rank is lost."""

    def add(self, operands):
        return reduce(torch.add, operands[:-1])


class AddsInBfloat16(Library):
    def add(self, operands):
        return reduce(torch.add, [x.bfloat16() for x in operands]).to(operands[0].dtype)


class FlipsABit(Library):
    """The lowest bit of the last element is wrong where rank 1 gathers or receives."""

    def copy(self, operand):
        words = operand.clone().view(torch.int16)
        if self.get_rank() == 1:
            # The low half of a float32 comes first.
            words[-operand.dtype.itemsize // 2] ^= 1
        return words.view(operand.dtype)


class SwapsChunks(Library):
    def reduce_scatter(self, result, chunks):
        other = self.num_ranks - 1 - self.get_rank()
        result.copy_(self.add([given[other] for given in self.exchange(chunks)]))


class SwapsGathered(Library):
    def all_gather(self, results, x):
        super().all_gather(results[::-1], x)


class DoesNothing(Library):
    def broadcast(self, x, src):
        self.exchange(x)


class OneCallInTwenty(Library):
    def add(self, operands):
        right = super().add(operands)
        return right + right[:1] if self.calls.number % 20 == 7 else right


class Minimum(Library):
    def all_reduce(self, x, op=distributed.ReduceOp.SUM):
        super().all_reduce(x, op)
        if op != self.ReduceOp.SUM:
            x.copy_(torch.stack(self.exchange(-x)).amax(0))


def compared(monkeypatch, library, dtype=torch.float32, num_ranks=2, calls=None, faults=()):
    """Return the report of the node on ranks that use `library`."""
    monkeypatch.setattr(collectives, "CALLS", calls or {1: 4, 1_021: 4, 4_099: 2})
    used = library(num_ranks)
    monkeypatch.setattr(collectives, "distributed", used)

    def work(rank):
        used.rank.number = rank
        return compare_collectives(CPU, dtype, 3, faults, lambda line: None)

    with ThreadPoolExecutor(num_ranks) as pool:
        return of_all_ranks(list(pool.map(work, range(num_ranks))))


def in_process(rank, num_ranks, folder, dtype):
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/meeting", num_ranks)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    found = compare_collectives(CPU, dtype, 0, (), lambda line: None)
    distributed.destroy_process_group()
    (folder / f"{rank}.json").write_text(found.model_dump_json())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_processes_on_this_cpu_are_healthy(num_ranks, dtype, tmp_path):
    arguments = [(rank, num_ranks, tmp_path, dtype) for rank in range(num_ranks)]
    processes = [get_context("fork").Process(target=in_process, args=given) for given in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    reports = [Collectives.model_validate_json((tmp_path / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    found = of_all_ranks(reports)
    assert (found.verdict, found.faults) == ("healthy", ())
    assert found.calls == len(COLLECTIVES) * sum(CALLS.values())


@pytest.mark.parametrize("library", [Library, AnotherOrder, WideAccumulator])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_every_right_library_is_healthy(monkeypatch, library, dtype, num_ranks):
    found = compared(monkeypatch, library, dtype, num_ranks)
    assert (found.verdict, found.faults) == ("healthy", ())
    assert found.calls == 50


@pytest.mark.parametrize(
    ("library", "names"),
    [
        (Loses, {"all_reduce", "reduce_scatter"}),
        (AddsInBfloat16, {"all_reduce", "reduce_scatter"}),
        (FlipsABit, {"all_gather", "broadcast"}),
        (SwapsChunks, {"reduce_scatter"}),
        (SwapsGathered, {"all_gather"}),
        (DoesNothing, {"broadcast"}),
        (OneCallInTwenty, {"all_reduce"}),
        (Minimum, {"all_reduce_max"}),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_wrong_library_is_a_fault_of_what_it_gets_wrong(monkeypatch, library, names, dtype):
    if library is AddsInBfloat16 and dtype == torch.bfloat16:
        # Any library may add in the number format itself.
        assert compared(monkeypatch, library, dtype).verdict == "healthy"
        return
    found = compared(monkeypatch, library, dtype)
    assert found.verdict == "fault"
    wrong = {fault.collective for fault in found.faults}
    assert wrong >= names if library is OneCallInTwenty else wrong == names
    assert found.reason.startswith(f"50 calls on each of 2 ranks compared, wrong: {found.faults[0].collective}")


def test_a_fault_says_where_and_how_often(monkeypatch):
    found = compared(monkeypatch, FlipsABit, torch.bfloat16)
    gathered = next(fault for fault in found.faults if fault.collective == "all_gather")
    assert (gathered.rank, gathered.device, gathered.dtype) == (1, "cpu", "bfloat16")
    assert gathered.sizes == (2, 2_042, 8_198)
    # Of every call and of both gathered parts the last element.
    assert (gathered.wrong_elements, gathered.wrong_calls, gathered.calls) == (20, 10, 10)
    assert gathered.first_index == 0
    assert float(gathered.expected) != float(gathered.observed)
    assert gathered.in_words.startswith(
        "all_gather in bfloat16, result of rank 1 (cpu): 20 elements wrong in 10 of 10 calls, first at index 0 of 2: "
    )


@pytest.mark.parametrize("site", COLLECTIVES)
def test_a_simulated_fault_is_found_on_its_rank(monkeypatch, site):
    fault = CollectiveFault(type="saturation", site=site, magnitude=0.5, rank=1)
    found = compared(monkeypatch, Library, faults=(fault,))
    assert {(wrong.collective, wrong.rank) for wrong in found.faults} == {(site, 1)}
    (simulated,) = found.simulated_faults
    assert (simulated["site"], simulated["rank"]) == (site, 1)
    assert simulated["affected_elements"] == found.faults[0].wrong_elements


def test_a_simulated_fault_that_changes_nothing_is_an_error(monkeypatch):
    fault = CollectiveFault(type="spike", site="broadcast", magnitude=1e-9)
    with pytest.raises(ReceiptError, match=r"site=broadcast.* changed none of"):
        compared(monkeypatch, Library, faults=(fault,))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operands_fill_the_number_format(dtype):
    generator = torch.Generator().manual_seed(0)
    call = collectives.Call(0, 3, CPU, dtype, 4_099, generator)
    operands, total = call.summands(4_099)
    exact = operands.double().sum(0)
    assert torch.equal(exact, total.double())
    bits = 1 - int(torch.tensor(torch.finfo(dtype).eps).log2())
    mantissas = torch.frexp(exact).mantissa * 2**bits
    # A quarter of all sums need the last bit or the one before it.
    assert float((mantissas.remainder(4) != 0).double().mean()) > 0.2
    numbers = call.numbers()
    assert numbers.isfinite().all()
    assert len(numbers.flatten().unique()) > 0.8 * numbers.numel()
