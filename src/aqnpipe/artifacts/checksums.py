"""Files that contain their own SHA-256, so that a truncated, corrupted or edited file is detected before it is used.

The digest is stored inside the file: one rename publishes both, and a copy keeps both. It is computed over the file
with zeros in place of the digest. A checksum detects accidents and edits by other tools. It is not a signature, because
anyone who runs this package can write one. The digests in the run records tie the files of a study together.
"""

import hashlib
import re
from pathlib import Path

from aqnpipe.errors import DataError

_MARK = "aqnpipe-sha256:"
_NUM_DIGITS = 64
_CHECKSUM = re.compile(rf"{_MARK}([0-9a-f]{{{_NUM_DIGITS}}})".encode())

CHECKSUM_PLACEHOLDER = _MARK + "0" * _NUM_DIGITS
"""Text that a writer puts where the digest belongs."""


def with_checksum(content: bytes) -> bytes:
    """Return `content` with its digest in place of the last `CHECKSUM_PLACEHOLDER`; DataError if it contains none."""
    place = content.rfind(CHECKSUM_PLACEHOLDER.encode())
    if place < 0:
        raise DataError("content without a place for its checksum; this is a bug")
    return _with_digest(content, place + len(_MARK), hashlib.sha256(content).hexdigest().encode())


def read_verified(path: Path) -> bytes:
    """Return the bytes of `path`; DataError if the file is missing, unreadable, or fails its checksum."""
    try:
        if path.exists() and not path.is_file():
            # A pipe would be waited for, a device read without end.
            raise DataError(f"{path}: is no regular file")
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    found = list(_CHECKSUM.finditer(content))
    if not found:
        raise DataError(f"{path}: no checksum in it, so it is truncated or was not written by aqnpipe; make it again")
    start = found[-1].start(1)
    bare = _with_digest(content, start, b"0" * _NUM_DIGITS)
    if hashlib.sha256(bare).hexdigest().encode() != found[-1].group(1):
        raise DataError(f"{path}: its content and its SHA-256 do not match: damaged or edited; make it again")
    return content


def _with_digest(content: bytes, start: int, digest: bytes) -> bytes:
    return content[:start] + digest + content[start + _NUM_DIGITS :]
