"""Diagnoses on the page: what they changed in the sigmas of arms, their devices, and sigmas by several strategies."""

from types import SimpleNamespace

import polars as pl
import pytest

from aqnpipe.artifacts.diagnoses import DiagnosisOrigin, SigmaFile, Verdict
from aqnpipe.config.arm import Arm
from aqnpipe.config.noise import LayerSigmas
from aqnpipe.report.diagnosis import device_sentences, guidance_sentences, strategies
from aqnpipe.report.inputs import Diagnosis
from aqnpipe.report.words import load_words

ARMS = {
    "baseline": Arm(description=""),
    "uniform": Arm(description="", aqn={"schedule": {"kind": "constant", "sigma": 0.05}}),
    "guided": Arm(description="", aqn={"schedule": {"kind": "constant", "sigma": 0.05}, "layer_sigmas_from": "target"}),
}


def sigma_file(*sigmas):
    aqn = LayerSigmas(
        enabled=True,
        layer_specific=True,
        base_sigma=0.05,
        layer_sigmas=dict(enumerate(sigmas)),
        schedule="epoch_aware",
        high_priority_layers=[],
    )
    return SigmaFile(aqn=aqn, reasons={1: "<b>faulty</b>"}, srdd_metadata={})


def diagnosis(machine, *sigmas, faults=(), model="base", device=None, others=None):
    """A diagnosis with the sigmas of the published rule; `others`: those of further strategies, by name."""
    verdict = Verdict(
        verdict="fault" if faults else "healthy",
        reason="",
        layer=None,
        type=None,
        findings=(),
        forward_equivalents=1,
        num_layers=len(sigmas),
        simulated_faults=faults,
        origin=DiagnosisOrigin(model=model, machine=machine, weights_sha256="", layers_sha256="", device=device),
    )
    by_strategy = {"published": sigmas} | (others or {})
    files = {name: sigma_file(*found) for name, found in by_strategy.items()}
    return Diagnosis(model, machine, pl.DataFrame(), verdict, files)


FAULTS = ({"type": "dead_zone", "layer": 1},)
DEVICE = diagnosis("device", 0.05, 0.075, 0.05)


def sentences(*diagnoses, language="en"):
    return guidance_sentences(ARMS, diagnoses, load_words(language))


@pytest.mark.parametrize(("language", "word"), [("en", "changed no sigma"), ("zh", "没有改变任何 sigma")])
def test_sigmas_that_equal_those_without_a_diagnosis_are_named(language, word):
    (sentence,) = sentences(diagnosis("target", 0.05, 0.05, 0.05, faults=FAULTS), DEVICE, language=language)
    assert word in sentence
    assert "guided" in sentence


@pytest.mark.parametrize(("language", "word"), [("en", "fault of machine target changed no sigma"), ("zh", "target")])
def test_sigmas_that_equal_those_of_the_healthy_machine_are_named(language, word):
    (sentence,) = sentences(DEVICE, diagnosis("target", 0.05, 0.075, 0.05, faults=FAULTS), language=language)
    assert word in sentence
    assert "device" in sentence


def test_changed_layers_are_listed():
    (sentence,) = sentences(DEVICE, diagnosis("target", 0.06, 0.075, 0.04, faults=FAULTS))
    assert "changes the sigma of layers 0, 2 (of 3; strategy published)" in sentence


def test_nothing_is_said_of_the_fault_without_a_healthy_machine_or_of_another_model():
    target = diagnosis("target", 0.06, 0.075, 0.04, faults=FAULTS)
    assert sentences(target) == []
    assert sentences(diagnosis("device", 0.05, 0.075, 0.05, model="large"), target) == []
    assert sentences(DEVICE) == []


def test_a_faulty_machine_is_compared_with_a_healthy_one_on_the_same_device_only():
    faulty = diagnosis("target", 0.05, 0.075, 0.05, faults=FAULTS, device="npu: 1 x 910C")
    assert sentences(DEVICE, faulty) == []
    healthy = diagnosis("npu", 0.05, 0.075, 0.05, device="npu: 1 x 910C")
    (sentence,) = sentences(DEVICE, healthy, faulty)
    assert "the same sigmas on npu" in sentence


def test_devices_are_named_where_a_machine_has_its_own():
    words, run = load_words("en"), SimpleNamespace(record=SimpleNamespace(device="cuda: 8 x A100"))
    assert device_sentences([DEVICE], [run], words) == []
    there = diagnosis("npu", 0.05, device="npu: 1 x 910C")
    assert device_sentences([DEVICE, there], [run, run], words) == [
        "Machine npu was diagnosed on npu: 1 x 910C.",
        "The arms were trained on cuda: 8 x A100.",
    ]
    assert len(device_sentences([there], [], load_words("zh"))) == 1


def test_one_strategy_needs_no_picture():
    alone = diagnosis("device", 0.05, 0.05)
    assert strategies([alone], load_words("en")) == ([], [])


def test_every_strategy_layer_multiplier_and_reason_is_shown():
    target = diagnosis("target", 0.05, 0.075, others={"shuffled_layers": (0.1125, 0.0)})
    alone = diagnosis("device", 0.05, 0.05)
    (group,), (table,) = strategies([alone, target], load_words("en"))
    assert [key.name for key in group.legend] == ["published", "shuffled_layers"]
    (panel,) = group.panels
    assert panel.title == "Strategies on machine target"
    assert "<svg" in panel.svg
    rows = [row.cells for row in table.rows]
    assert rows[1] == ("target", "published", "1", "0.075", "1.5", "<b>faulty</b>")
    assert rows[2][:5] == ("target", "shuffled layers", "0", "0.1125", "2.25")
