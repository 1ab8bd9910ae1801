import polars as pl
import pytest

from aqnpipe.config.model import builtin_folder
from aqnpipe.models.loading import load_model
from aqnpipe.parity.compare import log_probability_differences, sides_of
from aqnpipe.parity.effects import Substitutions


def test_a_systematic_difference_is_explained_by_its_operator(captured, full):
    def plant(model):
        for layer in model.model.layers:
            layer.mlp.down_proj.register_forward_hook(lambda module, args, output: output * 1.02)

    second = captured(change=plant, attention="sdpa", replay=full)
    sides, _ = sides_of(full, second)
    model = load_model(builtin_folder("tiny"), dtype="float32", attention="eager")
    found = Substitutions(model, sides).measured()
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


def test_substituted_operators_add_up_and_without_any_the_scores_are_those_of_the_capture(captured, full):
    second = captured(dtype="bfloat16", replay=full)
    sides, _ = sides_of(full, second)
    found = Substitutions(load_model(builtin_folder("tiny"), dtype="float32", attention="eager"), sides)
    kinds = ("down_proj", "attention", "rotary_k")
    alone = [found.change({kind}) for kind in kinds]
    # The errors of bfloat16 are far above the rounding of float32, and small enough to be nearly linear.
    assert all(float(change.abs().max()) > 1e-4 for change in alone)
    together = found.change(set(kinds))
    assert float((together - sum(alone)).abs().max()) < 0.2 * float(together.abs().max())
    own = full.tokens.filter((pl.col("position") >= 1) & (pl.col("sequence") == 0))["log_probability"].to_list()
    assert found.unchanged[:11].tolist() == pytest.approx(own, abs=1e-4)
    assert not found.change({"no such kind"}).any()
