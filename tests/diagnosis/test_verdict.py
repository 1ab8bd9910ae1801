import polars as pl
import pytest

from aqnpipe.artifacts import Finding
from aqnpipe.diagnosis.verdict import judge


def table(num_layers: int = 6) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "layer": range(num_layers),
            "instability": [0.0] * num_layers,
            "changed_share": [0.0] * num_layers,
            "zero_share": [0.25] + [0.0] * (num_layers - 1),
            "values_at_maximum": [1.0] * num_layers,
        }
    )


ZEROS_IN_0 = Finding(scan="zeros", layer=0, type="dead_zone", z=1e5)
CLAMP_IN_0 = Finding(scan="clamp", layer=0, type="saturation", z=1e5)
CLAMP_IN_3 = Finding(scan="clamp", layer=3, type="saturation", z=1e5)
GAIN_IN_5 = Finding(scan="gain", layer=5, type="dead_zone", z=-3.25)


def test_no_finding_is_healthy():
    verdict = judge(table(), [], 9.0)
    assert (verdict.verdict, verdict.layer, verdict.type, verdict.forward_equivalents) == ("healthy", None, None, 9.0)


def test_published_findings_alone_do_not_decide_but_are_reported():
    verdict = judge(table(), [GAIN_IN_5], 9.0)
    assert verdict.verdict == "healthy"
    assert verdict.findings == (GAIN_IN_5,)
    assert "gain layer 5 (z -3.25)" in verdict.reason


def test_exact_trace_decides_against_a_published_scan_elsewhere():
    verdict = judge(table(), [GAIN_IN_5, ZEROS_IN_0], 9.0, {"type": "dead_zone", "layer": 0})
    assert (verdict.verdict, verdict.layer, verdict.type) == ("fault", 0, "dead_zone")
    assert "25.000% (median layer 0.000%)" in verdict.reason
    assert verdict.simulated_fault == {"type": "dead_zone", "layer": 0}


def test_two_traces_in_one_layer_are_one_fault():
    verdict = judge(table(), [ZEROS_IN_0, CLAMP_IN_0], 9.0)
    assert (verdict.verdict, verdict.layer, verdict.type) == ("fault", 0, "dead_zone")


def test_traces_in_two_layers_abstain():
    verdict = judge(table(), [ZEROS_IN_0, CLAMP_IN_3], 9.0)
    assert (verdict.verdict, verdict.layer, verdict.type) == ("abstain", None, None)
    assert "layers 0, 3" in verdict.reason


@pytest.mark.parametrize(("num_layers", "expected"), [(1, "abstain"), (3, "abstain"), (4, "healthy")])
def test_too_few_layers_abstain(num_layers, expected):
    assert judge(table(num_layers), [], 9.0).verdict == expected


def test_healthy_on_a_noisy_device_says_what_stays_unseen():
    noisy = table().with_columns(changed_share=pl.lit(1.0))
    assert "a noise fault that is not far above the device's own noise stays unseen" in judge(noisy, [], 9.0).reason
    assert "unseen" not in judge(table(), [], 9.0).reason
