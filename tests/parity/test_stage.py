"""The stage measure_parity compares the device with its counterpart, and its file has the figures of every operator."""

import polars as pl
import pytest
import torch

from aqnpipe.artifacts.files import read_json
from aqnpipe.artifacts.measured_errors import with_figures
from aqnpipe.artifacts.parities import ParityFile
from aqnpipe.config.measured_noise import MeasuredError
from aqnpipe.config.run import ParitySpec
from aqnpipe.models.loading import read_model_config
from aqnpipe.parity import stage
from aqnpipe.parity.stage import measure_parity


@pytest.fixture
def measure(tiny_folder, tmp_path, monkeypatch):
    """Function (counterpart) -> path of the parity of the built-in model on two short questions."""
    monkeypatch.setattr(stage, "read_table", lambda *_: pl.DataFrame({"question": ["2 + 3 = ?", "4 + 5 + 6 = ?"]}))

    def run(**counterpart):
        spec = ParitySpec.model_validate(
            {
                **{"model_role": "base", "machine": "measured", "counterpart": counterpart, "device": "cpu"},
                **{"dtype": "float32", "attention": "eager", "prompt": {}},
            }
        )
        threads, said = torch.get_num_threads(), []
        measure_parity(spec, tiny_folder, tmp_path / "none.parquet", tmp_path / "parity.json", said.append)
        assert torch.get_num_threads() == threads
        assert said[0].startswith("base on measured: ")
        return tmp_path / "parity.json"

    return run


def test_the_counterpart_has_its_settings_and_the_device_those_of_the_study(measure, tiny_folder):
    path = measure(dtype="bfloat16", attention="sdpa", batch_size=1)
    parity = read_json(path, ParityFile)
    assert parity.same_inputs
    found = [(side.dtype, side.attention, side.batch_size, side.threads) for side in (parity.first, parity.second)]
    assert found == [("float32", "eager", 8, 1), ("bfloat16", "sdpa", 1, 1)]
    error = with_figures(MeasuredError(source=str(path)), dtype="float32", config=read_model_config(tiny_folder))
    assert len(error.figures) == 6 * (8 + 2) + 2
    assert error.in_layer(3).operators["q_proj"].size == 1.0
