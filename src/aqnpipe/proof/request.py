"""Request to an audit, which its receipt is checked against."""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import NamedTuple

from torch import Tensor, nn

from aqnpipe.config.custom_code import CustomError
from aqnpipe.config.noise import MACHINE, AppliedError, Fault, MeasuredError, PlacedError, TensorError
from aqnpipe.proof.recompute import Shards

_SAMPLES = 16


class RequestedModule(NamedTuple):
    """An error that was requested of a module: `operator` and `where` name it, `stream` its random numbers.

    `part` is the part of the model that contains it. `is_last`: the module returns what has the error.
    `shards`: the columns that a tensor-parallel worker has of the tensor; None if it has all.
    """

    module: nn.Module
    part: int
    operator: str
    where: str
    error: TensorError
    stream: str
    is_last: bool = False
    shards: Shards | None = None


class RequestedFault(NamedTuple):
    """A fault that was requested of a site, by its number among those of the machine.

    `threshold` returns the reference that an earlier call left for it, in float32; None if it has none.
    """

    number: int
    fault: Fault
    threshold: Callable[[], Tensor | None]


class RequestedOutput(NamedTuple):
    """Request to the output of a module; `where` names it, `stream` the random numbers of its faults.

    `noise` is the place of the noise on hidden states that comes between faults, None if there is none.
    """

    module: nn.Module
    part: int
    where: str
    stream: str
    faults: tuple[RequestedFault, ...] = ()
    noise: int | None = None

    def steps(self, *, before_noise: bool) -> list[tuple[RequestedFault, int]]:
        """Return the faults before or behind the noise, in order, each with the number of its application."""
        left_out = "after_noise" if before_noise else "before_noise"
        if self.noise is None:
            return [] if before_noise else [(one, 1) for one in self.faults]
        return [(one, int(not before_noise)) for one in self.faults if one.fault.order != left_out]


class AuditRequest(NamedTuple):
    """Request to the machine, in the places `selected` by number and for the `operators`; None for all.

    `elementwise`: softmax, activations and norms in layers too. `errors`: the error of each place that has one, in
    place of `selected`. `modules`: errors on modules, by the number of their place. `outputs` are computed again.
    `counts_operations`: floating-point operations are counted in passes that are observed as a whole. `changed_behind`:
    parts in which something comes behind the errors of norms, such as simulated faults; None where it may come
    anywhere.

    Of an inference engine, with the part of each module: `linears` are its linear modules with their paths, in place of
    torch's; `results` compute one operator as a whole, which is named in words; `shards`: the columns that this worker
    has of results in a module. `late`: parts that are called when the pass has returned. `watches_launches`: kernels of
    Triton may be products. `num_samples`: elements of each result that are compared. `machine`: stream of the key of a
    fixed machine.
    """

    error: AppliedError | MeasuredError | None
    seed: int
    position: tuple[int, int, int]
    stream: str
    selected: Set[int] | None
    backward: bool
    operators: Set[str] | None = None
    elementwise: bool = False
    errors: Mapping[int, PlacedError] | None = None
    modules: Mapping[int, RequestedModule] = {}
    outputs: Sequence[RequestedOutput] = ()
    counts_operations: bool = False
    changed_behind: Set[int] | None = None
    linears: Mapping[nn.Module, tuple[int, str]] | None = None
    results: Mapping[nn.Module, tuple[int, str]] = {}
    shards: Mapping[nn.Module, tuple[int, Shards]] = {}
    late: Set[int] = frozenset()
    watches_launches: bool = False
    num_samples: int = _SAMPLES
    machine: str = MACHINE

    def error_at(self, part: int) -> PlacedError | None:
        """Return the error that was requested of a part; None if none was."""
        if self.errors is not None:
            return self.errors.get(part)
        return self.error if self.selected is None or part in self.selected else None  # type: ignore[return-value]

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases in which there must be an error."""
        found = (self.stream, "backward") if self.backward else (self.stream,)
        return () if self.error is None else found

    @property
    def custom(self) -> CustomError | None:
        """The error, if it is a user's own."""
        return self.error if isinstance(self.error, CustomError) else None

    @property
    def scale(self) -> float | None:
        """The scale of the error; None if it has none."""
        found: float | None = getattr(self.error, "scale", None)
        return found

    @property
    def in_words(self) -> str:
        """The error in words."""
        if self.error is None:
            return "no error"
        left_out = {"kind", "figures", "source_sha256"}
        settings = self.error.model_dump(exclude=left_out, exclude_none=True, exclude_defaults=True)
        values = [
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}" for name, value in settings.items()
        ]
        return " ".join([self.error.kind.replace("_", " "), *values])
