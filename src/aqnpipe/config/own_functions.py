"""Functions of a user's own, imported: each mistake in them is one line.

Foreign code may raise anything, also SystemExit, when it is imported and when it is called.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from aqnpipe.config.own_code import module_of, modules_beside, search_path, source_digest, source_of
from aqnpipe.errors import ConfigError, first_line

_SHOWN = 60


def load_function(function: str) -> Callable[..., Any]:
    """Import a function of a user's own; ConfigError with one line if that fails."""
    source = source_of(function)
    name = function.partition(":")[2]
    if search_path(function)[-1] not in sys.path:
        sys.path.append(search_path(function)[-1])
    for path in modules_beside(function):
        spec = find_spec(path.stem)
        _refuse_hidden(function, path, None if spec is None else spec.origin)
    try:
        module = importlib.import_module(module_of(function))
        found = getattr(module, name, None)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{function}: {source} cannot be imported ({_raised(error)})") from error
    # Modules that are part of the interpreter have no file.
    _refuse_hidden(function, source, getattr(module, "__file__", None))
    if not callable(found):
        raise ConfigError(f"{function}: {source} has no function {name}")
    return found


@cache
def unchanged_function(function: str, digest: str) -> Callable[..., Any]:
    """Return a function whose source has the digest with which its job was planned; ConfigError if it has another."""
    if source_digest(function) != digest:
        raise ConfigError(f"{function}: its source changed after the run was planned, start the workflow again")
    return load_function(function)


@contextmanager
def as_config_error(function: str, inputs: str) -> Iterator[None]:
    """Raise what a user's function raises in the body as a ConfigError of one line; `inputs` describes its inputs."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{function}: raised {_raised(error)}, {inputs}") from error


@cache
def planned_function(function: str, digest: str) -> Callable[[str, str], Any]:
    """Return a function of (response, gold answer) whose source has the digest with which its job was planned.

    Raises ConfigError if it has another one, and if the function raises.
    """
    call = unchanged_function(function, digest)

    def value(response: str, gold: str) -> Any:
        inputs = f"for the response {response[:_SHOWN]!r} and the gold answer {gold[:_SHOWN]!r}"
        with as_config_error(function, inputs):
            return call(response, gold)

    return value


def unusable_result(function: str, found: object, response: str, expected: str) -> ConfigError:
    """Return the error for a function that returned something else than expected."""
    return ConfigError(
        f"{function}: returned {str(found)[:_SHOWN]!r} ({type(found).__name__}) for the response "
        f"{response[:_SHOWN]!r}, expected {expected}"
    )


def _refuse_hidden(function: str, source: Path, imported: str | None) -> None:
    """Raise ConfigError if Python imports another module than the one whose source is in the function's digest."""
    if imported is None or Path(imported).resolve() != source.resolve():
        found = imported or "a module of Python"
        raise ConfigError(f"{function}: {source} is hidden by {found}, which has its name: rename the module")


def _raised(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
