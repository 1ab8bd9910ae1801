"""Functions of a user's own, named as `package.module:function`: where their source is, and its digest.

The source is found without importing it, so that a workflow can tell quickly whether it changed. It is looked for
where Python looks, and in the working directory.
"""

import ast
import hashlib
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated

from pydantic import Field

from aqnpipe.config.validation_messages import FUNCTION_PATTERN
from aqnpipe.errors import ConfigError

OwnFunction = Annotated[str, Field(pattern=FUNCTION_PATTERN)]
"""A function as `package.module:function`."""


def search_path() -> list[str]:
    """Return where modules are looked for: Python's own places, then the working directory."""
    return [*sys.path, str(Path.cwd())]


def source_of(function: str) -> Path:
    """Return the file with the source of a function's module; ConfigError if there is none."""
    module = function.partition(":")[0]
    places, name = search_path(), ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        found = PathFinder.find_spec(name, places)
        if found is None:
            raise ConfigError(
                f"{function}: no module {name} in the working directory or where Python looks (PYTHONPATH)"
            )
        places = list(found.submodule_search_locations or ())
    if found is None or found.origin is None or not found.origin.endswith(".py"):
        raise ConfigError(f"{function}: {module} has no Python source, expected a module of your own")
    return Path(found.origin)


def source_digest(function: str) -> str:
    """Return a digest of a function's source: of its whole package, or of its module and those it imports beside it."""
    source = source_of(function)
    depth = function.partition(":")[0].count(".") + (source.name == "__init__.py")
    if depth:
        root = source.parents[depth - 1]
        files = sorted(root.rglob("*.py"))
    else:
        root, files = source.parent, sorted(_beside(source, set()))
    digest = hashlib.sha256()
    for path in files:
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


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
