"""The report's tables as files for other tools: parquet, and CSV without text of models."""

from pathlib import Path

import polars as pl

from aqnpipe.artifacts.files import atomic_path, write_csv


def write_pair(folder: Path, name: str, table: pl.DataFrame, left_out: tuple[str, ...] = ()) -> None:
    """Write `table` as <name>.parquet and, without the columns `left_out`, as <name>.csv; both atomically."""
    with atomic_path(folder / f"{name}.parquet") as temporary:
        table.write_parquet(temporary, compression="zstd")
    write_csv(folder / f"{name}.csv", table.drop(left_out, strict=False))
