import itertools
from typing import get_args

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqnpipe.artifacts.diagnoses import LocatedFault, Verdict
from aqnpipe.config.diagnosis import SigmaRule, SigmaStrategy
from aqnpipe.diagnosis.sigmas import layer_sigmas
from aqnpipe.errors import ConfigError, DataError


def table(gain, kurtosis=None, instability=None, role=None, sensitivity=None) -> pl.DataFrame:
    num_layers = len(gain)
    return pl.DataFrame(
        {
            "layer": range(num_layers),
            "gain": gain,
            "kurtosis": kurtosis or [100.0] * num_layers,
            "instability": instability or [0.0] * num_layers,
            "role": role or ["healthy"] * num_layers,
            "sensitivity": sensitivity or [0.01 * (layer + 1) for layer in range(num_layers)],
        },
        schema_overrides=dict.fromkeys(("gain", "kurtosis", "instability", "sensitivity"), pl.Float64),
    )


def verdict_on(*faulty_layers: int) -> Verdict:
    faults = [
        LocatedFault(
            layer=layer,
            site="layer_output",
            type="bias",
            num_faulty_channels=1,
            faulty_channel_indices=(0,),
            num_channels=8,
            magnitude=0.1,
            magnitude_low=None,
            magnitude_high=None,
            threshold=None,
            probes=("identity",),
            evidence="",
        )
        for layer in faulty_layers
    ]
    return Verdict(
        verdict="fault" if faults else "healthy",
        reason="",
        layer=faulty_layers[0] if faults else None,
        type="bias" if faults else None,
        faults=tuple(faults),
        findings=(),
        forward_equivalents=1.0,
        num_layers=8,
    )


def test_rule_worked_out_by_hand():
    # medians: gain 1.0 (raise below 0.8), kurtosis 100 (raise above 120)
    layers = table(
        gain=[1.0, 0.7, 1.0, 0.7, 1.0, 0.8, 1.2],
        kurtosis=[100.0, 100.0, 130.0, 130.0, 100.0, 120.0, 90.0],
        instability=[0.0, 0.0, 0.0, 0.0, 0.2, 0.1, 0.0],
    )
    sigmas = layer_sigmas(layers, verdict_on(), SigmaRule(), metadata={"model": "tiny", "machine": "cpu"})
    assert sigmas.aqn.layer_sigmas == {0: 0.05, 1: 0.075, 2: 0.075, 3: 0.1125, 4: 0.025, 5: 0.05, 6: 0.05}
    assert sigmas.aqn.high_priority_layers == (1, 2, 3)
    assert sigmas.reasons[0] == "no rule applies: base sigma"
    assert sigmas.reasons[1] == "gain 0.7 < 0.8 x median 1: x1.5"
    assert sigmas.reasons[3] == "gain 0.7 < 0.8 x median 1: x1.5; kurtosis 130 > 1.2 x median 100: x1.5"
    assert sigmas.reasons[4] == "instability 0.2 > 0.1: x0.5"
    assert (sigmas.aqn.enabled, sigmas.aqn.layer_specific, sigmas.aqn.schedule) == (True, True, "epoch_aware")
    assert sigmas.aqn.base_sigma == 0.05
    energy = 3 * 0.05**2 + 2 * 0.075**2 + 0.1125**2 + 0.025**2
    assert sigmas.srdd_metadata == {
        "num_layers": 7,
        "strategy": "published",
        "total_noise_energy": pytest.approx(energy),
        "verdict": "healthy",
        "model": "tiny",
        "machine": "cpu",
    }


def test_raises_and_lowers_multiply_and_the_result_is_clamped():
    layers = table([0.5, 1.0, 1.0], [200.0, 100.0, 100.0], [0.0, 0.5, 0.0])
    sigmas = layer_sigmas(layers, verdict_on(), SigmaRule(base_sigma=0.1, sigma_min=0.06))
    # 0.1 * 1.5 * 1.5 = 0.225 > 0.15; 0.1 * 0.5 = 0.05 < 0.06
    assert sigmas.aqn.layer_sigmas == {0: 0.15, 1: 0.06, 2: 0.1}
    assert sigmas.reasons[0].endswith("clamped to 0.15")
    assert sigmas.reasons[1] == "instability 0.5 > 0.1: x0.5; clamped to 0.06"


def test_raises_of_propagated_layers_go_to_their_source_once():
    layers = table(
        gain=[1.0, 1.0, 0.5, 0.5, 1.0, 0.5, 1.0, 1.0],
        kurtosis=[100.0, 100.0, 100.0, 200.0, 100.0, 100.0, 100.0, 100.0],
        instability=[0.0, 0.0, 0.0, 0.3, 0.0, 0.0, 0.0, 0.0],
        role=["healthy", "source", "sat_prop", "sat_prop", "sat_prop", "healthy", "healthy", "healthy"],
    )
    sigmas = layer_sigmas(layers, verdict_on(), SigmaRule())
    # layers 2 and 3 give their raises to layer 1; layer 3 is still lowered; 5 is raised for itself
    assert sigmas.aqn.layer_sigmas == {0: 0.05, 1: 0.075, 2: 0.05, 3: 0.025, 4: 0.05, 5: 0.075, 6: 0.05, 7: 0.05}
    assert sigmas.reasons[1] == "saturation propagated to layers 2, 3: x1.5"
    assert sigmas.reasons[2] == "raise goes to source layer 1 (gain 0.5 < 0.8 x median 1)"
    assert sigmas.reasons[4] == "no rule applies: base sigma"


def test_median_kurtosis_below_zero_raises_no_layer():
    # -0.5 > 1.2 * -1 would raise every layer
    sigmas = layer_sigmas(table([1.0] * 3, [-0.5, -1.0, -1.1]), verdict_on(), SigmaRule())
    assert set(sigmas.aqn.layer_sigmas.values()) == {0.05}


def test_propagated_layer_without_source_is_refused():
    with pytest.raises(DataError, match="layer 0 is sat_prop"):
        layer_sigmas(table([1.0, 1.0], role=["sat_prop", "source"]), verdict_on(), SigmaRule())


def test_empty_table_is_refused():
    with pytest.raises(DataError, match="no rows"):
        layer_sigmas(table([]), verdict_on(), SigmaRule())


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.floats(-2, 5000), st.floats(0, 10), st.sampled_from(["healthy", "sat_prop"])),
        min_size=1,
        max_size=30,
    ),
    st.floats(1e-3, 1),
)
def test_sigmas_stay_within_bounds_and_every_layer_has_one_and_a_reason(rows, base_sigma):
    gain, kurtosis, instability, roles = (list(column) for column in zip(*rows, strict=True))
    roles[0] = "source"
    rule = SigmaRule(base_sigma=base_sigma)
    sigmas = layer_sigmas(table(gain, kurtosis, instability, roles), verdict_on(), rule)
    assert list(sigmas.aqn.layer_sigmas) == list(range(len(rows))) == list(sigmas.reasons)
    assert all(rule.sigma_min <= sigma <= rule.sigma_max for sigma in sigmas.aqn.layer_sigmas.values())
    assert all(sigmas.reasons.values())


EIGHT = table([1.0] * 8)


def sigmas_by(strategy, *faulty, rule=None, layers=EIGHT, errors=None):
    errors = errors or dict.fromkeys(range(layers.height), 0.002)
    return layer_sigmas(layers, verdict_on(*faulty), rule or SigmaRule(), strategy, errors=errors)


@pytest.mark.parametrize("strategy", get_args(SigmaStrategy))
def test_every_strategy_names_itself_and_gives_every_layer_a_reason(strategy):
    sigmas = sigmas_by(strategy, 3)
    assert sigmas.srdd_metadata["strategy"] == strategy
    assert list(sigmas.aqn.layer_sigmas) == list(range(8)) == list(sigmas.reasons)
    assert all(sigmas.reasons.values())


GRADED = ("robust_first", "shuffled_layers")


def test_robust_first_worked_out_by_hand():
    # sensitivities 1, 4 and 1/4 of one another: weights 1/sqrt are 1, 1/2 and 2, with a mean square of 1.75
    layers = table([1.0] * 3, sensitivity=[0.02, 0.08, 0.005])
    scale = 0.05 / 1.75**0.5
    wanted = {0: scale, 1: scale / 2, 2: scale * 2}
    found = sigmas_by("robust_first", layers=layers)
    assert found.aqn.layer_sigmas == pytest.approx(wanted, rel=1e-9)
    assert found.reasons[1].startswith("more noise where the model is robust; sensitivity 0.08, number 1 of 3")


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30), st.floats(0.01, 0.15))
def test_graded_sigmas_have_the_energy_of_uniform_ones_within_bounds(sensitivity, base_sigma):
    rule = SigmaRule(base_sigma=base_sigma)
    layers = table([1.0] * len(sensitivity), sensitivity=sensitivity)
    found = {name: sigmas_by(name, rule=rule, layers=layers).aqn.layer_sigmas for name in GRADED}
    for sigmas in found.values():
        assert all(rule.sigma_min <= sigma <= rule.sigma_max for sigma in sigmas.values())
        assert sum(sigma**2 for sigma in sigmas.values()) == pytest.approx(len(sensitivity) * base_sigma**2, rel=1e-8)
        assert sorted(sigmas.values()) == sorted(found["robust_first"].values())
    for more, less in itertools.combinations(range(len(sensitivity)), 2):
        if sensitivity[more] > sensitivity[less]:
            assert found["robust_first"][more] <= found["robust_first"][less]


def test_shuffled_layers_follow_the_seed():
    orders = {
        tuple(sigmas_by("shuffled_layers", rule=SigmaRule(seed=seed)).aqn.layer_sigmas.values()) for seed in range(10)
    }
    assert len(orders) > 5
    assert sigmas_by("shuffled_layers") == sigmas_by("shuffled_layers")


def test_a_changed_sensitivity_changes_the_sigmas_and_the_published_rule_ignores_it():
    other = table([1.0] * 8, sensitivity=[0.01 * (8 - layer) for layer in range(8)])
    assert sigmas_by("robust_first", layers=other).aqn != sigmas_by("robust_first").aqn
    assert sigmas_by("published", layers=other).aqn == sigmas_by("published").aqn


def test_damage_first_worked_out_by_hand():
    # cost c*(e/0.1)^2: 0.04, 0.01 and 0.0025; their roots 0.2, 0.1 and 0.05 have a mean square of 0.0175
    layers = table([1.0] * 3, sensitivity=[0.04, 0.25, 0.0025])
    errors = {0: 0.1, 1: 0.02, 2: 0.1}
    scale = 0.05 / 0.0175**0.5
    found = sigmas_by("damage_first", layers=layers, errors=errors)
    assert found.aqn.layer_sigmas == pytest.approx({0: 0.2 * scale, 1: 0.1 * scale, 2: 0.05 * scale}, rel=1e-9)
    assert found.reasons[1] == (
        "more noise where the measured error costs more; error 2 %, sensitivity 0.25, predicted cost 0.01 nats per "
        f"token, number 2 of 3: sigma {0.1 * scale:.4g}"
    )
    assert sum(sigma**2 for sigma in found.aqn.layer_sigmas.values()) == pytest.approx(3 * 0.05**2, rel=1e-8)
    # twice the error in every layer changes no order and no share
    assert sigmas_by("damage_first", layers=layers, errors={k: 2 * e for k, e in errors.items()}).aqn == found.aqn


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        (None, "no measured error of the layers was given"),
        ({0: 0.1}, r"the parity has layers \[0\], expected those of the diagnosis"),
        (dict.fromkeys(range(8), 0.0), "costs nothing in any layer"),
    ],
)
def test_damage_needs_an_error_of_every_layer(errors, message):
    with pytest.raises(DataError, match=message):
        layer_sigmas(EIGHT, verdict_on(), SigmaRule(), "damage_first", errors=errors)


@pytest.mark.parametrize("strategy", [*GRADED, "damage_first"])
@pytest.mark.parametrize("missing", [pl.lit(None, dtype=pl.Float64), None])
def test_a_strategy_that_needs_the_sensitivity_refuses_a_diagnosis_without(strategy, missing):
    layers = EIGHT.drop("sensitivity") if missing is None else EIGHT.with_columns(missing.alias("sensitivity"))
    with pytest.raises(DataError, match="no sensitivity of the layers"):
        sigmas_by(strategy, layers=layers)


@pytest.mark.parametrize("base_sigma", [0.005, 0.2])
def test_equal_energy_needs_a_base_sigma_within_the_bounds(base_sigma):
    with pytest.raises(ConfigError, match=r"base_sigma is .*, outside sigma_min 0.01 to sigma_max 0.15"):
        sigmas_by("robust_first", rule=SigmaRule(base_sigma=base_sigma))
