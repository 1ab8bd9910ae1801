import polars as pl
import pytest

from aqnpipe.config.model import builtin_folder
from aqnpipe.models.loading import load_model
from aqnpipe.parity.compare import sides_of
from aqnpipe.parity.effects import Substitutions, enough_of, log_probability_differences
from aqnpipe.parity.sample import Sample


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


def test_a_substitution_is_that_of_a_run_of_its_own(captured, full):
    """Batches of copies: each copy has the operators of its own set, and nothing of its neighbours."""
    second = captured(dtype="bfloat16", replay=full)
    sides, _ = sides_of(full, second)
    model = load_model(builtin_folder("tiny"), dtype="float32", attention="eager")
    found = Substitutions(model, sides, 1)
    kinds = ("down_proj", "attention", "rotary_k")
    sets = [frozenset({kind}) for kind in kinds] + [frozenset(kinds)]
    for wanted, change in zip(sets, found.changes(sets), strict=True):
        (alone,) = Substitutions(model, sides, 1).changes([wanted])
        assert alone.tolist() == pytest.approx(change.tolist(), abs=2e-5)
        # The errors of bfloat16 are far above the rounding of float32 that the tolerance is for.
        assert float(change.abs().max()) > 1e-4
    # Without substitution the scores are those of the capture itself.
    own = full.tokens.filter((pl.col("position") >= 1) & (pl.col("sequence") == 0))["log_probability"].to_list()
    assert found._unchanged[0, 4][2].tolist() == pytest.approx(own, abs=1e-4)
    (nothing,) = found.changes([frozenset({"no such kind"})])
    assert not nothing.any()


@pytest.mark.parametrize(
    ("lengths", "used"),
    [
        ((20, 8), [20, 8]),
        # 15 of 20 tokens beside the 32 that are enough; 16 are kept, and so is a whole sequence.
        ((20, 12, 15), [20, 12]),
        ((20, 12, 16), [20, 12, 16]),
        ((20, 12, 20), [20, 12, 20]),
    ],
)
def test_few_tokens_of_a_cut_sequence_are_left_out_if_others_are_enough(lengths, used):
    assert list(enough_of(Sample(lengths), [[1] * 20, [1] * 12, [1] * 20]).lengths) == used
    assert list(enough_of(Sample((20, 12, 8)), [[1] * 20, [1] * 12, [1] * 8]).lengths) == [20, 12, 8]
