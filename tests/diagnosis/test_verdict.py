from pathlib import Path

import polars as pl
import pytest

from aqnpipe.artifacts.diagnoses import Finding, LocatedFault, Untested
from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.diagnosis.exact_probes import ExactResult
from aqnpipe.diagnosis.verdict import FALSE_ALARMS, HEALTHY_RUNS, false_alarm_bound, judge


def table(num_layers: int = 6) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "layer": range(num_layers),
            "instability": [0.0] * num_layers,
        }
    )


GAIN_IN_5 = Finding(scan="gain", layer=5, type="dead_zone", z=-3.25)


def exact_result(**changes) -> ExactResult:
    values = {
        "checks": [],
        "faults": (),
        "untested": (),
        "reordered": (),
        "elements_per_channel": 2400,
        "calls_per_site": 6,
        "forward_equivalents": 11.0,
        "num_tokens": 400,
        "device": "cpu",
    }
    return ExactResult(**{**values, **changes})


def fault_at(layer: int, site: str) -> LocatedFault:
    return LocatedFault(
        layer=layer,
        site=site,
        type="saturation",
        num_faulty_channels=1,
        faulty_channel_indices=(7,),
        num_channels=64,
        magnitude=0.3,
        magnitude_low=0.29,
        magnitude_high=0.31,
        threshold="dynamic",
        probes=("identity",),
        evidence="1 of 64 channels differ",
    )


def test_exact_probes_decide_against_the_scans():
    both = judge(exact_result(), (table(), [GAIN_IN_5], 9.0), DiagnosisConfig(), [{"type": "dead_zone", "layer": 0}])
    assert (both.verdict, both.method, both.forward_equivalents) == ("healthy", "all", 20.0)
    assert (both.findings, both.num_layers) == ((GAIN_IN_5,), 6)
    assert both.simulated_faults == ({"type": "dead_zone", "layer": 0},)
    assert "gain layer 5 (z -3.25)" in both.reason
    found = judge(exact_result(faults=(fault_at(4, "o_proj"),)), (table(), [], 9.0), DiagnosisConfig())
    assert (found.verdict, found.layer, found.site, found.type, found.num_faulty_channels) == (
        "fault",
        4,
        "o_proj",
        "saturation",
        1,
    )


def test_all_faults_are_reported_and_the_first_leads():
    verdict = judge(exact_result(faults=(fault_at(1, "norm"), fault_at(3, "o_proj"))), None, DiagnosisConfig())
    assert [(fault.layer, fault.site) for fault in verdict.faults] == [(1, "norm"), (3, "o_proj")]
    assert (verdict.layer, verdict.method) == (1, "exact")


def test_healthy_states_what_a_rare_fault_would_escape_with():
    verdict = judge(exact_result(), None, DiagnosisConfig(intermittent_rate=0.003))
    assert verdict.miss_probability == pytest.approx(0.997**2400)
    assert "7.4e-04" in verdict.reason


def test_healthy_states_the_rate_per_call_that_its_calls_detect():
    verdict = judge(exact_result(calls_per_site=6), None, DiagnosisConfig())
    # (1 - rate)^6 = 5 %
    assert verdict.detected_call_rate == pytest.approx(0.393, abs=1e-3)
    assert "strikes 39% of the calls with 5%" in verdict.reason


def test_what_was_not_tested_is_listed_and_nothing_says_every_site():
    gaps = (Untested(part="mlp_output", layers=(3,), reason="mixture"), Untested(part="KV cache", reason="no probe"))
    verdict = judge(exact_result(untested=gaps), None, DiagnosisConfig())
    assert verdict.untested == gaps
    assert "not tested: mlp_output, KV cache" in verdict.reason
    assert "every" not in verdict.reason


def test_a_device_that_adds_in_changing_order_is_healthy_and_named():
    verdict = judge(exact_result(reordered=("q_proj",)), None, DiagnosisConfig())
    assert (verdict.verdict, verdict.reordered_sites) == ("healthy", ("q_proj",))
    assert "this device adds in another order in every call" in verdict.reason


@pytest.mark.parametrize(("device", "is_measured"), [("cpu", True), ("cuda", False), ("npu", False)])
def test_a_false_alarm_bound_is_given_only_where_it_was_measured(device, is_measured):
    verdict = judge(exact_result(device=device), None, DiagnosisConfig())
    assert (verdict.false_alarm_bound is not None) == is_measured
    assert ("has not been measured" in verdict.reason) != is_measured


def test_a_fault_of_the_device_leads_without_a_layer():
    shared = fault_at(0, "o_proj").model_copy(update={"layer": None, "scope": "device", "layers": (0, 1, 2)})
    verdict = judge(exact_result(faults=(shared,)), None, DiagnosisConfig())
    assert (verdict.verdict, verdict.layer, verdict.site) == ("fault", None, "o_proj")
    assert verdict.reason.startswith("device-wide (3 layers), o_proj: saturation")


def test_false_alarm_bounds_are_those_of_the_committed_benchmarks():
    folder = Path(__file__).parents[2] / "benchmarks"
    healthy = pl.read_csv(folder / "detection_healthy.csv", infer_schema_length=None)
    assert ((healthy["verdict"] == "fault").sum(), healthy.height) == (FALSE_ALARMS, HEALTHY_RUNS)
    assert HEALTHY_RUNS >= 300
    # rule of three: no alarm in n machines bounds the rate near 3/n
    assert false_alarm_bound("cpu") == pytest.approx(3 / HEALTHY_RUNS, rel=0.01)
