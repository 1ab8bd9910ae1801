"""Profiles: settings of a machine, which Snakemake reads with the template language YTE.

Snakemake ends in a page of its usage where a profile cannot be read, and takes numbers as they are: `train_devices:
eight` would be a job with `eight` eight times as many cores. Here each mistake is one line.
"""

import contextlib
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from aqnpipe.config.base import FrozenModel
from aqnpipe.config.validation_messages import DURATION_PATTERN, GRES_PATTERN, PARTITION_PATTERN, did_you_mean
from aqnpipe.config.yaml_file import read_yaml_file, validated
from aqnpipe.errors import AqnpipeError, ConfigError

_TEMPLATE = ("__definitions__", "__variables__")

HOOK = "refuse_unreadable_studies"
"""The function of the default profile that reads the other ones; a profile that calls it is not read by it."""

_Count = Annotated[int, Field(ge=1)]
_Minutes = _Count | Annotated[str, Field(pattern=DURATION_PATTERN)]
_Partition = Annotated[str, Field(pattern=PARTITION_PATTERN)]
_Gres = Annotated[str, Field(pattern=GRES_PATTERN)]


class SiteBlock(FrozenModel):
    """The site block of the profiles a100, ascend and workstation; a key that a profile lacks has a default here."""

    account: str = ""
    cpu_partition: _Partition = "cpu"
    device_partition: _Partition = "gpu"
    device_gres: _Gres = "gpu"
    devices: _Count = 1
    train_devices: _Count = 1
    train_nodes: _Count = 1
    evaluate_devices: _Count = 1
    evaluate_nodes: _Count = 1
    evaluate_whole_runs: bool = False
    single_devices: _Count = 1
    npu_partition: _Partition | Annotated[str, Field(max_length=0)] = ""
    npu_gres: _Gres = "npu"
    cuda_partition: _Partition | Annotated[str, Field(max_length=0)] = ""
    cuda_gres: _Gres = "gpu"
    cpus_per_device: _Count = 1
    mem_mb_per_device: _Count = 1
    # Slurm ends training ten minutes before its limit, so that it can write a resume point.
    train_minutes: Annotated[int, Field(gt=10)] | Annotated[str, Field(pattern=DURATION_PATTERN)] = 2880
    single_minutes: _Minutes = 240
    cpu_minutes: _Minutes = 120
    setup: Annotated[str, Field(min_length=1)] = "true"


def read_profile_file(path: Path) -> dict[str, Any]:
    """Return the keys of a profile as Snakemake reads them; ConfigError if it, or its site block, is wrong."""
    import yte  # imports numpy, which is slow

    content = read_yaml_file(path)
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of Snakemake's options")
    if not content.get("__use_yte__"):
        return content
    variables: dict[str, Any] = {}
    try:
        yte.process_yaml(io.StringIO(_dumped(content, _TEMPLATE)), variables=variables)
        refuse_wrong_site(content.get("__variables__") or {}, variables, path)
        rest = [key for key in content if key not in _TEMPLATE]
        keys: dict[str, Any] = yte.process_yaml(io.StringIO(_dumped(content, rest)), variables=variables)
    except yte.exceptions.YteError as error:
        raise ConfigError(f"{path}: {_reason(error, variables)}") from error
    return keys


def refuse_wrong_site(written: Iterable[str], values: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError for a wrong value in a site block. Variables that a site added are its own."""
    block = {name: values[name] for name in written if name in SiteBlock.model_fields}
    validated(SiteBlock, block, f"{path}: site block")


def refuse_unreadable_profiles(names: Iterable[str]) -> None:
    """Raise ConfigError for a mistake in the profiles that are given to Snakemake; it reports a missing one itself."""
    from snakemake.cli import get_profile_dir

    for name in names:
        found = get_profile_dir(name)
        if found is None or not found[1].is_file() or HOOK in found[1].read_text(encoding="utf-8", errors="replace"):
            continue
        # What a profile says, it says when Snakemake reads it.
        with contextlib.redirect_stderr(io.StringIO()):
            read_profile_file(found[1])


def _dumped(content: Mapping[str, Any], keys: Iterable[str]) -> str:
    import yaml

    return yaml.safe_dump({key: content[key] for key in keys if key in content}, sort_keys=False, allow_unicode=True)


def _reason(error: BaseException, variables: Mapping[str, Any]) -> str:
    """Return why a template cannot be processed; YTE wraps the reason in an error per level."""
    while isinstance(error.__context__, Exception):
        error = error.__context__
    if isinstance(error, AqnpipeError):
        return str(error)
    if isinstance(error, NameError):
        known = [name for name, value in variables.items() if isinstance(value, str | int)]
        return f"site block: missing key {error.name}{did_you_mean(str(error.name), known)}"
    return f"cannot be processed: {type(error).__name__}: {' '.join(str(error).split())}"
