"""Errors that a user can mend: one clear line, exit code 2. Everything else is a bug and keeps its traceback."""

EXIT_USER_ERROR = 2


class AqnpipeError(Exception):
    """Base of all errors that are reported as one line without a traceback."""


class ConfigError(AqnpipeError):
    """A study, arm or command-line value is wrong; the message names file, key, found and expected."""


class DataError(AqnpipeError):
    """A data set, artifact or transcript is missing or malformed."""


class ModelError(AqnpipeError):
    """A model cannot be found, loaded or used for what was asked."""


class TrainingError(AqnpipeError):
    """A training run broke down: loss or gradient is no number."""


class ReceiptError(AqnpipeError):
    """What was measured is not what was asked for: noise missing, wrong in size, or present where none was asked."""
