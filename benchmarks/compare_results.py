"""Compare the results of one study made by two versions of the code: the same tables, receipts, metrics and weights?

    python benchmarks/compare_results.py BEFORE AFTER

BEFORE and AFTER are results folders. Values are compared exactly and in order, whatever their columns and keys are
called; a receipt of AFTER may hold further values. Digests, checksums, versions and sentences are left out: they follow
the source and the wording, not the results.
Prints one line per file that differs or is missing, and exits with 1 if there is one.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import torch
import yaml
from safetensors.torch import load_file
from smallest import parse

KINDS = {
    "tables": (".parquet",),
    "receipts": ("receipt.json", "receipts.json"),
    "diagnoses": ("verdict.json", ".yaml"),
    "weights": (".safetensors",),
}
MOVED = (("fault_loss/", "loss_study/"), ("audit.json", "published.json"))
"""Parts of paths that were renamed."""

_DIGEST = re.compile(r"[0-9a-f]{16}|[0-9a-f]{64}")
_PROSE = frozenset({"method", "problem", "reason", "reasons", "evidence", "date"})
"""Columns and keys that hold words, in either version."""


def main() -> None:
    """Compare two folders and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    arguments = parse(parser)
    differences = 0
    for kind, endings in KINDS.items():
        files = results_of(arguments.before, endings)
        if not files:
            continue
        problems = [line for name in files for line in compare(name, arguments.before, arguments.after)]
        present = set(files) | {renamed(name) for name in files}
        problems += [f"{name}: only after" for name in results_of(arguments.after, endings) if name not in present]
        print(f"{kind}: {len(files)} files, {len(problems)} differ")  # noqa: T201
        for line in problems:
            print(f"  {line}")  # noqa: T201
        differences += len(problems)
    sys.exit(differences > 0)


def results_of(folder: Path, endings: tuple[str, ...]) -> list[str]:
    """Return the paths below `folder` that end so, without scratch folders and the results of other studies."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.name.endswith(endings))
    names = [str(path.relative_to(folder)) for path in sorted(found)]
    return [name for name in names if not name.startswith(("scratch/", "logs/", "benchmarks/"))]


def renamed(name: str) -> str:
    """Return the path that the later version gives to a file of the earlier one."""
    for old, new in MOVED:
        name = name.replace(old, new)
    return name


def compare(name: str, before: Path, after: Path) -> Iterator[str]:
    """Yield what differs in one file."""
    there = after / name if (after / name).is_file() else after / renamed(name)
    if not there.is_file():
        yield f"{name}: only before"
        return
    if name.endswith(".safetensors"):
        first, second = load_file(before / name), load_file(there)
        same = first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    else:
        first, second = ([*values(path)] for path in (before / name, there))
        same = _is_within(first, second) if name.endswith(".json") else _are_equal(first, second)
    if not same:
        yield f"{name}: other values"


def values(path: Path) -> Iterator[Any]:
    """Yield the columns of a table or the leaves of a JSON or YAML file, in order."""
    if path.suffix == ".parquet":
        table = pl.read_parquet(path)
        yield from (table[column] for column in table.columns if column not in _PROSE)
    else:
        text = path.read_text(encoding="utf-8")
        yield from _leaves(json.loads(text) if path.suffix == ".json" else yaml.safe_load(text))


def _leaves(value: Any, key: str = "") -> Iterator[Any]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(part, key if key in _PROSE else name)
    elif isinstance(value, list):
        for part in value:
            yield from _leaves(part, key)
    elif key not in _PROSE and not (isinstance(value, str) and (_DIGEST.fullmatch(value) or "sha256" in value)):
        yield value


def _are_equal(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(_equal(*pair) for pair in zip(first, second, strict=True))


def _is_within(first: list[Any], second: list[Any]) -> bool:
    """Whether all of `first` is in `second` in the same order; a later version may record more."""
    rest = iter(second)
    return all(any(_equal(value, other) for other in rest) for value in first)


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, pl.Series) and isinstance(second, pl.Series):
        return first.equals(second)
    return first == second or (first != first and second != second)


if __name__ == "__main__":
    main()
