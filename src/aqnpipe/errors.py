"""Errors that a user can mend: one clear line, exit code 2. Everything else is a bug and keeps its traceback."""

EXIT_USER_ERROR = 2

EXIT_TRY_AGAIN = 75
"""EX_TEMPFAIL of sysexits.h: nothing is wrong, the same command goes on from here."""


_LONGEST = 4000


class AqnpipeError(Exception):
    """Base of all errors that are reported as one line without a traceback.

    As text it is one line that can be printed, whatever names and values from files it holds.
    """

    exit_code = EXIT_USER_ERROR
    advice = "mend what it names and give the same command"
    """What to try next, for the end of a job's log."""

    def __str__(self) -> str:
        return printable(super().__str__())


def printable(text: str) -> str:
    """Return `text` as one line: control, formatting and unassigned characters as escapes, and cut if very long."""
    shown = text if text.isprintable() else "".join(map(_escaped, text))
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}... ({len(shown) - _LONGEST} characters more)"


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


class ConfigError(AqnpipeError):
    """A study, arm or command-line value is wrong; the message names file, key, found and expected."""

    advice = "mend what it names; `aqnpipe check STUDY.yaml` tells whether the study is valid then"


class DataError(AqnpipeError):
    """A data set, artifact or transcript is missing or malformed."""

    advice = "mend a file of your own; remove one under results, and the same command makes it again"


class ModelError(AqnpipeError):
    """A model cannot be found, loaded or used for what was requested."""

    advice = "mend a model folder of your own; remove one under results, and the same command makes it again"


class TrainingError(AqnpipeError):
    """A training run broke down: loss or gradient is no number."""

    advice = "look at the last steps in the log; a lower training.learning_rate or max_grad_norm is the usual cure"


class StorageError(AqnpipeError):
    """The disk is full, or cannot be written."""

    advice = "free space, or make it writable, and give the same command; finished jobs and resume points are kept"


class WorkerError(AqnpipeError):
    """A worker of a run died, or fewer started than were requested."""

    advice = "look at the named logs; the same command goes on from the last resume point"


class RunLockedError(AqnpipeError):
    """Another process works on the same run."""

    advice = "wait for the other process or end it, then give the same command"


class RunInterruptedError(AqnpipeError):
    """A run was requested to stop before its end and did, with a resume point."""

    advice = "give the same command; it goes on from the last resume point"

    exit_code = EXIT_TRY_AGAIN


class ReceiptError(AqnpipeError):
    """What was measured is not what was requested: noise missing, wrong in size, or present where none was requested."""

    advice = "nothing of this job was kept; `aqnpipe measure-noise` shows what the noise of an arm reaches and measures"


class DeviceError(AqnpipeError):
    """A device that was requested is not there, or is in use."""

    advice = "`aqnpipe doctor` says what this machine has; `device` in the study and the profile say what is requested"


def first_line(error: Exception) -> str:
    """Return the first line of what another library's error says, or its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip()
