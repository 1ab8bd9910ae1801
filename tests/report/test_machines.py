"""Noise levels in units of a measured machine, with multiples worked out by hand."""

import dataclasses
import math

import pytest
from made_up_parities import identity, operator, parity

from aqnpipe.config.arm import Arm
from aqnpipe.config.measured_noise import MeasuredError
from aqnpipe.config.noise import OperatorNoise
from aqnpipe.report.inputs import MeasuredMachine, ReportData
from aqnpipe.report.machines import machine_scales, noises_of, times_by_operator
from aqnpipe.report.words import load_words

MACHINE = parity(
    [
        operator("input_layernorm", 0, relative_rms=0.004),
        operator("q_proj", 0, relative_rms=0.002, figures_rms=0.0022, result_rms=5.0),
        operator("attention", 0, relative_rms=0.004, figures_rms=0.004, result_rms=2.0),
        operator("q_proj", 1, relative_rms=0.0025, figures_rms=0.0025, result_rms=10.0),
        operator("mlp_residual", 1, relative_rms=0.002),
        operator("norm", relative_rms=0.003),
        operator("lm_head", relative_rms=0.001, figures_rms=0.001, result_rms=1.0),
    ]
)


def noise(error, **settings):
    return OperatorNoise.model_validate({"error": error, "phases": ("evaluation",), **settings})


def relative(scale, **settings):
    return noise({"kind": "relative_gaussian", "scale": scale}, **settings)


def times(of, machine=MACHINE, parities=None):
    return {one.name: found for one, found in times_by_operator(of, machine, parities or {})}


def test_relative_noise_over_the_relative_error_of_each_product():
    assert times(relative(0.05)) == pytest.approx(
        {"layers.0.q_proj": 25, "layers.0.attention": 12.5, "layers.1.q_proj": 20, "lm_head": 50}
    )


def test_only_operators_with_the_noise_have_a_multiple():
    assert set(times(relative(0.05, layers=(1,), include_lm_head=False))) == {"layers.1.q_proj"}
    with_norms = times(relative(0.05, operators="all"))
    assert with_norms["layers.0.input_layernorm"] == pytest.approx(12.5)
    assert not {"norm", "layers.1.mlp_residual"} & set(with_norms)


def test_layers_with_a_scale_of_their_own():
    found = times(relative(0.05, layer_scales={1: 0.1}))
    assert (found["layers.0.q_proj"], found["layers.1.q_proj"]) == (pytest.approx(25), pytest.approx(40))
    assert set(times(relative(0.0, layer_scales={1: 0.1}))) == {"layers.1.q_proj"}


def test_noise_in_the_unit_of_results_is_divided_by_their_size():
    found = times(noise({"kind": "absolute_gaussian", "scale": 0.1}))
    assert found["layers.0.q_proj"] == pytest.approx(0.1 / 5 / 0.002)
    older = parity([operator("q_proj", 0, relative_rms=0.002)])
    assert times(noise({"kind": "systematic_bias", "scale": 0.1}), older) == {}


def test_roundings_to_a_number_format_have_no_fixed_size():
    assert times(noise({"kind": "mantissa_truncation", "mantissa_bits": 7})) == {}
    assert times(noise({"kind": "fake_quantization", "format": "mxfp4"})) == {}


def test_a_measured_noise_has_the_size_of_its_own_parity():
    there = parity([operator("q_proj", 0, figures_rms=0.008), operator("lm_head", figures_rms=None)])
    error = MeasuredError(source="there.json", multiple=4)
    assert times(noise(error), parities={"there.json": there}) == {"layers.0.q_proj": pytest.approx(4 * 0.008 / 0.002)}
    assert times(noise(error)) == {}


def test_a_measured_noise_is_on_norms_that_have_figures():
    there = parity([operator("input_layernorm", 0, figures_rms=0.002), operator("norm", figures_rms=0.0015)])
    error, parities = MeasuredError(source="there.json", multiple=4), {"there.json": there}
    assert times(noise(error), parities=parities) == pytest.approx({"layers.0.input_layernorm": 2, "norm": 2})
    assert set(times(noise(error, include_lm_head=False), parities=parities)) == {"layers.0.input_layernorm"}


def test_a_machine_without_an_error_is_infinitely_far():
    assert times(relative(0.05), parity([operator("q_proj", 0, relative_rms=0.0)])) == {"layers.0.q_proj": math.inf}


def arm(error, **settings):
    return Arm.model_validate({"description": "", "model": "base", "operator_noise": {"error": error, **settings}})


@pytest.fixture
def made_up(synthetic):
    """The synthetic study with a counterpart, one named noise, and arms of other noises."""
    study = synthetic.study(
        machines={"device": {"counterpart": {"dtype": "bfloat16"}}, "target": {}},
        evaluation={
            **{"noise_seeds": [0], "max_response_tokens": 40, "batch_size": 250},
            "noises": {
                "twice": {"operator_noise": {"error": {"kind": "measured", "from": "device", "multiple": 2}}},
                "four_bits": "w4a16_mxfp4",
            },
        },
    )
    measured = {"kind": "measured", "from": "device", "multiple": 2}
    more = {
        "E_measured": arm(measured, phases=["rollout"]),
        "E7": arm({"kind": "relative_gaussian", "scale": 0.07}),
        "E7_again": arm({"kind": "relative_gaussian", "scale": 0.07}, phases=["rollout"]),
        "elsewhere": arm({"kind": "relative_gaussian", "scale": 0.01}).model_copy(update={"model": "large"}),
    }
    return study.model_copy(update={"arms": {**study.arms, **more}})


def test_the_noises_are_those_of_evaluations_and_the_others_of_arms(made_up):
    found = [(one.level, one.arms) for one in noises_of(made_up, "base", "eager")]
    assert found == [(0.05, ()), (0.1, ()), (1.0, ()), (2.0, ()), (None, ("E7", "E7_again"))]


def shown(made_up, machine=MACHINE, language="en", name="device"):
    path = f"{made_up.config.results_dir}/parity/base/{name}.json"
    data = ReportData(**dict.fromkeys(ReportData.__dataclass_fields__))
    data = ReportData(**{**vars(data), "parities": (MeasuredMachine("base", name, path, machine),)})
    words = load_words(language, made_up.config.evaluation.noise_names())
    (found,) = machine_scales(made_up, data, words)
    return found


def test_sentences_and_table_have_median_and_range(made_up):
    scale = shown(made_up)
    assert scale.heading == "Model base on device (bfloat16)"
    assert scale.sentences[0] == (
        "5\u00a0% noise is 22 times the error of device (bfloat16) in a matrix product: "
        "median of 4 operators, 12 to 50."
    )
    assert "four_bits" in scale.figure.caption
    assert "four_bits" not in " ".join(scale.sentences)
    (table,) = scale.figure.tables
    assert table.headers[4:] == ("5\u00a0%, times", "10\u00a0%, times", "twice, times", "E7, E7_again, times")
    rows = {row.cells[0]: row.cells[1:] for row in table.rows}
    multiples = ("22 (20 to 25)", "45 (40 to 50)", "2.1 (2 to 2.2)", "32 (28 to 35)")
    assert rows["q_proj"] == ("rounding", "2", "0.23 (0.2 to 0.25)", *multiples)
    assert rows["mlp_residual"] == ("rounding", "1", "0.2", "–", "–", "–", "–")
    assert [row.cells[0] for row in scale.brief.rows] == ["all matrix products", "q_proj", "attention", "lm_head"]


def test_the_multiple_of_no_error_is_infinite_in_the_table(made_up):
    layers = [operator("q_proj", 0, relative_rms=0.0), operator("q_proj", 1, relative_rms=0.002)]
    (table,) = shown(made_up, parity(layers)).figure.tables
    rows = {row.cells[0]: row.cells for row in table.rows}
    assert rows["q_proj"][4] == "∞ (25 to ∞)"


def test_the_picture_has_lines_for_the_noises_of_all_layers_alone(made_up):
    partial = {"E_partial": arm({"kind": "relative_gaussian", "scale": 0.03}, layers=[0])}
    study = made_up.model_copy(update={"arms": {**made_up.arms, **partial}})
    scale = shown(study)
    ((panel,),) = (group.panels for group in scale.figure.groups)
    drawn = {row["name"] for rows in panel.chart.to_dict()["datasets"].values() for row in rows if "name" in row}
    assert drawn == {"5\u00a0%", "10\u00a0%", "E7, E7_again"}
    assert "E_partial, times" in scale.figure.tables[0].headers


def test_a_machine_of_another_engine_is_named_by_what_differs_and_a_fault_stands_out(made_up):
    second = identity(backend="vllm", device="npu (910B)", threads=8)
    broken = operator("q_proj", 0, verdict="fault")
    machine = parity([broken, operator("q_proj", 1)], second=second, verdict="fault", same_inputs=False)
    scale = shown(made_up, machine, "zh")
    assert scale.heading == "模型 base，device（vllm, npu (910B), threads 8）"
    assert [row.alert for row in scale.figure.tables[0].rows] == [True, True]
    assert len(scale.figure.alerts) == 2
    assert shown(made_up).figure.alerts == ()


def test_page_and_summary_show_the_scale(synthetic, make_report, tmp_path):
    study = synthetic.study(arms=["baseline", "E5"], seeds=[0], comparisons=[])
    without = make_report(tmp_path, study, 60)
    assert 'id="scale"' not in without.html
    data = without.made.report_data(tmp_path)
    measured = MeasuredMachine("base", "<b>npu</b>", tmp_path / "parity.json", MACHINE)
    page = without.build(data=dataclasses.replace(data, parities=(measured,))).html
    assert 'href="#scale"' in page
    assert "&lt;b&gt;npu&lt;/b&gt; (bfloat16) in a matrix product" in page
    summary = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert "| attention | rounding | 1 | 0.4 | 12 | 25 |" in summary
