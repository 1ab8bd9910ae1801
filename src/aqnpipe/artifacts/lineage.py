"""Verify files against their run record: the identity of the run, the digests of its inputs and of its outputs.

Only this module checks the identity and the digests of a record. The comparison, the loss study and the report use it.
"""

from collections.abc import Mapping
from pathlib import Path

from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.artifacts.runs import RunRecord


def record_problems(
    record: RunRecord,
    *,
    identity: Mapping[str, str | int] | None = None,
    outputs: Mapping[str, Path] | None = None,
    inputs: Mapping[str, Path] | None = None,
) -> list[str]:
    """Return the mismatches between `record` and the files on the disk; an empty list if there are none.

    `identity`: the identity that the record must have. `outputs` and `inputs`: files by the names that the record uses;
    a missing file is a mismatch.
    """
    problems = [
        f"the record says {key} {record.identity.get(key, 'nothing')}, expected {value}"
        for key, value in (identity or {}).items()
        if record.identity.get(key) != value
    ]
    problems += [
        f"{path.name} is not what the stage of the record wrote (SHA-256 differs): edited, or from another job"
        for name, path in (outputs or {}).items()
        if not has_digest(path, record.outputs_sha256.get(name))
    ]
    problems += [
        f"made from another {name} than the study has now ({path.name}, SHA-256 differs)"
        for name, path in (inputs or {}).items()
        if not has_digest(path, record.inputs_sha256.get(name))
    ]
    return problems


def has_digest(path: Path, digest: str | None) -> bool:
    """Return whether there is a file at `path` whose SHA-256 is `digest`."""
    return digest is not None and path.is_file() and sha256_of_file(path) == digest


def first_difference(found: object, expected: object, where: str = "") -> str | None:
    """Return the first key at which two configurations (plain data) differ, with both values; None if equal."""
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        for key in sorted({*found, *expected}):
            place = f"{where}.{key}" if where else str(key)
            difference = first_difference(found.get(key), expected.get(key), place)
            if difference:
                return difference
        return None
    return None if found == expected else f"{where} {found!r}, the study requests {expected!r}"
