"""User-correctable errors: one clear line, exit code 2. Any other exception is a bug and keeps its traceback."""

EXIT_USER_ERROR = 2

EXIT_TRY_AGAIN = 75
"""EX_TEMPFAIL of sysexits.h: nothing is wrong, and the same command continues the run."""

CONTINUES = "next: run the same command, which continues"
STOPPED = f"stopped by {{signal}} before it was done\n{CONTINUES}"
"""What a job says that a signal ended, and the terminal of one that could not say it yet."""

_LONGEST = 4000


class AqnpipeError(Exception):
    """Base of all errors that are reported as one line without a traceback.

    `str` of an error is always one printable line, even if the message contains names and values from files.
    """

    exit_code = EXIT_USER_ERROR
    advice = "fix what the message names, then run the same command again"
    """Advice on what the user can do next; a job's log ends with it."""

    def __str__(self) -> str:
        return printable(super().__str__())


def printable(text: str) -> str:
    """Return `text` as one line: control, formatting and unassigned characters escaped, very long text cut."""
    shown = text if text.isprintable() else "".join(map(_escaped, text))
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}... ({len(shown) - _LONGEST} characters more)"


def _escaped(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")


class ConfigError(AqnpipeError):
    """A study, arm or command-line value is wrong; the message names file, key, found and expected."""

    advice = "fix what the message names; `aqnpipe check STUDY.yaml` validates the study"


class DataError(AqnpipeError):
    """A data set, artifact or transcript is missing or malformed."""

    advice = "fix a file of your own; remove a file under results, and the same command makes it again"


class ModelError(AqnpipeError):
    """A model cannot be found, loaded or used for what was requested."""

    advice = "fix a model folder of your own; remove one under results, and the same command makes it again"


class TrainingError(AqnpipeError):
    """A training run broke down: its loss, gradient or weights are not finite or exceed their bounds."""

    advice = "look at the last steps in the log; a lower training.learning_rate or max_grad_norm usually helps"


class VerificationError(TrainingError):
    """A micro-batch that was computed twice gave other bits the second time: the device errs."""

    advice = (
        "test the device with `aqnpipe diagnose MODEL --device ...`; on a sound one the same command continues from "
        "the last resume point"
    )


class NoRewardError(TrainingError):
    """The rewards of no group differed, so a run had nothing to learn from."""

    advice = "set prompt, dataset, models or training.max_response_tokens so that some responses are right, some wrong"


class StorageError(AqnpipeError):
    """The disk is full or read-only."""

    advice = "free space or make the disk writable, then run the same command; finished jobs and resume points are kept"


class WorkerError(AqnpipeError):
    """A worker of a run died, or fewer started than were requested."""

    advice = "look at the named logs; the same command continues from the last resume point"


class RunLockedError(AqnpipeError):
    """Another process works on the same run."""

    advice = "wait for the other process or end it, then run the same command"


class RunInterruptedError(AqnpipeError):
    """A run stopped early on request, after it wrote a resume point."""

    advice = "run the same command; it continues from the last resume point"
    exit_code = EXIT_TRY_AGAIN


class ReceiptError(AqnpipeError):
    """Measured and requested noise differ: noise is missing, wrong in size, or present where none was requested.

    `problems` are the differences one by one, where a receipt was refused for them.
    """

    def __init__(self, message: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = problems

    advice = "nothing of this job was kept; `aqnpipe measure-noise` shows the noise that an arm applies"


class DeviceError(AqnpipeError):
    """A requested device is missing or in use."""

    advice = "`aqnpipe doctor` lists the devices of this machine; the study (`device`) and the profile request them"


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error message, with the next one if it announces that.

    The error's type if the message is empty.
    """
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return f"{lines[0]} {lines[1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
