"""Faults as one line of text, for the command line: `type=saturation,layer=10,magnitude=0.3,sparsity=0.1`."""

from typing import Literal, TypeVar, get_args

from pydantic import Field, ValidationError

from aqnpipe.config.base import FrozenModel, describe_validation_error, key_values
from aqnpipe.config.noise import Fault, FaultType
from aqnpipe.errors import ConfigError

Collective = Literal["all_reduce", "all_reduce_max", "all_gather", "reduce_scatter", "broadcast"]
"""Operations between processes that a diagnosis of a node tests; all_reduce and reduce_scatter are sums."""


class CollectiveFault(FrozenModel):
    """A simulated fault on the results of one collective on one rank; its elements are the channels of `Fault`."""

    type: FaultType
    site: Collective
    magnitude: float = Field(gt=0, le=1)
    sparsity: float = Field(default=1.0, gt=0, le=1)
    rank: int = Field(default=0, ge=0)

    @property
    def of_results(self) -> Fault:
        """The fault whose arithmetic it has; its layer means nothing."""
        return Fault(layer=0, **self.model_dump(exclude={"site", "rank"}))


AnyFault = Fault | CollectiveFault
Parsed = TypeVar("Parsed", Fault, CollectiveFault)


def parse_fault(spec: str) -> Fault:
    """Return the fault that `spec` describes: comma-separated key=value pairs with the keys of `Fault`.

    Raises ConfigError if a key is missing, repeated or unknown, or a value is out of range.
    """
    return _parse(spec, Fault)


def parse_fault_of_node(spec: str) -> AnyFault:
    """Return the fault that `spec` describes as `parse_fault` does, or that of a collective if `site` is one."""
    is_between_ranks = any(f"site={site}" in spec.replace(" ", "").split(",") for site in get_args(Collective))
    return _parse(spec, CollectiveFault) if is_between_ranks else _parse(spec, Fault)


def _parse(spec: str, form: type[Parsed]) -> Parsed:
    values = key_values("fault", spec, form.model_fields)
    try:
        return form.model_validate_strings(values)
    except ValidationError as error:
        raise ConfigError(f"fault {spec!r}: {describe_validation_error(error)}") from error


def format_fault(fault: AnyFault) -> str:
    """Return the spec of `fault` without default values; the inverse of `parse_fault_of_node`."""
    fields = type(fault).model_fields
    return ",".join(
        f"{name}={value!r}" if isinstance(value, float) else f"{name}={value}"
        for name, value in fault
        if fields[name].is_required() or value != fields[name].default
    )
