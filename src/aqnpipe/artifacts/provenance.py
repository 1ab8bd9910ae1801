"""Provenance of results: digests of code and files, and versions of the libraries used."""

import ast
import hashlib
import json
import re
from collections.abc import Mapping
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


def sha256_of_files(files: Mapping[str, Path]) -> dict[str, str]:
    """Return the SHA-256 of each file by name."""
    return {name: sha256_of_file(path) for name, path in files.items()}


def sha256_of_json(content: object) -> str:
    """Return the SHA-256 of plain data, which does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def short_digest(value: object, num_bytes: int) -> str:
    """Return the BLAKE2b digest of the text of a value as hex, for comparisons within one study."""
    return hashlib.blake2b(repr(value).encode(), digest_size=num_bytes).hexdigest()


def versions() -> dict[str, str]:
    """Return the installed versions of this package and of the libraries that determine results."""
    return {name: metadata.version(name) for name in _RECORDED_DISTRIBUTIONS}


def code_digest(module: str, root: Path = _PACKAGE_ROOT) -> str:
    """Return a digest of the source of `module`, of its `dependencies`, and of the templates beside any of them.

    The sources are parsed, not imported, so that a workflow can find out quickly which stages an edit affects.
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

    A module is needed if a source imports it anywhere, or contains a string `package.module` or
    `package.module:attribute`, which is how libraries such as vLLM are given classes to load. Raises
    ModuleNotFoundError if `module`, or a module that a string names, does not exist.
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
    """Return the modules that a source imports or names in a string. Cached, because stages share most modules."""
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
