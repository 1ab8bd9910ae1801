"""A file that knows its own SHA-256: what was cut, flipped or edited since it was written is seen before it is used.

The digest stands in the file itself, so that file and digest appear by one rename and travel together. It is that of
the file with zeros in the digest's place. A seal finds accidents and edits by other tools; it is no signature, as
whoever runs this package can seal anything. What ties the files of a study to each other are the digests in their
records.
"""

import hashlib
import re
from pathlib import Path

from aqnpipe.errors import DataError

_MARK = "aqnpipe-sha256:"
_NUM_DIGITS = 64
_CHECKSUM = re.compile(rf"{_MARK}([0-9a-f]{{{_NUM_DIGITS}}})".encode())

CHECKSUM_PLACEHOLDER = _MARK + "0" * _NUM_DIGITS
"""What a writer puts in the place of the digest."""


def with_checksum(content: bytes) -> bytes:
    """Return `content` with its digest in the last place of `CHECKSUM_PLACEHOLDER`; DataError if it has none."""
    place = content.rfind(CHECKSUM_PLACEHOLDER.encode())
    if place < 0:
        raise DataError("content without a place for its seal; this is a bug")
    return _with_digest(content, place + len(_MARK), hashlib.sha256(content).hexdigest().encode())


def read_verified(path: Path) -> bytes:
    """Return the bytes of `path`; DataError of one line if there is no such file or it is not what was written."""
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    found = list(_CHECKSUM.finditer(content))
    if not found:
        raise DataError(f"{path}: no seal in it, so it was cut off or not written by aqnpipe; make it again")
    start = found[-1].start(1)
    bare = _with_digest(content, start, b"0" * _NUM_DIGITS)
    if hashlib.sha256(bare).hexdigest().encode() != found[-1].group(1):
        raise DataError(f"{path}: not what was written, its SHA-256 differs: damaged or edited; make it again")
    return content


def _with_digest(content: bytes, start: int, digest: bytes) -> bytes:
    return content[:start] + digest + content[start + _NUM_DIGITS :]
