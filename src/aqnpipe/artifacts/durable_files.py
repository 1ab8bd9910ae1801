"""Files that are there after a crash, and known to be whole: fsync and digests."""

import os
from collections.abc import Mapping
from pathlib import Path

from aqnpipe.artifacts.provenance import sha256_of_file


def digests_of(folder: Path, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the SHA-256 of every file under `folder` by its relative path; those in `known` are not read again."""
    known = known or {}
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return {name: known[name] if name in known else sha256_of_file(folder / name) for name in names}


def damage(folder: Path, digests: Mapping[str, str]) -> str | None:
    """Return what is wrong with the files under `folder` that `digests` names, in words; None if nothing is."""
    for name, digest in digests.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if sha256_of_file(path) != digest:
            return f"{path} is not what was written (SHA-256 differs)"
    return None


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush every file and folder under `folder`, and itself."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def rename(source: Path, target: Path) -> None:
    """Rename within one file system, so that after a crash there is the one name or the other."""
    os.replace(source, target)
    sync(target.parent)


def write_durably(target: Path, text: str) -> None:
    """Write a small file so that after a crash there is the old one or the new one, whole."""
    staged = target.with_name(f".{target.name}.new")
    staged.write_text(text, encoding="utf-8")
    sync(staged)
    rename(staged, target)
