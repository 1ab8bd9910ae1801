"""Whole weights of a checkpoint for engines that cannot apply its adapters."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from aqnpipe.artifacts.files import STAGED
from aqnpipe.config.model import Dtype
from aqnpipe.models.adapted import ADAPTERS_FILE, has_only_adapters
from aqnpipe.models.adapters import merge_loss, merged_weights, refuse_merge_loss
from aqnpipe.models.loading import load_model, refuse_damaged
from aqnpipe.models.prepared import PREPARED_MODEL_FILE


@contextmanager
def whole_weights(folder: Path, dtype: Dtype) -> Iterator[Path]:
    """Yield a folder with the whole weights of the model in `folder`, for an engine that computes in `dtype`.

    It is `folder` itself, except for a checkpoint of adapters: these are merged in float32, rounded once, and written
    to a temporary folder beside it. Raises ReceiptError if rounding loses too much of their update, ModelError if the
    model is damaged or its base is missing.
    """
    if not has_only_adapters(folder):
        refuse_damaged(folder)
        yield folder
        return
    with tempfile.TemporaryDirectory(STAGED, f".{folder.name}.", folder.parent) as merged:
        _write_merged(folder, dtype, Path(merged))
        yield Path(merged)


def _write_merged(folder: Path, dtype: Dtype, output: Path) -> None:
    model = load_model(folder, dtype=dtype, attention="eager")
    rounded = getattr(torch, dtype)
    refuse_merge_loss(merge_loss(model, rounded), rounded)
    model.save_pretrained(output, state_dict=merged_weights(model, rounded))
    for path in folder.iterdir():
        if path.name not in (ADAPTERS_FILE, PREPARED_MODEL_FILE):
            shutil.copyfile(path, output / path.name)
