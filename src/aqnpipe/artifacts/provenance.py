"""Where results come from: digests of code and files, versions of what they stand on."""

import ast
import hashlib
import re
from functools import cache
from importlib import metadata
from pathlib import Path

import aqnpipe

_PACKAGE_ROOT = Path(aqnpipe.__file__).parent
_MODULE_STRING = re.compile(r"([a-z_]\w*(?:\.[a-z_]\w*)+)(?::\w+)?")
_RECORDED_DISTRIBUTIONS = (
    "aqnpipe",
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "polars",
    "scipy",
    "statsmodels",
)


def sha256_of_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def versions() -> dict[str, str]:
    """Return the installed versions of this package and of the libraries that decide results."""
    return {name: metadata.version(name) for name in _RECORDED_DISTRIBUTIONS}


def code_digest(module: str, root: Path = _PACKAGE_ROOT) -> str:
    """Return a digest of the sources that `module` depends on: its own and those of `dependencies`.

    Read from the sources without importing them, so that a workflow can tell cheaply which stages an edit concerns.
    `root`: folder of the package. Raises ModuleNotFoundError if there is no such module.
    """
    digest = hashlib.sha256()
    for name, path in sorted(dependencies(module, root).items()):
        digest.update(name.encode())
        for source in (path, *sorted(path.parent.glob("templates/*"))):
            digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def dependencies(module: str, root: Path = _PACKAGE_ROOT) -> dict[str, Path]:
    """Return the source files of `module` and of every module of this package that it needs, at any depth, by name.

    A module is needed if it is imported anywhere in a source, or named by a string as `package.module` or
    `package.module:attribute`, which is how other libraries are told what to load. Templates beside a module count as
    its source. Raises ModuleNotFoundError if `module`, or a module that a string names, does not exist.
    """
    if _source_of(module, root) is None:
        raise ModuleNotFoundError(f"no module {module} in {root}")
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _source_of(name, root)
        if path is None or name in found:
            continue
        found[name] = path
        waiting.extend(_names_in(path, path.stat().st_mtime_ns, root))
        if "." in name:
            waiting.append(name.rpartition(".")[0])
    return found


@cache
def _names_in(path: Path, modified_ns: int, root: Path) -> tuple[str, ...]:
    """Return the names that a source imports or names by a string. Cached: stages share most of their modules."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
            names.extend(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = _MODULE_STRING.fullmatch(node.value)
            if match and match[1].partition(".")[0] == root.name:
                if _source_of(match[1], root) is None:
                    raise ModuleNotFoundError(f"{path}:{node.lineno}: {node.value!r} names no module in {root}")
                names.append(match[1])
    return tuple(names)


def _source_of(module: str, root: Path) -> Path | None:
    parts = module.split(".")
    if parts[0] != root.name:
        return None
    base = root.joinpath(*parts[1:])
    for candidate in (base / "__init__.py", base.with_suffix(".py")):
        if candidate.is_file():
            return candidate
    return None
