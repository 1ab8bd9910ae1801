"""Custom functions, named as `package.module:function`: rewards, scorers, error models and schedules.

Where their source is, and its digest; what a study says about error models and schedules, and the contract of these.

The source is found without importing it, so that a workflow can tell quickly whether it changed. It is looked for
where Python looks, in the working directory, and in the folder of the study file. The loader of studies writes the last
as `folder/package.module:function`, so that jobs need nothing but the name. The digest is in the settings of every job.
What a study announces about a function is compared with what was measured; a receipt refuses any difference.

Once imported, foreign code may raise anything, also SystemExit; each mistake in it is one line.
"""

import ast
import hashlib
import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, Self, TypeGuard

from pydantic import BaseModel, Field

from aqnpipe.config.base import FrozenModel, replaced
from aqnpipe.config.validation_messages import FUNCTION_PATTERN
from aqnpipe.errors import ConfigError, first_line

if TYPE_CHECKING:
    from torch import Tensor

CustomFunction = Annotated[str, Field(pattern=FUNCTION_PATTERN)]
"""A function as `package.module:function`, behind the folder of its module if that is no usual place."""

_NAMES_CODE = ("function", "primary_scorer", "include_path")
"""Keys of settings that name code: functions, and folders of tasks of lm-evaluation-harness, which may have some."""

_DIGESTS = {"source_sha256": "function", "scorer_sha256": "primary_scorer"}
"""Keys with the digest of the source of a function, and the key that names it."""

_INSTALLED = frozenset(("site-packages", "dist-packages"))

_SHOWN = 60


def _parts(function: str) -> tuple[str, str, str]:
    """Return the folder in a function's name ("" if there is none), its module and its own name."""
    place, _, name = function.partition(":")
    folder, _, module = place.rpartition("/")
    return folder, module, name


def _search_path(function: str) -> list[str]:
    """Return where a function's module is looked for: in its folder, else in Python's places and the working one."""
    folder, _, _ = _parts(function)
    return [str(Path(folder).absolute())] if folder else [*sys.path, str(Path.cwd())]


def located(function: str, study_folder: Path) -> str:
    """Return a function that a study in `study_folder` names, with the folder of its module if that is no usual place.

    A folder in the name is relative to the study. A module that is nowhere, and text that names no function, stay as
    they are and are refused later. ConfigError if a usual place and the folder of the study have different modules.
    """
    if not re.match(FUNCTION_PATTERN, function):
        return function
    beside = os.path.normpath(study_folder / function)
    if _parts(function)[0]:
        return beside
    if not _parts(beside)[0] or _source_if_any(beside) is None:
        return function
    if _source_if_any(function) is None:
        return beside
    _refuse_another(function, beside)
    return function


def refuse_foreign_code(settings: BaseModel, files: Iterable[Path]) -> None:
    """Raise ConfigError if settings read from `files` name code, and it or a file is not in the working directory.

    Installed packages are not in it either: they have functions that execute what they get, such as a response of the
    model. A file cannot say that it is trusted.
    """
    here = Path.cwd().resolve()
    for name, source in _code_in(settings.model_dump()):
        for place in (source, *files):
            resolved = place.resolve()
            if not resolved.is_relative_to(here) or _INSTALLED & {*resolved.parts}:
                raise ConfigError(
                    f"{name}: its code would run with your rights, and {place} is not of the working directory; "
                    "expected --trust-code (in a workflow: --config trust_code=true) if you trust it"
                )


def _code_in(part: Any) -> Iterator[tuple[str, Path]]:
    """Yield the functions and folders with code that settings name, and where they are; none for what is nowhere."""
    for key, value in part.items() if isinstance(part, Mapping) else ():
        if key in _NAMES_CODE and isinstance(value, str):
            source = _source_if_any(value) if ":" in value else Path(value) if key == "include_path" else None
            if source is not None:
                yield value, source
        elif key != "settings":
            yield from _code_in(value)
    for value in part if isinstance(part, tuple | list) else ():
        yield from _code_in(value)


def source_of(function: str) -> Path:
    """Return the file with the source of a function's module; ConfigError if there is none, or several."""
    source = _source(function)
    if not _parts(function)[0]:
        _refuse_another(function, str(Path.cwd() / function))
    return source


def _source(function: str) -> Path:
    folder, module, _ = _parts(function)
    places, name = _search_path(function), ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        found = PathFinder.find_spec(name, places)
        if found is None and not folder and "." not in name:
            found = find_spec(name)  # a package that is no folder on the path, as editable ones with a finder
        if found is None:
            usual = "the working directory, beside the study file or on Python's path (PYTHONPATH)"
            raise ConfigError(f"{function}: no module {name} in {folder or usual}")
        places = list(found.submodule_search_locations or ())
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        raise ConfigError(f"{function}: {module} has no Python source, expected a module of your own")
    return Path(found.origin)


def _source_if_any(function: str) -> Path | None:
    try:
        return _source(function)
    except ConfigError:
        return None


def _refuse_another(function: str, in_folder: str) -> None:
    """Raise ConfigError if the function's module in a folder is another than the one that Python would import."""
    first, second = _source(function), _source_if_any(in_folder)
    if second is not None and first.resolve() != second.resolve():
        raise ConfigError(f"{function}: found {first} and {second}, expected one module of this name: rename one")


def source_digest(function: str) -> str:
    """Return a digest of a function's source: of its whole package, or of its module and those it imports beside it."""
    root, files = _digested(function)
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _digested(function: str) -> tuple[Path, list[Path]]:
    """Return the files with the source of a function, and their folder, by which they are named."""
    source = source_of(function)
    depth = _parts(function)[1].count(".") + (source.name == "__init__.py")
    if not depth:
        return source.parent, sorted(_beside(source, set()))
    root = source.parents[depth - 1]
    return root, sorted(root.rglob("*.py"))


class NamesCode(FrozenModel):
    """Settings that name functions of a user's own, at any depth."""

    def planned(self) -> Self:
        """Return these settings with the digest of the source of every function that they name.

        Raises ConfigError if one has no source, or another than its digest says.
        """
        return replaced(self, NamesCode, _with_digests)


def _with_digests(part: NamesCode) -> NamesCode:
    found = {}
    for key, name in _DIGESTS.items():
        function = getattr(part, name, None)
        if key in type(part).model_fields and function is not None and ":" in function:
            found[key] = digest = source_digest(function)
            if (given := getattr(part, key)) not in (None, digest):
                raise ConfigError(f"{function}: {key} is {given}, its source has {digest}")
    return part.model_copy(update=found)


def _beside(source: Path, seen: set[Path]) -> set[Path]:
    """Return a module and the modules in its folder that it imports, at any depth."""
    if source in seen:
        return seen
    seen.add(source)
    for name in _imported(source):
        path = source.parent / f"{name}.py"
        if path.is_file():
            _beside(path, seen)
    return seen


def _imported(source: Path) -> Iterator[str]:
    try:
        tree = ast.parse(source.read_bytes())
    except SyntaxError as error:
        raise ConfigError(f"{source}: not valid Python ({error.msg}, line {error.lineno})") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def load_function(function: str) -> Callable[..., Any]:
    """Import a function of a user's own; ConfigError with one line if that fails."""
    source, (_, module_name, name) = source_of(function), _parts(function)
    if _search_path(function)[-1] not in sys.path:
        sys.path.append(_search_path(function)[-1])
    is_alone = "." not in module_name and source.name != "__init__.py"
    for path in sorted(_beside(source, set()) - {source}) if is_alone else ():
        spec = find_spec(path.stem)
        _refuse_hidden(function, path, None if spec is None else spec.origin)
    try:
        module = importlib.import_module(module_name)
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


CustomValue = bool | int | float | str
"""A setting that is passed to a function by its name."""

MOST_DRAWS = 8


class ErrorFunction(Protocol):
    """An error model: `def my_error(values, normals, **settings)` returns the values with their error.

    values: the computed values, in any shape, in the units of the operator's result. float32, or float64 where the
    model computes in it; 16-bit results are widened before, and the result is rounded once to their format.
    normals: `[draws, *values.shape]`, independent N(0, 1) numbers in the dtype of `values`, keyed by seed, step,
    forward pass, layer, call and element. They are the only random numbers that the function may use.
    settings: `settings` of the study, by name.

    It returns a finite tensor of the shape, dtype and device of `values`. It must be elementwise: each result depends
    on its value and its normals alone, so that the audit can recompute any of them by itself, which it does on the
    CPU. It keeps no state. In the backward phase `values` are gradients.
    """

    def __call__(self, values: "Tensor", normals: "Tensor", **settings: CustomValue) -> "Tensor":
        """Return `values` with their error."""
        ...


_Size = Annotated[float, Field(ge=0)]


_TOLERANCE = 0.1
"""Relative deviation of a size from what was announced that is accepted as an approximation of the user's."""

_STANDARD_ERRORS = 5.0
_LARGEST_KURTOSIS = 9.0
"""Of the errors, for the standard error of their root mean square: 3 for a normal distribution, 6 for Laplace's."""


class CustomError(NamesCode):
    """A custom error model: a function with the signature `ErrorFunction`."""

    kind: Literal["own"] = "own"
    function: CustomFunction
    """package.module:function of (values, normals, **settings), run with your rights"""
    settings: dict[str, CustomValue] = Field(default={})
    """passed to the function by name"""
    draws: int = Field(default=1, ge=0, le=MOST_DRAWS)
    """independent normal numbers per element; 0: it is not random"""
    quantity: Literal["relative", "absolute"] = "relative"
    """what size is of: (y' - y)/y over values other than 0, or y' - y"""
    size: _Size | tuple[_Size, _Size]
    """announced root mean square of the error, or its limits [low, high]; what is measured must agree within 10 % and
    the error of the measurement"""
    source_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """set by the workflow"""

    def _problems(self) -> Iterator[str]:
        low, high = self.sizes
        if high == 0 or low > high:
            yield f"size: found {self.size}, expected a number above 0, or [low, high] with low below high"

    @property
    def sizes(self) -> tuple[float, float]:
        """Limits of the announced size."""
        return self.size if isinstance(self.size, tuple) else (self.size, self.size)

    def size_problem(
        self, measured: float, count: int, what: str, limits: tuple[float, float] | None = None
    ) -> str | None:
        """Return how a size that was measured over `count` values disagrees with the announced one; None if it agrees.

        `limits`: those of the announced size with what rounding makes of them.
        """
        low, high = self.sizes if limits is None else limits
        tolerance = _TOLERANCE + _STANDARD_ERRORS * math.sqrt((_LARGEST_KURTOSIS - 1) / (4 * count))
        if low * max(1 - tolerance, 0.0) <= measured <= high * (1 + tolerance):
            return None
        announced = f"{self.size:g}" if isinstance(self.size, float) else "{:g} to {:g}".format(*self.sizes)
        size = f"a measured {self.quantity} size of {measured:.4g} over {count:,} {what}"
        return f"{self.function} has {size}, announced {announced}"


class CustomSchedule(NamesCode):
    """A schedule of a user's own: `def my_schedule(step, num_steps, num_epochs, **settings)` returns AQN's sigma.

    step: optimiser steps that are done, from 0 to num_steps. It returns a finite number from 0 to the announced
    `sigma_max`, the same for the same arguments: relative for noise on hidden states, in the units of the weights for
    noise on norms.
    """

    kind: Literal["own"] = "own"
    function: CustomFunction
    """package.module:function of (step, num_steps, num_epochs, **settings), run with your rights"""
    settings: dict[str, CustomValue] = Field(default={})
    """passed to the function by name"""
    sigma_max: float = Field(gt=0)
    """announced upper limit of sigma"""
    source_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """set by the workflow"""
    sigmas: tuple[float, ...] | None = None
    """after each number of steps; a job computes them with the function, not to be given"""

    def _problems(self) -> Iterator[str]:
        if self.sigmas is not None and not all(0 <= sigma <= self.sigma_max for sigma in self.sigmas):
            yield "sigmas: expected numbers from 0 to sigma_max"


def is_usable_sigma(sigma: object, largest: float) -> TypeGuard[Real]:
    """Return whether a schedule may return `sigma`: a finite number, also one of NumPy's, from 0 to `largest`."""
    return isinstance(sigma, Real) and not isinstance(sigma, bool) and 0 <= float(sigma) <= largest
