"""The base class of all configuration models, and names that become folders, wildcards and rules of the workflow."""

import os
import re
import stat
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from aqnpipe.config.validation_messages import IDENTIFIER_PATTERN, describe_validation_error
from aqnpipe.device import DeviceKind
from aqnpipe.errors import AqnpipeError, ConfigError

__all__ = ["FrozenModel", "Identifier", "Seed", "Threads", "TrainingSeed", "describe_validation_error"]

LARGEST_SEED = 2**62
LARGEST_TRAINING_SEED = 2**32 - 1
MOST_THREADS = 1024

Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]
"""A seed of keyed random numbers. `derive_seed` packs it into 64 bits, with room for what is added to it."""

TrainingSeed = Annotated[int, Field(ge=0, le=LARGEST_TRAINING_SEED)]
"""A seed of a training run, with which the trainer also seeds numpy."""

Threads = Annotated[int, Field(ge=1, le=MOST_THREADS)]


def _not_periodic(name: str) -> str:
    """Return a name; ValueError if its end repeats so often that Snakemake takes its files for an endless loop."""
    repeated = re.search(r"(.+?)\1{19,}$", name)
    if repeated:
        raise ValueError(f"ends in 20 times {repeated[1]!r} or more, which Snakemake does not accept in file names")
    return name


Identifier = Annotated[str, Field(pattern=IDENTIFIER_PATTERN, max_length=128), AfterValidator(_not_periodic)]
"""A name that is used as a folder name and as a wildcard of the workflow."""


def _each_once(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return values of which none repeats; ValueError with the first that does."""
    if len(set(values)) < len(values):
        repeated = next(value for place, value in enumerate(values) if value in values[:place])
        raise ValueError(f"found {repeated!r} twice, expected each value once")
    return values


EACH_ONCE = AfterValidator(_each_once)
"""Of a tuple in which no value may repeat."""


def rule_on(rule: str, kind: DeviceKind | None) -> str:
    """Return the name of the rule whose jobs run on devices of a kind; None: on the device of the study."""
    return rule if kind is None else f"{rule}_{kind}"


RESULT_FOLDERS = ("data", "models", "srdd", "parity", "runs", "eval", "eval_on", "loss_study", "looks", "jobs")
"""Folders in the results of a study. Results of another study may be in a folder beside them."""


def evaluations_folder(machine: str | None = None) -> str:
    """Return the folder of evaluations in the results: those of a machine in `evaluation.machines`, or of the study."""
    return "eval" if machine is None else f"eval_on/{machine}"


_OF_A_SHELL = re.compile(r"/dev/(stdin|fd/\d+)|/proc/(self|\d+)/fd/\d+")


def refuse_pipe_or_device(path: Path, kind: type[AqnpipeError]) -> None:
    """Raise an error of a kind for a pipe, socket or device, whose reading may never end.

    What a shell gives a command in the place of a file is read.
    """
    if _OF_A_SHELL.fullmatch(str(path)) or not os.path.exists(path):
        return
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise kind(f"{path}: found a pipe, socket or device, expected a file")


class FrozenModel(BaseModel):
    """Base class of configuration models: immutable; unknown keys, NaN and infinities are refused.

    Text below a field is its description in the schema of studies.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)

    def _problems(self) -> Iterator[str]:
        """Yield why settings that are possible one by one do not fit together; the first is reported."""
        yield from ()

    @model_validator(mode="after")
    def _settings_fit_together(self) -> Self:
        for problem in self._problems():
            raise ValueError(problem)
        return self


def key_values(name: str, text: str, keys: Collection[str] | None = None) -> dict[str, str]:
    """Return the settings in text such as `dtype=bfloat16,threads=8`; `name` says in a refusal what the text is.

    Raises ConfigError for a part that is no pair, and for a key that is given twice or not in `keys`.
    """
    values: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (each.strip() for each in part.partition("="))
        if not equals or not key or not value:
            raise ConfigError(f"{name} {text!r}: found {part.strip()!r}, expected comma-separated key=value pairs")
        if keys is not None and key not in keys:
            raise ConfigError(f"{name} {text!r}: unknown key {key!r}, expected {', '.join(keys)}")
        if key in values:
            raise ConfigError(f"{name} {text!r}: {key} is given twice, expected once")
        values[key] = value
    return values


Settings = TypeVar("Settings")
Part = TypeVar("Part", bound=BaseModel)


def replaced(settings: Settings, kind: type[Part], change: Callable[[Part], Part]) -> Settings:
    """Return settings with every part of a kind, at any depth, replaced by what `change` returns for it."""
    found: Any = settings
    if isinstance(settings, dict):
        found = {key: replaced(value, kind, change) for key, value in settings.items()}
    elif isinstance(settings, tuple):
        found = tuple(replaced(value, kind, change) for value in settings)
    elif isinstance(settings, BaseModel):
        parts = {name: getattr(settings, name) for name in type(settings).model_fields}
        changed = {name: replaced(part, kind, change) for name, part in parts.items()}
        # Only what differs, because a copy counts what it updates as set by the user.
        found = settings.model_copy(update={name: part for name, part in changed.items() if part != parts[name]})
    if isinstance(found, kind):
        found = change(found)
    return found
