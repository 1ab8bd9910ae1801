"""Files of captures, and which weights in memory are those of a model's files."""

import json
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file

from aqnpipe.errors import ConfigError, DataError, ModelError
from aqnpipe.noise.kernels.shards import Shard
from aqnpipe.parity.capture import check_sequences, compare_with_files
from aqnpipe.parity.capture_file import read_capture, write_capture
from aqnpipe.parity.compare import parity_of


def rewritten(path, **members):
    """Replace members of a capture's archive."""
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**contents, **{name.replace("__", "."): data for name, data in members.items()}}.items():
            archive.writestr(name, data)


@pytest.fixture
def written(tmp_path, full):
    path = tmp_path / "a.capture"
    write_capture(path, full)
    return path


def test_a_capture_read_again_has_the_same_values_and_digest(written, full):
    again = read_capture(written)
    assert again.digest == full.digest
    assert again.sequences == full.sequences
    assert torch.equal(again.tensor("output", "norm"), full.tensor("output", "norm"))
    assert again.operators.equals(full.operators)
    assert again.tokens.equals(full.tokens)


def test_a_capture_names_no_folder_and_no_host(tiny_folder, captured, tmp_path):
    other = captured(folder=tiny_folder)
    path = tmp_path / "b.capture"
    write_capture(path, other)
    content = path.read_bytes()
    assert str(tmp_path).encode() not in content
    assert not {"host", "serial", "uuid", "user"} & set(other.identity.model_dump())


def test_the_size_bounds_the_recorded_tokens(captured, tmp_path):
    small = captured(max_bytes=2_000_000, max_rows=1000)
    path = tmp_path / "small.capture"
    write_capture(path, small)
    assert 1 <= small.sample.num_rows < 48
    assert 1_200_000 < path.stat().st_size <= 2_000_000


def test_a_replay_fits_into_the_same_size_and_one_in_a_larger_format_has_fewer_tokens(captured, tmp_path):
    first = captured(max_bytes=2_000_000, max_rows=1000, dtype="bfloat16")
    for dtype in ("bfloat16", "float32"):
        second = captured(max_bytes=2_000_000, dtype=dtype, replay=first)
        write_capture(tmp_path / "second.capture", second)
        assert (tmp_path / "second.capture").stat().st_size <= 2_000_000
        rows = second.sample.num_rows
        assert rows == first.sample.num_rows if dtype == "bfloat16" else rows < first.sample.num_rows
        assert parity_of(first, second).num_rows == rows


def test_a_size_for_not_one_token_is_refused(captured):
    with pytest.raises(ConfigError, match=r"--max-megabytes 0\.01: found too few, expected at least"):
        captured(max_bytes=10_000)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_truncated_file_is_one_line(written, share):
    content = written.read_bytes()
    written.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DataError, match=r"a\.capture: damaged or no file of `aqnpipe capture`"):
        read_capture(written)


def test_a_changed_value_is_found(written):
    content = bytearray(written.read_bytes())
    place = content.find(b"tensors.safetensors") + 100_000
    content[place] ^= 1
    written.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"a\.capture"):
        read_capture(written)


def test_a_replaced_table_is_found(written, low, tmp_path):
    write_capture(tmp_path / "low.capture", low)
    with zipfile.ZipFile(tmp_path / "low.capture") as archive:
        rewritten(written, tokens__parquet=archive.read("operators.parquet"))
    with pytest.raises(DataError, match=r"tokens\.parquet and its SHA-256 do not match"):
        read_capture(written)


def test_another_version_of_the_format_is_refused(written):
    with zipfile.ZipFile(written) as archive:
        identity = json.loads(archive.read("identity.json"))
    rewritten(written, identity__json=json.dumps({**identity, "format": 2}).encode())
    with pytest.raises(DataError, match="format 2, expected 1"):
        read_capture(written)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_capture(tmp_path / "none.capture")
    with pytest.raises(DataError, match="found a folder"):
        read_capture(tmp_path)
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("../evil", b"")
    with pytest.raises(DataError, match="expected a file of `aqnpipe capture`"):
        read_capture(tmp_path / "other.zip")


@pytest.mark.parametrize(
    ("field", "what"),
    [("weights_sha256", "weights"), ("tokenizer_sha256", "tokenizers"), ("tokens_sha256", "token ids")],
)
def test_captures_of_different_things_are_not_compared(full, field, what):
    import dataclasses

    other = dataclasses.replace(full, identity=full.identity.model_copy(update={field: "0" * 64}))
    with pytest.raises(DataError, match=f"captures of different {what}"):
        parity_of(full, other)


def test_a_replay_of_a_third_capture_is_refused(full, captured, low):
    second = captured(replay=low)
    with pytest.raises(DataError, match="replay of another file"):
        parity_of(full, second)


def test_captures_given_the_other_way_round_are_exchanged(full, captured):
    second = captured(attention="sdpa", replay=full)
    parity = parity_of(second, full)
    assert parity.first.attention == "eager"
    assert "exchanged" in parity.notes[0]


def test_sequences_that_cannot_run_are_refused():
    from aqnpipe.artifacts.parities import CaptureConfig

    with pytest.raises(ConfigError, match="--decode 4: the shortest sequence has 3 tokens"):
        check_sequences([[1, 2, 3]], CaptureConfig(), 10)
    with pytest.raises(ConfigError, match="found 10, expected 0 to 9"):
        check_sequences([[1, 2, 3, 4, 10]], CaptureConfig(), 10)
    with pytest.raises(ConfigError, match="found -2, expected 0 to 9"):
        check_sequences([[1, 2, 3, 4, -2]], CaptureConfig(), 10)
    with pytest.raises(ConfigError, match="found sequences of one token"):
        check_sequences([[1], [2]], CaptureConfig(num_decoded=0), 10)
    with pytest.raises(ConfigError, match="--padding right"):
        check_sequences([[1] * 5, [1] * 6], CaptureConfig(padding="right"), 10)


def test_weights_that_cannot_be_compared_with_the_files_are_refused(captured, tiny_folder):
    weights = tiny_folder / "model.safetensors"
    # As a model without its output projection saves them; transformers loads them.
    renamed = {name.removeprefix("model."): tensor for name, tensor in load_file(weights).items()}
    save_file(renamed, weights, {"format": "pt"})
    with pytest.raises(ModelError, match="no parameter has the name and shape"):
        captured(folder=tiny_folder)


def test_a_pass_that_was_not_asked_for_is_refused(captured):
    """A profiling pass runs the operators once more, mostly on zeros."""

    def plant(model):
        def again(module, args):
            if not getattr(module, "profiled", False):
                module.profiled = True
                module(torch.zeros_like(args[0]))

        model.model.layers[0].mlp.gate_proj.register_forward_pre_hook(again)

    with pytest.raises(ModelError, match="seen for 72 tokens, expected each of 48 once"):
        captured(change=plant, batch_size=2, num_decoded=0)


ROWS, COLUMNS = (0, Shard(start=4, size=3, width=7)), (1, Shard(start=0, size=2, width=4))
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
