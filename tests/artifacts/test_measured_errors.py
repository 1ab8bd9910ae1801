"""A measured error gets its figures from a parity file, and only from one that fits the model."""

import pytest
from made_up_parities import operator, parity
from replacing import replaced

from aqnpipe.artifacts.files import write_json
from aqnpipe.artifacts.measured_errors import spec_with_figures, with_figures
from aqnpipe.config.evaluation import EvaluationConfig, settings_of
from aqnpipe.config.measured_noise import ErrorFigures, MeasuredError
from aqnpipe.errors import ConfigError, DataError

CONFIG = {"model_type": "qwen2", "num_hidden_layers": 1, "hidden_size": 8}
FIGURES = ErrorFigures(bias=0.1, per_result=0.2)
OPERATORS = (
    operator("input_layernorm", 0, figures=FIGURES),
    operator("q_proj", 0, figures=FIGURES),
    operator("attention", 0, figures=ErrorFigures()),
    operator("lm_head", figures=FIGURES),
)


@pytest.fixture
def write(tmp_path):
    """Function (changes) -> path of a parity file."""

    def run(**changed):
        path = tmp_path / "parity.json"
        write_json(path, parity(**{"operators": OPERATORS, **changed}))
        return path

    return run


def refused(path, **settings):
    with pytest.raises((ConfigError, DataError)) as caught:
        with_figures(MeasuredError(source=str(path)), **{"config": CONFIG, "dtype": "float32", **settings})
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_the_figures_of_products_and_norms_are_read(write):
    error = with_figures(MeasuredError(source=str(write()), multiple=4), config=CONFIG, dtype="float32")
    assert error.figures == {
        "layers.0.input_layernorm": FIGURES,
        "layers.0.q_proj": FIGURES,
        "layers.0.attention": ErrorFigures(),
        "lm_head": FIGURES,
    }
    assert with_figures(error.model_copy(update={"source": "gone.json"})).figures == error.figures


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"weights_sha256": "c" * 64}, "other weights: found SHA-256 aaaaaaaaaaaa (tiny)"),
        ({"config": {**CONFIG, "hidden_size": 16}}, "another model (tiny): found hidden_size 8"),
        ({"config": {**CONFIG, "num_hidden_layers": 2}}, "found num_hidden_layers 1"),
        ({"dtype": "bfloat16"}, "the first side computed in float32"),
        (
            {"attention": "sdpa"},
            "the first side computed attention with eager, the model that gets the noise does with",
        ),
    ],
)
def test_a_parity_of_another_model_is_refused(write, settings, words):
    assert words in refused(write(), **settings)


def test_the_same_weights_are_accepted(write):
    path = str(write())
    assert with_figures(MeasuredError(source=path), config=CONFIG, dtype="float32", weights_sha256="a" * 64).figures


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"verdict": "stale weights", "summary": "the second side computed with other weights."}, "other weights"),
        ({"operators": OPERATORS[:3]}, "expected those of 1 layers and lm_head"),
        ({"operators": (operator("lm_head", figures=FIGURES),)}, "figures of layers [], expected those of 1 layers"),
        ({"operators": (operator("lm_head", figures=ErrorFigures()),)}, "the same bits on both sides"),
        ({"operators": (operator("lm_head"),)}, "compare the captures again"),
        ({"operators": (operator("lm_head", verdict="fault"),)}, "lm_head is a fault: why"),
        ({"same_inputs": False, "operators": (operator("lm_head"),)}, "without --replay"),
    ],
)
def test_a_parity_that_says_nothing_about_single_operators_is_refused(write, changes, words):
    assert words in refused(write(**changes))


def test_a_file_of_an_older_version_has_no_errors_of_norms(write):
    norms = (operator("input_layernorm", 0), operator("norm"))
    error = with_figures(MeasuredError(source=str(write(operators=(*norms, *OPERATORS[1:])))), config=CONFIG)
    assert list(error.figures) == ["layers.0.q_proj", "layers.0.attention", "lm_head"]
    assert not error.has_norms


def test_errors_of_some_norms_alone_are_refused(write):
    assert "no figures of the error of norm: " in refused(write(operators=(*OPERATORS, operator("norm"))))
    fault = operator("norm", verdict="fault")
    assert "norm is a fault: why" in refused(write(operators=(*OPERATORS, fault)))


def test_a_file_whose_norms_are_all_faults_is_no_old_file(write):
    norms = (operator("input_layernorm", 0, verdict="fault"), operator("norm", verdict="fault"))
    assert "input_layernorm is a fault: why" in refused(write(operators=(*norms, *OPERATORS[1:])))


def test_an_error_of_norms_alone_is_an_error(write):
    nothing = tuple(one.model_copy(update={"figures": ErrorFigures()}) for one in OPERATORS[1:])
    assert with_figures(MeasuredError(source=str(write(operators=(OPERATORS[0], *nothing))))).has_norms


def test_missing_damaged_and_foreign_files_are_refused(write, tmp_path):
    refused(tmp_path / "none.json")
    path = write()
    text = path.read_text()
    path.write_text(replaced(text, '"bias": 0.1', '"bias": 0.2', times=7))
    refused(path)
    path.write_text(text[: len(text) // 2])
    refused(path)
    path.write_text("{}")
    refused(path)


def test_evaluations_and_arms_get_the_figures_of_their_noise(write, study_spec, evaluation_spec):
    noise = {"error": {"kind": "measured", "from": str(write()), "multiple": 2}, "phases": ["rollout"]}
    trained = spec_with_figures(study_spec(noise), config=CONFIG)
    assert trained.arm.operator_noise.error.figures["layers.0.q_proj"] == FIGURES
    noise = {"operator_noise": {"error": noise["error"]}}
    spec = evaluation_spec({"machine": noise, "four_bits": "w4a16_mxfp4"})
    evaluated = spec_with_figures(spec, config=CONFIG)
    assert settings_of(evaluated.evaluation.noises["machine"]).operator_noise.error.figures["lm_head"] == FIGURES
    assert evaluated.evaluation.noises["four_bits"] == "w4a16_mxfp4"
    # What a job writes down is read back as the same settings.
    assert type(evaluated).model_validate_json(evaluated.model_dump_json()) == evaluated
    assert evaluated.evaluation.noise_at(1.0, "sdpa").operator_noise.error.figures["lm_head"] == FIGURES


@pytest.fixture
def study_spec():
    from pathlib import Path

    from aqnpipe.config.plan import StudyPlan
    from aqnpipe.config.run import TrainingSpec
    from aqnpipe.config.study import load_study_file

    def make(noise):
        plan = StudyPlan(load_study_file(Path(__file__).parents[2] / "config" / "smoke.yaml"))
        content = plan.training_spec("baseline", 0)
        return TrainingSpec.model_validate({**content, "arm": {**content["arm"], "operator_noise": noise}})

    return make


@pytest.fixture
def evaluation_spec():
    from aqnpipe.config.run import EvaluationSpec

    def make(noises):
        return EvaluationSpec.model_validate(
            {
                **{"model_role": "base", "arm_id": "baseline", "seed": 0, "step": 0, "dtype": "float32"},
                **{"attention": "eager", "prompt": {}, "evaluation": {}},
                "evaluation": EvaluationConfig(max_response_tokens=4, batch_size=2, noises=noises),
            }
        )

    return make
