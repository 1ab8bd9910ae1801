import polars as pl
import pytest
import torch

from aqnpipe.config.model import builtin_folder
from aqnpipe.models.loading import load_model
from aqnpipe.parity.compare import sides_of
from aqnpipe.parity.effects import Substitutions, log_probability_differences


def test_a_systematic_difference_is_explained_by_its_operator(captured, full):
    def plant(model):
        for layer in model.model.layers:
            layer.mlp.down_proj.register_forward_hook(lambda module, args, output: output * 1.02)

    second = captured(change=plant, attention="sdpa", replay=full)
    sides, _ = sides_of(full, second)
    model = load_model(builtin_folder("tiny"), dtype="float32", attention="eager")
    found = Substitutions(model, sides, 1).measured()
    assert found.alone[0].kinds == ("down_proj",)
    # The rest is of second order: later layers see changed inputs.
    assert found.alone[0].explained > 0.99
    assert found.alone[0].rms == pytest.approx(found.rms, rel=0.1)
    others = [row for row in found.alone if row.kinds != ("down_proj",)]
    assert all(row.rms < found.rms / 100 for row in others)
    assert found.together[-1].explained > 0.99


def test_differences_of_log_probabilities_by_hand(full):
    import dataclasses

    shifted = full.tokens.with_columns(
        pl.when(pl.col("sequence") == 0).then(pl.col("log_probability") + 0.4).otherwise(pl.col("log_probability")),
        pl.when(pl.col("sequence") < 2).then(pl.col("predicted") + 1).otherwise(pl.col("predicted")).alias("predicted"),
    )
    found = log_probability_differences(full, dataclasses.replace(full, tokens=shifted))
    # Four sequences of 12 tokens, the first of each without a prediction: a quarter differs by 0.4.
    assert found.num_tokens == 44
    assert found.mean == pytest.approx(0.1)
    assert found.rms == pytest.approx(0.2)
    assert found.largest == pytest.approx(0.4)
    assert found.argmax_changes == pytest.approx(0.5)


def test_only_the_operators_of_the_given_kinds_are_substituted(captured, full):
    second = captured(dtype="bfloat16", replay=full)
    sides, _ = sides_of(full, second)
    model = load_model(builtin_folder("tiny"), dtype="float32", attention="eager")
    found = Substitutions(model, sides, 1)
    clean = found.scores(frozenset())
    # Without substitution the scores are those of the capture itself.
    own = full.tokens.filter((pl.col("position") >= 1) & (pl.col("sequence") < 2))["log_probability"].to_list()
    assert clean[:22].tolist() == pytest.approx(own, abs=1e-4)
    changed = {kind: found.scores({kind}) - clean for kind in ("down_proj", "attention", "rotary_k")}
    # The errors of bfloat16 are far above the rounding of float32.
    assert all(float(change.abs().max()) > 1e-4 for change in changed.values())
    assert len({round(float(change[-1]), 8) for change in changed.values()}) == 3
    assert float((found.scores(changed.keys()) - clean).abs().max()) > 1e-4
    assert torch.equal(found.scores({"no such kind"}), clean)
