"""A machine whose parts have errors of their own: the numbers of studies with a scale per layer, and proven."""

import numpy as np
import pytest
import torch

from aqnpipe.config.noise import NoiseSpec, OperatorNoise, RelativeGaussian
from aqnpipe.machine.machine import Machine, MachineKey, Request
from aqnpipe.models.parts import parts_of
from aqnpipe.noise.injection.phase import NoiseKey, phase_noise
from aqnpipe.noise.receipts.recorder import ReceiptRecorder
from aqnpipe.proof.audit import Audit, AuditRequest
from aqnpipe.proof.receipt import MachineReceipt, Requested

ERROR = RelativeGaussian(scale=0.05)
IDS = torch.arange(5, 25).reshape(2, 10)


def logits(model, errors, audited):
    """Return logits on a machine with `errors`, and the problems of an audit that expects those of `audited`."""
    parts = parts_of(model)
    modules = dict(enumerate(parts.modules.values()))
    receipt = MachineReceipt(Requested(("evaluation",), "", 0.05), np.random.default_rng(0))
    audit = Audit(AuditRequest(ERROR, 3, (0, 0, 0), "evaluation", None, False, errors=audited), receipt, len(modules))
    machine = Machine(Request(ERROR, MachineKey(3), len(modules), errors=errors), audit.observe_outside)
    with torch.no_grad(), machine.running(parts.roots, modules):
        handles = audit.add_model(parts.roots, modules, dict(enumerate(parts.modules)))
        with audit.running():
            found = model(input_ids=IDS).logits
        for handle in handles:
            handle.remove()
    receipt.count(machine.counts)
    return found, receipt.problems()


def test_scales_of_layers_are_those_of_studies_and_proven(make_model):
    model = make_model()
    noise = OperatorNoise(error=ERROR, phases=("evaluation",), layer_scales={0: 0.2, 1: 0.01})
    spec = NoiseSpec(operator_noise=noise)
    recorder = ReceiptRecorder(spec, expected_phases=("evaluation",), num_layers=3, num_norms=7)
    with torch.no_grad(), phase_noise(model, spec, "evaluation", NoiseKey(seed=3, step=0), recorder):
        expected = model(input_ids=IDS).logits
    errors = {0: RelativeGaussian(scale=0.2), 1: RelativeGaussian(scale=0.01)}
    found, problems = logits(model, errors, errors)
    assert torch.equal(found, expected)
    assert problems == []


@pytest.mark.parametrize("errors", [{}, {1: RelativeGaussian(scale=0.2)}])
def test_the_scale_of_another_layer_is_refused(make_model, errors):
    problems = logits(make_model(), errors, {0: RelativeGaussian(scale=0.2)})[1]
    assert any("in model.layers.0 " in problem and "not the requested ones" in problem for problem in problems)
