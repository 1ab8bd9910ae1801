"""Differences between the noise that was installed and the noise that a receipt requests."""

import json
from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter

_JSON = TypeAdapter(Any)


def mismatches(name: str, installed: Any, requested: Any) -> list[str]:
    """Return one line per setting that differs between two specifications (models, tuples of models, or None)."""
    if installed == requested:
        return []
    return list(_compare(name, *(_JSON.dump_python(value, mode="json") for value in (installed, requested))))


def _compare(where: str, installed: Any, requested: Any) -> Iterator[str]:
    if installed == requested:
        return
    if isinstance(installed, dict) and isinstance(requested, dict):
        for key in {**requested, **installed}:
            yield from _compare(f"{where}.{key}", installed.get(key), requested.get(key))
    elif isinstance(installed, list) and isinstance(requested, list) and len(installed) == len(requested):
        for number, pair in enumerate(zip(installed, requested, strict=True)):
            yield from _compare(f"{where}[{number}]", *pair)
    else:
        yield f"{where}: installed {json.dumps(installed)}, requested {json.dumps(requested)}"
