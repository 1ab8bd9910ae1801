"""Where results come from: digests of code and files, versions of what they stand on."""

import ast
import hashlib
from functools import cache
from importlib import metadata
from pathlib import Path

import aqnpipe

_PACKAGE_ROOT = Path(aqnpipe.__file__).parent
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


def code_digest(module: str) -> str:
    """Return a digest of the sources of `module` and of every module of this package that it imports, at any depth.

    Templates beside a module count as its source.
    Read from the sources without importing them, so that a workflow can tell cheaply which stages an edit concerns.
    """
    digest = hashlib.sha256()
    for name, path in sorted(_reachable_sources(module).items()):
        digest.update(name.encode())
        for source in (path, *sorted(path.parent.glob("templates/*"))):
            digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _reachable_sources(module: str) -> dict[str, Path]:
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _source_of(name)
        if path is None or name in found:
            continue
        found[name] = path
        waiting.extend(_imported_names(path, path.stat().st_mtime_ns))
        if "." in name:
            waiting.append(name.rpartition(".")[0])
    return found


@cache
def _imported_names(path: Path, modified_ns: int) -> tuple[str, ...]:
    """Return what a source imports. Kept, because a workflow asks for many stages that share most of their modules."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
            names.extend(f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(names)


def _source_of(module: str) -> Path | None:
    parts = module.split(".")
    if parts[0] != _PACKAGE_ROOT.name:
        return None
    base = _PACKAGE_ROOT.joinpath(*parts[1:])
    for candidate in (base / "__init__.py", base.with_suffix(".py")):
        if candidate.is_file():
            return candidate
    return None
