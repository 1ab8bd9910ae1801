"""`python prompt_snakemake.py ...` is `snakemake ...`, except that it asks Slurm for the states of jobs every second.

Snakemake's plugin for Slurm waits 10 seconds longer after every question that found no job ended, up to 3 minutes: in
tests with few short jobs most of the time is that wait.
"""

from snakemake.cli import main
from snakemake_executor_plugin_slurm import Executor

SECONDS = 1

if __name__ == "__main__":
    Executor.next_seconds_between_status_checks = property(lambda self: SECONDS, lambda self, value: None)
    main()
