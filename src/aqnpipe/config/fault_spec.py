"""Faults as one line of text, for the command line: `type=saturation,layer=10,magnitude=0.3,sparsity=0.1`."""

from pydantic import ValidationError

from aqnpipe.config.base import describe_validation_error, key_values
from aqnpipe.config.noise import Fault
from aqnpipe.errors import ConfigError


def parse_fault(spec: str) -> Fault:
    """Return the fault that `spec` describes: comma-separated key=value pairs with the keys of `Fault`.

    Raises ConfigError if a key is missing, repeated or unknown, or a value is out of range.
    """
    values = key_values("fault", spec, Fault.model_fields)
    try:
        return Fault.model_validate_strings(values)
    except ValidationError as error:
        raise ConfigError(f"fault {spec!r}: {describe_validation_error(error)}") from error


def format_fault(fault: Fault) -> str:
    """Return the spec of `fault` without default values; the inverse of `parse_fault`."""
    values = {name: getattr(fault, name) for name in Fault.model_fields}
    return ",".join(
        f"{name}={value!r}" if isinstance(value, float) else f"{name}={value}"
        for name, value in values.items()
        if Fault.model_fields[name].is_required() or value != Fault.model_fields[name].default
    )
