"""Takes over a diagnosis that was made elsewhere, on another machine or in another study, of the same weights."""

import shutil
from collections.abc import Callable
from pathlib import Path

from aqnpipe.artifacts.diagnoses import LayerTable, Verdict
from aqnpipe.artifacts.files import atomic_path, read_json, read_table, write_json
from aqnpipe.artifacts.lineage import has_digest
from aqnpipe.diagnosis.stage import LAYERS_FILE, VERDICT_FILE
from aqnpipe.errors import DataError
from aqnpipe.models.loading import weights_sha256


def import_diagnosis(
    folder: Path,
    model_dir: Path,
    output_dir: Path,
    *,
    names: tuple[str, str],
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Write layers.parquet and verdict.json of the diagnosis in `folder` to `output_dir`.

    `names`: model and machine in this study. The verdict keeps where it came from. Raises DataError if the files are
    damaged, not of one diagnosis, or not of the weights in `model_dir`.
    """
    layers, verdict = folder / LAYERS_FILE, folder / VERDICT_FILE
    judged = read_json(verdict, Verdict)
    read_table(layers, LayerTable)
    origin = judged.origin
    if origin is None:
        raise DataError(f"{verdict}: does not say of which weights it is, expected a diagnosis of a study")
    if not has_digest(layers, origin.layers_sha256):
        raise DataError(f"{layers}: not from the same diagnosis as {verdict} (SHA-256 differs)")
    weights = weights_sha256(model_dir)
    if origin.weights_sha256 != weights:
        raise DataError(
            f"{verdict}: a diagnosis of weights {origin.weights_sha256[:12]} (model {origin.model} there), expected "
            f"those of model {names[0]} here, {weights[:12]}"
        )
    output_dir.mkdir(parents=True, exist_ok=True)
    with atomic_path(output_dir / LAYERS_FILE) as temporary:
        shutil.copyfile(layers, temporary)
    source = f"{folder}: {origin.model} on {origin.machine}"
    taken = origin.model_copy(update={"model": names[0], "machine": names[1], "imported_from": source})
    write_json(output_dir / VERDICT_FILE, judged.model_copy(update={"origin": taken}))
    say(f"{'/'.join(names)}: {judged.verdict}, diagnosed elsewhere ({source})")
