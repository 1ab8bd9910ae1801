"""Files that are there after a crash, and known to be whole: fsync, digests, and a full disk told in one line."""

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from aqnpipe.errors import StorageError
from aqnpipe.provenance import sha256_of_file

_FULL = (errno.ENOSPC, errno.EDQUOT)
_SAID_OF_A_FULL_DISK = ("No space left on device", "Disk quota exceeded", "iostream error")
"""How other libraries' writers report it, which do not raise OSError; the last is all that torch.save has to say."""


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


@contextmanager
def full_disk_is_clear(what: str) -> Iterator[None]:
    """Turn what the body raises on a full disk into a StorageError of one line; `what` says what was written where."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if any(_tells_of_a_full_disk(cause) for cause in _with_causes(error)):
            raise StorageError(f"no space left on device for {what}") from error
        raise


def _tells_of_a_full_disk(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in _FULL
    return any(words in str(error) for words in _SAID_OF_A_FULL_DISK)


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error` and what it was raised from, or while handling what."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
