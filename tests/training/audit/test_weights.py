"""Weights before training and in checkpoints are compared with their files, the fused experts of a mixture too."""

import pytest
import torch
from random_models import random_mixture_of

from aqnpipe.config.training import LoraConfig
from aqnpipe.models.adapters import add_adapters
from aqnpipe.models.loading import load_model
from aqnpipe.training.audit.measure import Ledger, WeightAudit

MIXTURES = ("mixtral", "granitemoe", "deepseek_v3")


@pytest.fixture(params=MIXTURES)
def saved(request, tmp_path):
    random_mixture_of(request.param).save_pretrained(tmp_path / "model")
    return load_model(tmp_path / "model", dtype="float32", attention="eager"), tmp_path


def change_an_expert(model):
    experts = next(weight for name, weight in model.named_parameters() if "expert" in name and weight.ndim == 3)
    with torch.no_grad():
        experts[3, 5, 7] += 1


def audit_of(model, folder):
    ledger = Ledger()
    return WeightAudit(model, folder / "model", 0, ledger), ledger.problems


def test_an_expert_that_was_changed_before_training_is_named(saved):
    model, folder = saved
    assert audit_of(model, folder)[1] == []
    change_an_expert(model)
    (problem,) = audit_of(model, folder)[1]
    assert problem.endswith("before training is not the weight of the prepared model")


def test_an_expert_below_adapters_is_compared_too(saved):
    model, folder = saved
    target = "q_a_proj" if "deepseek" in model.config.model_type else "q_proj"
    add_adapters(model, LoraConfig(rank=1, alpha=2, target_modules=(target,)), seed=0)
    assert audit_of(model, folder)[1] == []
    change_an_expert(model)
    assert len(audit_of(model, folder)[1]) == 1


def test_a_checkpoint_has_every_expert_as_it_is_in_memory(saved):
    model, folder = saved
    audit, found = audit_of(model, folder)
    model.save_pretrained(folder / "step1")
    assert audit.check_checkpoint(folder / "step1", 1)
    assert found == []
    change_an_expert(model)
    assert not audit.check_checkpoint(folder / "step1", 1)
    assert "in the checkpoint of step 1 is not the weight in memory" in found[0]


def test_a_checkpoint_without_some_experts_is_incomplete(saved):
    model, folder = saved
    audit, found = audit_of(model, folder)
    kept = {
        name: weight for name, weight in model.state_dict().items() if "layers.1" not in name or "expert" not in name
    }
    assert len(kept) < len(model.state_dict())
    model.save_pretrained(folder / "step1", state_dict=kept)
    assert not audit.check_checkpoint(folder / "step1", 1)
    assert "trained values" in found[0]
