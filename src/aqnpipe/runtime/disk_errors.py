"""Full and read-only disks, reported in one line by the job that runs into them."""

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
"""Messages of libraries that do not raise OSError on a full disk; the last one is all that torch.save reports."""


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn an error of the body that a full or read-only disk caused into a StorageError of one line.

    what: the file or folder that was being written, for the message.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        for cause in _with_causes(error):
            if message := _message(cause):
                raise StorageError(f"{message} for {what}") from error
        raise


def _message(error: BaseException) -> str | None:
    """Return the message for an error that the disk caused; None for any other error."""
    if isinstance(error, OSError):
        return _MESSAGES.get(error.errno or 0)
    full = any(words in str(error) for words in _FULL_DISK_MESSAGES)
    return _MESSAGES[errno.ENOSPC] if full else None


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error`, then the chain of errors that it was raised from or that were being handled."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
