"""A file of sigmas made by hand, and the settings that choose the layers and norms of AQN."""

import pytest

from aqnpipe.config.analysis import default_comparisons
from aqnpipe.config.noise import AdaptiveNoise, ConstantSigma
from aqnpipe.config.study import read_arms
from aqnpipe.errors import ConfigError

ARM = """
arms:
  uniform:
    description: the same sigma everywhere
    aqn: {schedule: {kind: constant, sigma: 0.05}}
  by_hand:
    description: sigmas of a file
    aqn: {schedule: {kind: constant, sigma: 0.05}, sigmas: ./mine.yaml}
"""
FILE = """
aqn:
  enabled: true
  layer_specific: true
  base_sigma: 0.05
  layer_sigmas: {0: 0.05, 10: 0.075, 15: 0.1}
  schedule: epoch_aware
  high_priority_layers: [10, 15]
srdd_metadata: {num_layers: 28, analysis_date: '2026-01-07'}
"""


@pytest.fixture
def arms(tmp_path):
    def read(content):
        (tmp_path / "arms.yaml").write_text(ARM)
        (tmp_path / "mine.yaml").write_text(content)
        return read_arms(tmp_path / "arms.yaml")

    return read


def test_the_published_form_of_the_file_is_read_into_the_arm(arms):
    """The values are settings of the arm: another file trains again, a touched one does not."""
    aqn = arms(FILE)["by_hand"].aqn
    assert [aqn.factor(layer, None) for layer in (0, 1, 10, 15, None)] == pytest.approx([1.0, 1.0, 1.5, 2.0, 1.0])
    assert arms(FILE + "\n# touched\n")["by_hand"].aqn == aqn
    assert arms(FILE.replace("0.075", "0.08"))["by_hand"].aqn != aqn


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("aqn: {base_sigma: 0.05}", "mine.yaml: aqn: layer_sigmas"),
        ("aqn: {base_sigma: 0, layer_sigmas: {0: 1}}", "mine.yaml: aqn: base_sigma"),
        ("aqn: {base_sigma: 1, layer_sigmas: {0: -1}}", "mine.yaml: aqn: layer_sigmas.0"),
        ("aqn: {enabled: false, base_sigma: 1, layer_sigmas: {0: 1}}", "mine.yaml: aqn: enabled"),
        ("aqn: {base_sigma: 1, layer_sigma: {0: 1}}", "mine.yaml: aqn: layer_sigma"),
        ("layer_sigmas: {0: 1}", "mine.yaml: found no section aqn"),
    ],
)
def test_another_file_is_refused(arms, content, problem):
    with pytest.raises(ConfigError, match=problem):
        arms(content)


def test_an_arm_with_sigmas_by_hand_is_compared_with_the_uniform_one(arms):
    claims = default_comparisons(arms(FILE), (0.0, 0.1))
    assert ("by_hand", "uniform") in [(claim.treatment, claim.control) for claim in claims if claim.kind == "arms"]


def test_defaults_add_nothing_to_records():
    assert set(AdaptiveNoise(schedule=ConstantSigma(sigma=0.05)).model_dump()) == {
        *("schedule", "targets", "layer_sigmas_from", "layer_sigmas_strategy"),
    }
