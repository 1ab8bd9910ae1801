"""Provenance of results: digests of code and files, and versions of the libraries used."""

import ast
import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from itertools import accumulate
from pathlib import Path

import aqnpipe

_PACKAGE_ROOT = Path(aqnpipe.__file__).parent
_MODULE_STRING = re.compile(r"([a-z_]\w*(?:\.[a-z_]\w*)+)(?::\w+)?")
_COMMENTS = re.compile(rb"(?:[ \t\f]*(?:#[^\r\n]*)?\r?\n)+")
"""Comments and ends of lines, blank lines too."""
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
    """Return a digest of the `code_of` `module`, of its `dependencies`, and of the templates beside any of them.

    The sources are parsed, not imported, so that a workflow can find out quickly which stages an edit affects.
    `root`: folder of the package. Raises ModuleNotFoundError if there is no such module.
    """
    digest = hashlib.sha256()
    for name, path in sorted(dependencies(module, root).items()):
        digest.update(name.encode())
        digest.update(code_of(path, root))
        for template in sorted(path.parent.glob("templates/*")):
            digest.update(template.read_bytes())
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
        waiting.extend(_parsed(path, path.stat().st_mtime_ns, root)[0])
        if "." in name:
            waiting.append(name.rpartition(".")[0])
    return found


def code_of(path: Path, root: Path = _PACKAGE_ROOT) -> bytes:
    """Return the source of a Python file without comments, docstrings and blank lines, which change nothing it does.

    It is text and not the parsed tree, whose form depends on the version of Python. So a file that was only formatted
    counts as changed, as does a comment between two literals that Python joins.
    """
    return _parsed(path, path.stat().st_mtime_ns, root)[1]


@cache
def _parsed(path: Path, modified_ns: int, root: Path) -> tuple[list[str], bytes]:
    """Return the modules that a source imports or names in a string, and its `code_of`.

    Cached, because stages share most modules.
    """
    source = path.read_bytes()
    line_starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    names: list[str] = []
    literals: dict[tuple[int, int], bool] = {}  # start and end in bytes: true unless it is a statement by itself
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
            names.extend(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            literals[_place(node.value, line_starts)] = False
        elif isinstance(node, ast.JoinedStr | ast.Constant):
            # The walk comes to a statement first, and then to the literal in it.
            literals.setdefault(_place(node, line_starts), True)
            value = getattr(node, "value", None)
            match = _MODULE_STRING.fullmatch(value) if isinstance(value, str) else None
            if match and match[1].partition(".")[0] == root.name:
                if _source_of(match[1], root) is None:
                    raise ModuleNotFoundError(f"{path}:{node.lineno}: {value!r} names no module in {root}")
                names.append(match[1])
    return names, _without_comments(source + b"\n", literals)


def _place(node: ast.expr, line_starts: list[int]) -> tuple[int, int]:
    """Return where a literal starts and ends in its source, in bytes."""
    end_line, end_column = node.end_lineno or 0, node.end_col_offset or 0
    return line_starts[node.lineno - 1] + node.col_offset, line_starts[end_line - 1] + end_column


def _without_comments(source: bytes, literals: dict[tuple[int, int], bool]) -> bytes:
    """Return a source without blank lines, without comments (`#` outside of literals), and without what is false."""
    result, code, at = b"", b"", 0
    for start, end in sorted(literals, key=lambda place: (place[0], -place[1])):
        if start < at:  # within an f-string
            continue
        code, at = code + source[at:start], end
        if literals[start, end]:
            result, code = result + _COMMENTS.sub(b"\n", code) + source[start:end], b""
    return result + _COMMENTS.sub(b"\n", code + source[at:])


def _source_of(module: str, root: Path) -> Path | None:
    parts = module.split(".")
    if parts[0] != root.name:
        return None
    base = root.joinpath(*parts[1:])
    for candidate in (base / "__init__.py", base.with_suffix(".py")):
        if candidate.is_file():
            return candidate
    return None
