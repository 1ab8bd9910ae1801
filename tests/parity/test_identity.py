"""Digests of a model's files, and which weights in memory are those of the files, whole or a worker's share."""

import os
import time

import pytest
import torch
from safetensors.torch import save_file

from aqnpipe.noise.kernels.shards import Shard
from aqnpipe.parity import identity
from aqnpipe.parity.identity import Share, compare_with_files, model_facts

ROWS, COLUMNS = Share(0, Shard(start=4, size=3, width=7)), Share(1, Shard(start=0, size=2, width=4))
WHOLE = torch.arange(28.0).reshape(7, 4)


@pytest.fixture
def folder(tmp_path):
    save_file({"rows": WHOLE, "columns": WHOLE.clone(), "whole": WHOLE.clone()}, tmp_path / "model.safetensors")
    return tmp_path


def held(**changes):
    padding = torch.full((1, 4), 9.0)
    own = {"rows": torch.cat((WHOLE[4:7], padding)), "columns": WHOLE[:, :2], "whole": WHOLE}
    return own | changes


def test_a_share_is_compared_with_its_part_of_the_file_and_without_padding(folder):
    assert compare_with_files(held(), folder, {"rows": ROWS, "columns": COLUMNS}) == (3, ())


@pytest.mark.parametrize(
    ("changes", "stale"),
    [
        ({"rows": torch.cat((WHOLE[:3], WHOLE[:1]))}, ("rows",)),
        ({"columns": WHOLE[:, 2:]}, ("columns",)),
        ({"whole": WHOLE + 1}, ("whole",)),
    ],
)
def test_the_share_of_another_worker_is_stale(folder, changes, stale):
    assert compare_with_files(held(**changes), folder, {"rows": ROWS, "columns": COLUMNS}) == (3, stale)


def test_a_weight_of_another_shape_is_not_compared(folder):
    save_file({"rows": WHOLE[:6].clone(), "whole": WHOLE}, folder / "model.safetensors")
    assert compare_with_files(held(), folder, {"rows": ROWS}) == (1, ())


def test_a_share_that_is_not_announced_is_not_compared(folder):
    assert compare_with_files(held(), folder) == (1, ())


def test_a_single_value_between_the_compared_ones_is_found_if_every_value_is_asked_for(tmp_path):
    values = torch.zeros(20_000)
    save_file({"a": values}, tmp_path / "model.safetensors")
    changed = values.index_fill(0, torch.tensor([1]), 1.0)
    assert compare_with_files({"a": changed}, tmp_path) == (1, ())
    assert compare_with_files({"a": changed}, tmp_path, every_value=True) == (1, ("a",))


def test_files_of_a_model_are_read_once_until_one_of_them_changes(tiny_folder, monkeypatch):
    reads = []
    original = identity.describe_model
    monkeypatch.setattr(identity, "describe_model", lambda *given: reads.append(given) or original(*given))
    before = model_facts(tiny_folder, "tiny")
    assert model_facts(tiny_folder, "tiny") == before
    assert len(reads) == 1
    weights = tiny_folder / "model.safetensors"
    stored = weights.stat()
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    # File systems count time in ticks of up to 10 ms; in one tick a second write has the time of the first.
    time.sleep(0.05)
    weights.write_bytes(changed)
    # As `cp --preserve` and rsync do: the same size and time as before.
    os.utime(weights, ns=(stored.st_atime_ns, stored.st_mtime_ns))
    after = model_facts(tiny_folder, "tiny")
    assert len(reads) == 2
    assert after["weights_sha256"] != before["weights_sha256"]
    assert after["tokenizer_sha256"] == before["tokenizer_sha256"]
