"""Full and read-only disks, reported in one line by the job that meets them."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError

from aqnpipe.errors import StorageError

_MESSAGES = {
    errno.ENOSPC: "no space left on device",
    errno.EDQUOT: "no space left on device",
    errno.EROFS: "read-only file system",
}
_FULL_DISK_MESSAGES = ("No space left on device", "Disk quota exceeded", "iostream error")
"""How other libraries' writers report it, which do not raise OSError; the last is all that torch.save has to say."""


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn what the body raises on a full or read-only disk into a StorageError of one line.

    `what` says what was written where.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        for cause in _with_causes(error):
            if told := _message(cause):
                raise StorageError(f"{told} for {what}") from error
        raise


def _message(error: BaseException) -> str | None:
    """What an error tells of the disk; None if it is about something else."""
    if isinstance(error, OSError):
        return _MESSAGES.get(error.errno or 0)
    full = any(words in str(error) for words in _FULL_DISK_MESSAGES)
    return _MESSAGES[errno.ENOSPC] if full else None


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error` and what it was raised from, or while handling what."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
