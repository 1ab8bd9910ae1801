import polars as pl
import pytest

from aqnpipe.artifacts.diagnoses import AqnSection, SigmaFile, Verdict
from aqnpipe.config.arm import Arm
from aqnpipe.report.guidance_view import guidance_sentences
from aqnpipe.report.inputs import Diagnosis
from aqnpipe.report.words import load_words

ARMS = {
    "baseline": Arm(description=""),
    "uniform": Arm(description="", aqn={"schedule": {"kind": "constant", "sigma": 0.05}}),
    "guided": Arm(description="", aqn={"schedule": {"kind": "constant", "sigma": 0.05}, "layer_sigmas_from": "target"}),
}


def diagnosis(machine, *sigmas, faults=(), model="base"):
    aqn = AqnSection(
        enabled=True,
        layer_specific=True,
        base_sigma=0.05,
        layer_sigmas=dict(enumerate(sigmas)),
        schedule="epoch_aware",
        high_priority_layers=[],
    )
    verdict = Verdict(
        verdict="fault" if faults else "healthy",
        reason="",
        layer=None,
        type=None,
        findings=(),
        forward_equivalents=1,
        num_layers=len(sigmas),
        simulated_faults=faults,
    )
    strategies = {"published": SigmaFile(aqn=aqn, reasons={}, srdd_metadata={})}
    return Diagnosis(model, machine, pl.DataFrame(), verdict, strategies)


FAULTS = ({"type": "dead_zone", "layer": 1},)
DEVICE = diagnosis("device", 0.05, 0.075, 0.05)


def sentences(*diagnoses, language="en"):
    return guidance_sentences(ARMS, diagnoses, load_words(language))


@pytest.mark.parametrize(("language", "word"), [("en", "changed nothing"), ("zh", "没有改变任何东西")])
def test_sigmas_that_equal_those_without_a_diagnosis_are_named(language, word):
    (sentence,) = sentences(diagnosis("target", 0.05, 0.05, 0.05, faults=FAULTS), DEVICE, language=language)
    assert word in sentence
    assert "guided" in sentence


@pytest.mark.parametrize(("language", "word"), [("en", "fault of machine target changed nothing"), ("zh", "target")])
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
