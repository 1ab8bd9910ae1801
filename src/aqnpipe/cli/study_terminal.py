"""Terminal output while Snakemake runs a study: a line per job that matters, and the failed jobs at the end.

Snakemake's own text (every job's inputs and reason, its waiting, shell commands) is in its log file, which it names.
`snakemake-logger-plugin-rich` was tried before: its bars show how many jobs are done but not how long the rest takes,
it prints the logs of failed jobs in full, and it redraws a box eight times a second over the progress lines of the jobs
(4.7 MB for a study of eight minutes).
"""

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from snakemake.settings.enums import Quietness
from snakemake_interface_logger_plugins.base import LogHandlerBase
from snakemake_interface_logger_plugins.common import LogEvent

from aqnpipe.errors import CONTINUES, STOPPED

SHORT_RULES = frozenset(
    {"all", "prepare_data", "prepare_model", "generate_layer_sigmas", "compare", "compare_losses", "look", "report"}
    | {"check_published"}
)
"""Rules whose jobs take seconds: no time is estimated for them."""

_NOISE = (
    "Using workflow specific profile",
    "Assuming unrestricted shared filesystem",
    "Building DAG of jobs",
    "Using shell:",
    "Provided cores:",
    "Provided resources:",
    "Provided remote nodes:",
    "Rules claiming more threads",
    "Conda environments: ignored",
    "Singularity containers: ignored",
    "Group jobs: inactive",
    "Select jobs to execute",
    "Execute ",
    "Elapsed time:",
    "Updating checkpoint dependencies",
    "DAG of jobs will be updated",
    "Exiting because a job execution failed",
    "At least one job did not complete successfully",
    "Shutting down, this might take some time",
    "Removing output files of failed job",
)
"""How messages begin that say nothing about the study."""

_OF_A_FAILED_JOB = (
    "RuleException:\nCalledProcessError in file",  # outside of rules, as in onsuccess, no job fails with the command
    "WorkflowError:\nAt least one job did not complete",
)
_UNSHOWN_EVENTS = frozenset(
    {LogEvent.WORKFLOW_STARTED, LogEvent.SHELLCMD, LogEvent.RESOURCES_INFO, LogEvent.RULEGRAPH, LogEvent.GROUP_INFO}
)
_OUTCOMES = frozenset({LogEvent.JOB_ERROR, LogEvent.JOB_FINISHED})
"""Events that decide which jobs failed."""
_MOST_STARTS = 8
_MOST_FAILURES = 10
_SHORT_SECONDS = 5.0
_NO_ERROR = "ended without an error in its log, as by SIGKILL (memory may be the cause); the same command continues"
_STOPPING = "Will exit after finishing currently running jobs (scheduler)"
"""Snakemake's message after SIGTERM, repeated when a running job ends."""

_BY_SIGTERM = ("died with <Signals.SIGTERM", "exit status 143")


@dataclass(frozen=True)
class Started:
    """A job that runs: its rule, what it does, and the time of its start in seconds."""

    rule: str
    text: str
    start: float


@dataclass(frozen=True)
class Failed:
    """A job that failed: what it does, its logs, and the executor's reason, such as the state that Slurm reports.

    Its own log is the first; Slurm's follows.
    """

    text: str
    logs: tuple[str, ...]
    reason: str


@dataclass
class Progress:
    """The jobs of a study: how many are left of each rule, and how long those took that are done.

    `left` counts waiting and running jobs. `first`: when the first job started; None before.
    """

    left: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    running: dict[int, Started] = field(default_factory=dict)
    first: float | None = None

    def start(self, number: int, job: Started) -> None:
        """Note that a job began."""
        self.first = job.start if self.first is None else self.first
        self.running[number] = job

    def finish(self, number: int, now: float) -> tuple[Started, float] | None:
        """Note that a job is done; return it with its seconds, or None for one that was never started."""
        job = self.running.pop(number, None)
        if job is None:
            return None
        self.left[job.rule] -= 1
        self.seconds.setdefault(job.rule, []).append(now - job.start)
        return job, now - job.start

    def time_left(self, now: float) -> tuple[float, bool] | None:
        """Return (seconds until all jobs are done, whether every rule was measured); None before any was measured.

        The mean seconds of each rule times its jobs, less what running jobs have done, over the number of jobs that ran
        at a time so far. Rules without a finished job, and those of `SHORT_RULES`, are not counted.
        """
        known = {rule: fmean(found) for rule, found in self.seconds.items() if rule not in SHORT_RULES}
        if not known or self.first is None or now <= self.first:
            return None
        waiting = {rule: count for rule, count in self.left.items() if rule not in SHORT_RULES and count > 0}
        running = [(known.get(job.rule, 0.0), now - job.start) for job in self.running.values()]
        work = sum(known.get(rule, 0.0) * count for rule, count in waiting.items()) - sum(map(min, running))
        busy = sum(map(sum, self.seconds.values())) + sum(seconds for _, seconds in running)
        at_a_time = max(busy / (now - self.first), 1.0)
        return max(work, 0.0) / at_a_time, waiting.keys() <= known.keys()


def duration(seconds: float) -> str:
    """Return a duration in two units at most: 41 s, 3 min, 2 h 05 min."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


def left_in_words(progress: Progress, now: float) -> str:
    """Return how many jobs run and the time left: `2 running, about 3 min left`."""
    parts = [f"{len(progress.running)} running"] if progress.running else []
    estimate = progress.time_left(now)
    if estimate is not None and estimate[0] >= 1:
        parts.append(f"{'about' if estimate[1] else 'at least'} {duration(estimate[0])} left")
    return ", ".join(parts)


def error_in_log(path: Path, otherwise: str = "") -> list[str]:
    """Return the error in the log of a failed job and what to do next; the last line of a traceback for a bug.

    `otherwise`: the error of a job whose log holds none or was never written.
    """
    try:
        lines = [
            line.rstrip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()
        ]
    except OSError as problem:
        return (otherwise or f"its log cannot be read ({problem.strerror})").splitlines()
    errors = [number for number, line in enumerate(lines) if line.startswith("ERROR: ")]
    if errors:
        error, *following = lines[errors[-1] : errors[-1] + 2]
        return [error.removeprefix("ERROR: "), *(line for line in following if line.startswith("next: "))]
    if any(line.startswith("Traceback (most recent call last)") for line in lines):
        return [lines[-1]]
    return (otherwise or _NO_ERROR).splitlines()


class StudyLines:
    """Turns records of Snakemake's log into the lines of the terminal. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._progress = Progress()
        self._finished: list[tuple[Started, float]] = []
        self._failed: dict[int, Failed] = {}
        self._reason = ""
        self._all_start = self._is_stopping = False

    def lines(self, record: logging.LogRecord) -> Iterator[str]:
        """Yield the lines of one record; none for what does not matter here."""
        event, found = getattr(record, "event", None), record.__dict__
        match event:
            case LogEvent.RUN_INFO:
                stats = found["stats"]
                self._progress.left = Counter({rule: count for rule, count in stats.items() if rule != "total"})
                jobs = {rule: count for rule, count in stats.items() if rule not in ("total", "all")}
                yield f"{sum(jobs.values())} jobs: {', '.join(f'{rule} {count}' for rule, count in jobs.items())}"
            case LogEvent.JOB_STARTED:
                self._all_start = not self._progress.running and len(found["jobs"]) <= _MOST_STARTS
            case LogEvent.JOB_INFO:
                yield from self._start(found)
            case LogEvent.JOB_FINISHED:
                done = self._progress.finish(found["job_id"], self._clock())
                self._failed.pop(found["job_id"], None)
                self._finished += [] if done is None else [done]
            case LogEvent.PROGRESS:
                yield from self._count(found["done"], found["total"])
            case LogEvent.JOB_ERROR:
                yield from self._fail(found)
            case _:
                if any(words in record.getMessage() for words in _BY_SIGTERM):
                    # Of the job whose failure follows, perhaps before it had a log.
                    self._reason = STOPPED.format(signal="SIGTERM")
                if record.getMessage().startswith(_STOPPING):
                    yield from [] if self._is_stopping else ["stopping: running jobs finish first", CONTINUES]
                    self._is_stopping = True
                elif event not in _UNSHOWN_EVENTS and not _is_noise(record):
                    yield record.getMessage().rstrip()

    def _start(self, found: dict[str, Any]) -> Iterator[str]:
        text = found["rule_msg"] or found["rule_name"]
        job = Started(found["rule_name"], text, self._clock())
        self._progress.start(found["jobid"], job)
        # Where nothing else runs the terminal would be silent until the job has something to say.
        if self._all_start and job.rule not in SHORT_RULES:
            yield f"starts: {text}"

    def _count(self, done: int, total: int) -> Iterator[str]:
        finished, self._finished = self._finished, []
        for job, seconds in finished:
            if job.rule in SHORT_RULES and seconds < _SHORT_SECONDS:
                continue
            rest = left_in_words(self._progress, self._clock())
            yield f"[{done}/{total}] {job.text}, {duration(seconds)}" + (f"; {rest}" if rest else "")

    def _fail(self, found: dict[str, Any]) -> Iterator[str]:
        started = self._progress.running.pop(found["jobid"], None)
        text = found["rule_name"] if started is None else started.text
        # In these records `rule_msg` is not the message of the rule but that of the executor.
        reason, self._reason = (found["rule_msg"] or "").strip() or self._reason, ""
        self._failed[found["jobid"]] = Failed(text, tuple(found["log"]), reason)
        yield f"failed: {text}; the error follows at the end"

    def closing(self) -> Iterator[str]:
        """Yield the jobs that failed for good, each error once, with what to do next and the log."""
        errors: dict[tuple[str, ...], list[Failed]] = {}
        failed, self._failed = self._failed, {}  # Handlers are closed by Snakemake and again at the end of the process.
        for job in failed.values():
            found = error_in_log(Path(job.logs[0]), job.reason) if job.logs else [job.reason or _NO_ERROR]
            errors.setdefault(tuple(found), []).append(job)
        for (error, *advice), jobs in list(errors.items())[:_MOST_FAILURES]:
            yield f"ERROR: {error}"
            yield f"failed: {jobs[0].text}" + (f", and {len(jobs) - 1} more" if len(jobs) > 1 else "")
            if jobs[0].reason.partition("\n")[0] not in ("", error):
                yield jobs[0].reason
            yield from advice
            if jobs[0].logs:
                yield f"log: {', '.join(jobs[0].logs)}"
        if len(errors) > _MOST_FAILURES:
            yield f"{len(errors) - _MOST_FAILURES} more errors are in the logs of the jobs"


def _is_noise(record: logging.LogRecord) -> bool:
    """Return whether a message says nothing about the study, or only that a job failed, which `closing` tells."""
    text = record.getMessage().strip() if record.msg is not None else ""
    if not text or record.levelno < logging.INFO or text.startswith(_NOISE):
        return True
    return text.startswith(_OF_A_FAILED_JOB)


class LogHandler(LogHandlerBase):
    """Prints the lines of `StudyLines`; Snakemake's own text for a dry run, and where its details are asked for."""

    def __post_init__(self) -> None:
        """Set up what the handler writes, and where."""
        asked = self.common_settings
        self._plain = asked.dryrun or asked.verbose or asked.debug_dag or asked.printshellcmds
        self._stream = sys.stdout if asked.stdout else sys.stderr
        self._lines = StudyLines()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is of use: outcomes of jobs are, even where `--quiet` hides rules and progress.

        `closing` shows the errors of failed jobs, and without them a failure would leave no line at all.
        """
        if super().filter(record):
            return True
        is_silent = Quietness.ALL in (self.common_settings.quiet or ())
        return not self._plain and not is_silent and getattr(record, "event", None) in _OUTCOMES

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        for line in [self.format(record)] if self._plain else self._lines.lines(record):
            if line and line != "None":
                self._write(line)

    def _write(self, line: str) -> None:
        # At once: `print` writes the end of a line separately, and the workflow writes lines of its own in between.
        self._stream.write(f"{line}\n")
        self._stream.flush()

    def close(self) -> None:
        """Print what failed, when Snakemake has ended."""
        for line in self._lines.closing():
            self._write(line)
        super().close()

    # It takes the place of Snakemake's own handler on the terminal, whose filter follows `--quiet` and whose formatter
    # serves dry runs.
    writes_to_stream = True
    writes_to_file = has_filter = has_formatter = needs_rulegraph = False
