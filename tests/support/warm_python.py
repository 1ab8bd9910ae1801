"""Python with the libraries of the whole workflow imported already, for tests that run Snakemake often.

The server and the stand-in for the interpreter are those of `aqnpipe.runtime.warm_start`. Here Snakemake itself is
forked too, started by the same command, with the same files, signals and exit codes as always.

`python warm_python.py SOCKET STAND_IN [MODULE ...]` imports the modules, serves until its standard input ends, and
writes STAND_IN: a program that, given a script and arguments, or `-m snakemake` and arguments, runs them in a forked
process and ends as that does. Each process says its pid in the folder that AQNPIPE_WARM_PIDS names.
"""

import importlib
import os
import sys
from pathlib import Path

from replacing import replaced

from aqnpipe.runtime import warm_start

PLANNING = (
    "snakemake.cli",
    "snakemake.executors.local",
    "smart_open",
    "aqnpipe.artifacts.provenance",
    "aqnpipe.cli.check",
    "aqnpipe.cli.results",
    "aqnpipe.comparison.look_states",
    "aqnpipe.config.plan",
    "aqnpipe.report.summary",
)
"""What Snakemake imports before it starts a job."""

STUDIES = (
    *PLANNING,
    "aqnpipe.loss_study.stage",
    "aqnpipe.models.loading",
    "aqnpipe.loss_study.comparison",
    *warm_start.IMPORTED,
)
_OPTIONS = 'sys.argv[1].startswith("-")'


def main() -> None:
    """Import, write the stand-in, then fork for every request."""
    path, stand_in = sys.argv[1], Path(sys.argv[2])
    warm_start.import_all(tuple(sys.argv[3:]))
    for name in STUDIES:
        if name.startswith("aqnpipe."):
            # What the workflow asks first; the imports of every module are kept.
            importlib.import_module("aqnpipe.artifacts.provenance").code_digest(name.partition(":")[0])
    listening = warm_start.listen(path)
    source = warm_start.stand_in_source(path, os.environ["OMP_NUM_THREADS"])
    source = replaced(source, _OPTIONS, f'{_OPTIONS} and sys.argv[1:3] != ["-m", "snakemake"]')
    stand_in.write_text(f"#!{sys.executable} -IS\n{source}", encoding="utf-8")
    stand_in.chmod(0o755)
    print("ready", flush=True)  # noqa: T201 - for who started it

    def run(arguments: list[str]) -> None:
        # So that Snakemake and its shells can be killed as one group.
        os.setsid()
        if cgroup := os.environ.get("AQNPIPE_WARM_CGROUP"):
            Path(cgroup).write_text(str(os.getpid()))
        if arguments[:2] != ["-m", "snakemake"]:
            _note(Path(arguments[0]).name)
            warm_start.run_script(arguments)
            return
        _note("snakemake")
        sys.executable = str(stand_in)
        # Its jobs are forked here.
        warm_start.warm_interpreter = lambda threads: str(stand_in)
        sys.argv = ["snakemake", *arguments[2:]]
        sys.modules["snakemake.cli"].main()

    warm_start.serve(listening, run)


def _note(name: str) -> None:
    (Path(os.environ["AQNPIPE_WARM_PIDS"]) / str(os.getpid())).write_text(name)


if __name__ == "__main__":
    main()
