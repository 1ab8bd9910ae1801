"""The terminal of a study: a line per job, the time left, and every error once, at the end."""

import logging
from types import SimpleNamespace

import pytest
from snakemake.logging import DefaultFilter
from snakemake.settings.enums import Quietness
from snakemake_interface_logger_plugins.common import LogEvent

from aqnpipe.cli.study_terminal import LogHandler, Progress, Started, StudyLines, duration, error_in_log
from aqnpipe.errors import STOPPED


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self):
        return self.now


def record(event=None, text="", level=logging.INFO, **content):
    made = logging.LogRecord("snakemake", level, "", 0, text, None, None)
    made.__dict__.update({"event": event, **content} if event else content)
    return made


def job(number, rule, text):
    return record(LogEvent.JOB_INFO, jobid=number, rule_name=rule, rule_msg=text)


def failure(number, *logs, reason=None):
    return record(
        LogEvent.JOB_ERROR, "", logging.ERROR, jobid=number, rule_name="train", rule_msg=reason, log=[*map(str, logs)]
    )


class Study:
    """A study of two training runs and two evaluations; `said` are the lines of the terminal."""

    def __init__(self):
        self.clock, self.said = Clock(), []
        self.lines = StudyLines(self.clock)
        self.done = 0

    def log(self, made):
        self.said += self.lines.lines(made)

    def begin(self, *numbers_and_jobs):
        self.log(record(LogEvent.JOB_STARTED, jobs=[number for number, *_ in numbers_and_jobs]))
        for found in numbers_and_jobs:
            self.log(job(*found))

    def finish(self, number, total=6):
        self.done += 1
        self.log(record(LogEvent.JOB_FINISHED, job_id=number))
        self.log(record(LogEvent.PROGRESS, done=self.done, total=total))


@pytest.fixture
def study():
    made = Study()
    made.log(record(LogEvent.RUN_INFO, stats={"train": 2, "evaluate": 2, "report": 1, "all": 1, "total": 6}))
    return made


def test_a_line_for_every_job_that_matters_with_the_time_left(study):
    assert study.said == ["5 jobs: train 2, evaluate 2, report 1"]
    study.begin((1, "train", "train: base/E5 seed 0"), (2, "train", "train: base/E5 seed 1"))
    assert study.said[1:] == ["starts: train: base/E5 seed 0", "starts: train: base/E5 seed 1"]
    study.clock.now = 100.0
    study.finish(1)
    # The other run has taken as long as the mean; evaluations were not measured yet.
    assert study.said[-1] == "[1/6] train: base/E5 seed 0, 2 min; 1 running"
    study.begin((3, "evaluate", "evaluate: base/E5 seed 0 step 8"))
    assert study.said[-1].startswith("[1/6]"), "another job runs and speaks for itself"
    study.clock.now = 120.0
    study.finish(3)
    # Work left: one evaluation of 20 s. Busy so far: 100 + 20 + 120 s in 120 s, two jobs at a time.
    assert study.said[-1] == "[2/6] evaluate: base/E5 seed 0 step 8, 20 s; 1 running, about 10 s left"
    study.clock.now = 130.0
    study.finish(2)
    study.begin((4, "evaluate", "evaluate: base/E5 seed 1 step 8"))
    study.clock.now = 150.0
    study.finish(4)
    study.begin((5, "report", "report: results/report.html"))
    study.clock.now = 153.0
    study.finish(5)
    assert study.said[-1] == "[4/6] evaluate: base/E5 seed 1 step 8, 20 s", "the report takes seconds"


def test_the_time_is_a_lower_bound_while_a_rule_has_no_finished_job():
    progress = Progress()
    progress.left.update({"train": 3, "evaluate": 8, "report": 1})
    progress.start(1, Started("train", "train: a", 0.0))
    assert progress.time_left(10.0) is None
    progress.finish(1, 60.0)
    assert progress.time_left(60.0) == (120.0, False)
    progress.start(2, Started("evaluate", "evaluate: a", 60.0))
    progress.finish(2, 70.0)
    assert progress.time_left(70.0) == (pytest.approx(2 * 60 + 7 * 10), True)


def test_an_error_is_shown_once_and_at_the_end(study, tmp_path):
    first, second = tmp_path / "train0.log", tmp_path / "train1.log"
    first.write_text("node vm\nERROR: data set ./mine: no such folder\nnext: change dataset in the study\n")
    second.write_text("node vm\nTraceback (most recent call last):\n  File x, line 1\nValueError: 3 is odd\n")
    study.begin((1, "train", "train: base/E5 seed 0"), (2, "train", "train: base/E5 seed 1"))
    failed = "RuleException:\nCalledProcessError in file train.smk, line 39:\nCommand 'python' returned ..."
    for number, log in ((1, first), (2, second)):
        study.log(record(LogEvent.ERROR, failed, logging.ERROR))
        study.log(failure(number, log))
    study.log(record(None, "Exiting because a job execution failed. Look below for error messages", logging.ERROR))
    study.log(record(None, "WorkflowError:\nAt least one job did not complete successfully.", logging.ERROR))
    assert study.said[3:] == [
        "failed: train: base/E5 seed 0; the error follows at the end",
        "failed: train: base/E5 seed 1; the error follows at the end",
    ]
    assert list(study.lines.closing()) == [
        "ERROR: data set ./mine: no such folder",
        "failed: train: base/E5 seed 0",
        "next: change dataset in the study",
        f"log: {first}",
        "ERROR: ValueError: 3 is odd",
        "failed: train: base/E5 seed 1",
        f"log: {second}",
    ]
    assert list(study.lines.closing()) == [], "a handler is closed twice"


@pytest.mark.parametrize("written", [None, "", "node vm\n", f"node vm\nERROR: {STOPPED.format(signal='SIGTERM')}\n"])
@pytest.mark.parametrize("how", ["died with <Signals.SIGTERM: 15>.", "returned non-zero exit status 143."])
def test_a_job_that_sigterm_ended_did_not_run_out_of_memory(study, tmp_path, written, how):
    """Also one that is not yet as far as its log, as while it waits for the processor."""
    log, other = tmp_path / "log", tmp_path / "other"
    if written is not None:
        log.write_text(written)
    other.write_text("node vm\n")
    study.begin((1, "train", "train: base/E5 seed 0"), (2, "train", "train: base/E5 seed 1"))
    study.log(record(LogEvent.ERROR, f"RuleException:\nCalledProcessError in file train.smk:\nCommand {how}"))
    study.log(failure(1, log))
    study.log(record(LogEvent.ERROR, "RuleException:\nCalledProcessError in file train.smk:\nCommand died with 9"))
    study.log(failure(2, other))
    assert list(study.lines.closing())[:5] == [
        "ERROR: stopped by SIGTERM before it was done",
        "failed: train: base/E5 seed 0",
        "next: run the same command, which continues",
        f"log: {log}",
        "ERROR: ended without an error in its log, as by SIGKILL (memory may be the cause); the same command continues",
    ]


def test_one_error_of_many_jobs_is_one_error(study, tmp_path):
    (tmp_path / "log").write_text("ERROR: device: requested npu, found none\n")
    for number in range(5):
        study.begin((number, "train", f"train: base/E5 seed {number}"))
        study.log(failure(number, tmp_path / "log"))
    closing = list(study.lines.closing())
    assert closing[:2] == ["ERROR: device: requested npu, found none", "failed: train: base/E5 seed 0, and 4 more"]
    assert len(closing) == 3


def test_a_job_that_succeeds_at_a_second_try_did_not_fail(study, tmp_path):
    study.begin((1, "train", "train: base/E5 seed 0"))
    study.log(failure(1, tmp_path / "log"))
    study.begin((1, "train", "train: base/E5 seed 0"))
    study.finish(1)
    assert list(study.lines.closing()) == []


def test_the_reason_of_the_executor_is_shown(study, tmp_path):
    own, timeout = tmp_path / "train0.log", "SLURM-job '7' failed, SLURM status is: 'TIMEOUT'. "
    own.write_text("ERROR: device: requested npu, found none\n")
    never, slurm, refused = tmp_path / "train1.log", tmp_path / "7.log", "SLURM sbatch failed: invalid partition"
    study.begin(*((number, "train", f"train: base/E5 seed {number}") for number in range(3)))
    study.log(failure(0, own, slurm, reason="SLURM-job '6' failed, SLURM status is: 'FAILED'. "))
    study.log(failure(1, never, slurm, reason=timeout))
    study.log(failure(2, never, reason=refused))
    assert study.said[-1] == "failed: train: base/E5 seed 2; the error follows at the end"
    assert list(study.lines.closing()) == [
        "ERROR: device: requested npu, found none",
        "failed: train: base/E5 seed 0",
        "SLURM-job '6' failed, SLURM status is: 'FAILED'.",
        f"log: {own}, {slurm}",
        f"ERROR: {timeout.strip()}",
        "failed: train: base/E5 seed 1",
        f"log: {never}, {slurm}",
        f"ERROR: {refused}",
        "failed: train: base/E5 seed 2",
        f"log: {never}",
    ]


def test_a_killed_job_has_no_error_of_its_own(tmp_path):
    (tmp_path / "log").write_text("node vm\nbase/E5 seed 0: step 3/8\n")
    (said,) = error_in_log(tmp_path / "log")
    assert said.startswith("ended without an error in its log, as by SIGKILL")
    assert said.endswith("the same command continues")
    assert error_in_log(tmp_path / "none") == ["its log cannot be read (No such file or directory)"]


@pytest.mark.parametrize(
    ("text", "level", "shown"),
    [
        ("Select jobs to execute...", logging.INFO, False),
        ("Execute 2 jobs...", logging.INFO, False),
        ("Nothing to be done (all requested files are present and up to date).", logging.INFO, True),
        ("Complete log(s): .snakemake/log/x.log", logging.INFO, True),
        ("Trying to restart job 5.", logging.INFO, True),
        ("Terminating processes on user request, this might take some time.", logging.WARNING, True),
        ("MissingInputException in rule train", logging.ERROR, True),
        ('CalledProcessError in file "Snakefile", line 6:', logging.ERROR, True),
        ('RuleException:\nCalledProcessError in file "train.smk", line 39:', logging.ERROR, False),
        ("details", logging.DEBUG, False),
    ],
)
def test_messages_about_the_study_stay(text, level, shown):
    assert list(StudyLines().lines(record(None, text, level))) == ([text] if shown else [])


def test_sigterm_says_once_that_the_same_command_continues():
    lines, text = StudyLines(), "Will exit after finishing currently running jobs (scheduler)."
    stopping = list(lines.lines(record(None, text, logging.INFO)))
    assert stopping == ["stopping: running jobs finish first", "next: run the same command, which continues"]
    assert list(lines.lines(record(None, text, logging.INFO))) == []


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (41, "41 s"), (99.6, "2 min"), (200, "3 min"), (7500, "2 h 05 min")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def handler_of(asked="", quiet=()):
    """The handler with Snakemake's filter, as its manager makes it."""
    names = ("dryrun", "verbose", "debug_dag", "printshellcmds", "stdout")
    flags = {name: name == asked for name in names}
    handler = LogHandler(SimpleNamespace(**flags, quiet=set(quiet)), None)
    flags.pop("stdout")
    handler.addFilter(DefaultFilter(set(quiet), **flags))
    return handler


@pytest.mark.parametrize(
    ("quiet", "shown"),
    [((), True), ((Quietness.RULES,), True), ((Quietness.RULES, Quietness.PROGRESS), True), ((Quietness.ALL,), False)],
)
def test_quiet_hides_no_error_of_a_job_unless_everything(quiet, shown, tmp_path, capsys):
    (tmp_path / "log").write_text("ERROR: device: requested npu, found none\n")
    handler = handler_of(quiet=quiet)
    handler.handle(failure(1, tmp_path / "log"))
    handler.handle(failure(2, tmp_path / "log"))
    handler.handle(record(LogEvent.JOB_FINISHED, job_id=2))
    handler.close()
    closing = ["ERROR: device: requested npu, found none", "failed: train", f"log: {tmp_path / 'log'}"]
    assert capsys.readouterr().err.splitlines()[2:] == (closing if shown else [])


@pytest.mark.parametrize("asked", ["", "dryrun", "verbose", "printshellcmds"])
def test_snakemakes_own_text_where_it_is_asked_for(asked, capsys):
    handler = handler_of(asked)
    handler.emit(record(None, "Select jobs to execute..."))
    handler.close()
    assert capsys.readouterr().err == ("Select jobs to execute...\n" if asked else "")


def test_a_line_is_written_with_its_end_at_once(monkeypatch):
    """The workflow writes its refusal from another thread; between a line and its end it would stand on that line."""
    written = []

    class Stream:
        write, flush = written.append, staticmethod(lambda: None)

    handler = handler_of(quiet={Quietness.RULES})
    monkeypatch.setattr(handler, "_stream", Stream)
    handler._lines.closing = lambda: ["failed: train", "log: a.log"]
    handler.close()
    assert written == ["failed: train\n", "log: a.log\n"]
