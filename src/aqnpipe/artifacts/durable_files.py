"""Files that survive a crash of the machine (fsync), and digests that show that they are complete."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from aqnpipe.artifacts.provenance import sha256_of_file, sha256_of_files


def files_in(folder: Path) -> list[str]:
    """Return the relative path of every file under `folder`."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def digests_of(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file under `folder` by relative path."""
    return sha256_of_files({name: folder / name for name in files_in(folder)})


def damage(folder: Path, digests: Mapping[str, str]) -> str | None:
    """Return a message about the first file under `folder` that does not match `digests`; None if all match."""
    for name, digest in digests.items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if sha256_of_file(path) != digest:
            return f"{path} changed since it was written (SHA-256 differs)"
    return None


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_files(folder: Path, names: Iterable[str]) -> None:
    """Flush files below `folder`, and the folders that lead to them, to the disk."""
    files = {folder / name for name in names}
    folders = {above for file in files for above in file.parents if above.is_relative_to(folder)}
    for path in (*files, *folders):
        sync(path)


def sync_tree(folder: Path) -> None:
    """Flush `folder` and every file and folder under it to the disk."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def rename(source: Path, target: Path) -> None:
    """Rename within one file system, durably: after a crash the file has either its old name or its new one."""
    os.replace(source, target)
    sync(target.parent)


def write_durably(target: Path, text: str) -> None:
    """Write a small file durably: after a crash either the old or the new content is there, complete."""
    staged = target.with_name(f".{target.name}.new")
    staged.write_text(text, encoding="utf-8")
    sync(staged)
    rename(staged, target)
