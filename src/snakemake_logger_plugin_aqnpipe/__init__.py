"""The terminal of a study as a logger plugin of Snakemake, which finds it by its name: `--logger aqnpipe`."""

from aqnpipe.cli.study_terminal import LogHandler

__all__ = ["LogHandler"]
