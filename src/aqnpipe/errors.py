"""Errors that a user can mend: one clear line, exit code 2. Everything else is a bug and keeps its traceback."""

EXIT_USER_ERROR = 2

EXIT_TRY_AGAIN = 75
"""EX_TEMPFAIL of sysexits.h: nothing is wrong, the same command goes on from here."""


class AqnpipeError(Exception):
    """Base of all errors that are reported as one line without a traceback."""

    exit_code = EXIT_USER_ERROR


class ConfigError(AqnpipeError):
    """A study, arm or command-line value is wrong; the message names file, key, found and expected."""


class DataError(AqnpipeError):
    """A data set, artifact or transcript is missing or malformed."""


class ModelError(AqnpipeError):
    """A model cannot be found, loaded or used for what was asked."""


class TrainingError(AqnpipeError):
    """A training run broke down: loss or gradient is no number."""


class StorageError(AqnpipeError):
    """The disk is full."""


class WorkerError(AqnpipeError):
    """A worker of a run died, or fewer started than were asked for."""


class RunLockedError(AqnpipeError):
    """Another process works on the same run."""


class RunInterruptedError(AqnpipeError):
    """A run was asked to stop before its end and did, with a resume point."""

    exit_code = EXIT_TRY_AGAIN


class ReceiptError(AqnpipeError):
    """What was measured is not what was asked for: noise missing, wrong in size, or present where none was asked."""


class DeviceError(AqnpipeError):
    """A device that was asked for is not there, or is in use."""
