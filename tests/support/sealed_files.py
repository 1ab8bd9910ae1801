"""Files with a valid seal and any content, as someone who runs the package could make them."""

import io
from pathlib import Path

import polars as pl

from aqnpipe.artifacts.checksums import UNSEALED, sealed


def write_sealed_parquet(path: Path, table: pl.DataFrame) -> None:
    """Write any table as a sealed parquet file, in place of what is there."""
    buffer = io.BytesIO()
    table.write_parquet(buffer, metadata={"seal": UNSEALED})
    path.unlink(missing_ok=True)
    path.write_bytes(sealed(buffer.getvalue()))
