"""Captures of the built-in model, whose files have the digests that a capture names."""

import json
import shutil

import pytest
import torch

from aqnpipe.artifacts.parities import CaptureConfig
from aqnpipe.config.model import builtin_folder
from aqnpipe.models.loading import load_model
from aqnpipe.parity.capture import capture
from aqnpipe.parity.capture_file import seal

TINY = builtin_folder("tiny")


def sequences_of(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(522, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture(scope="session")
def captured():
    """Return a function that captures `tiny`, after `change(model)`, in the first side's place or as a replay of it."""

    def run(*, change=None, replay=None, folder=TINY, sequences=None, max_rows=64, threads=1, **settings):
        config = CaptureConfig(**{"num_decoded": 2, "max_rows": max_rows, "threads": threads} | settings)
        model = load_model(folder, dtype=config.dtype, attention=config.attention)
        if change is not None:
            change(model)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            ids = sequences or (replay.sequences if replay else sequences_of(12, 12, 12, 12))
            return seal(capture(model, folder, "tiny", ids, config, replay))[0]
        finally:
            torch.set_num_threads(before)

    return run


@pytest.fixture(scope="session")
def low(captured):
    """A capture in bfloat16 with eager attention."""
    return captured(dtype="bfloat16")


@pytest.fixture(scope="session")
def full(captured):
    """A capture in float32 with eager attention."""
    return captured()


@pytest.fixture
def tiny_folder(tmp_path):
    """A copy of the built-in model's folder."""
    return shutil.copytree(TINY, tmp_path / "tiny")


@pytest.fixture
def edited(tiny_folder):
    """Function (keys of config.json, None to leave one out) -> the copy of the built-in model's folder with them."""

    def edit(**changes):
        path = tiny_folder / "config.json"
        config = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: config[key] for key in config if changes.get(key, "") is not None}))
        return tiny_folder

    return edit
