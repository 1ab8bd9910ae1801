"""Files with a valid checksum and any content, as someone who runs the package could make them."""

import io
from pathlib import Path

import polars as pl

from aqnpipe.artifacts.files import CHECKSUM_PLACEHOLDER, with_checksum


def write_parquet_with_checksum(path: Path, table: pl.DataFrame) -> None:
    """Write any table as a parquet file with its checksum, in place of what is there."""
    buffer = io.BytesIO()
    table.write_parquet(buffer, metadata={"checksum": CHECKSUM_PLACEHOLDER})
    path.unlink(missing_ok=True)
    path.write_bytes(with_checksum(buffer.getvalue()))
