"""Whether files are those that a record speaks of: who made them, from what, and every byte as it was written."""

from collections.abc import Mapping
from pathlib import Path

from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.artifacts.runs import RunRecord


def digests_of_outputs(files: Mapping[str, Path]) -> dict[str, str]:
    """Return the SHA-256 of each of a stage's outputs by name, for its record; they are written before it."""
    return {name: sha256_of_file(path) for name, path in files.items()}


def record_problems(
    record: RunRecord, identity: Mapping[str, str | int], outputs: Mapping[str, Path], inputs: Mapping[str, Path]
) -> list[str]:
    """Return in words what `record` and the files beside it have against being of `identity`.

    `outputs` and `inputs`: what is there now under the names that the record uses; a file that is missing differs.
    """
    problems = [
        f"the record says {key} {record.identity.get(key, 'nothing')}, expected {value}"
        for key, value in identity.items()
        if record.identity.get(key) != value
    ]
    problems += [
        f"{path.name} is not what the record's stage wrote (SHA-256 differs): edited, or of another job"
        for name, path in outputs.items()
        if not is_file_of(path, record.outputs_sha256.get(name))
    ]
    problems += [
        f"made from other {name} than the study has now ({path.name}, SHA-256 differs)"
        for name, path in inputs.items()
        if not is_file_of(path, record.inputs_sha256.get(name))
    ]
    return problems


def is_file_of(path: Path, digest: str | None) -> bool:
    """Tell whether there is a file at `path` whose SHA-256 is `digest`."""
    return digest is not None and path.is_file() and sha256_of_file(path) == digest


def first_difference(found: object, expected: object, where: str = "") -> str | None:
    """Return the first place in which two configurations as plain data differ, in words; None if they do not."""
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        for key in sorted({*found, *expected}):
            place = f"{where}.{key}" if where else str(key)
            difference = first_difference(found.get(key), expected.get(key), place)
            if difference:
                return difference
        return None
    return None if found == expected else f"{where} {found!r}, the study asks for {expected!r}"
