"""Where operators and gradients are: passes, parts, visits, and layers that are computed again."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from aqnpipe.machine.places import CALLS_PER_VISIT, Places
from aqnpipe.models.parts import parts_of


class Model(nn.Module):
    def __init__(self, checkpoints=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 2)
        self.checkpoints = checkpoints

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return self.head(x)


@pytest.fixture
def places():
    return Places(3, lambda passed, part: 100 * passed + part)


def observed(model, places):
    """Return where each linear module was when it computed."""
    seen = []
    for number, module in enumerate([*model.layers, model.head]):
        module.register_forward_hook(
            lambda module, args, output, number=number: seen.append((number, places.here().part, places.here().passed))
        )
    parts = parts_of(model)
    places.hooks(parts.roots, dict(enumerate(parts.modules.values())))
    for module in [*model.layers]:
        # Hooks behind those of the places run outside; a pre-hook runs inside.
        module.register_forward_pre_hook(lambda *_: seen.append(("inside", places.here().part, places.here().passed)))
    return seen


def test_parts_and_passes(places):
    model = Model()
    seen = observed(model, places)
    for _ in range(2):
        model(torch.ones(1, 4))
    inside = [(part, passed) for kind, part, passed in seen if kind == "inside"]
    assert inside == [(part, passed) for passed in (0, 1) for part in (0, 1, 2)]
    head = [(part, passed) for kind, part, passed in seen if kind == 3]
    assert head == [(3, 0), (3, 1)]


def test_a_visit_has_calls_of_its_own(places):
    model = Model()
    first, calls = model.layers[0], []
    parts = parts_of(model)
    places.hooks(parts.roots, dict(enumerate(parts.modules.values())))
    first.register_forward_pre_hook(lambda *_: calls.append(places.here().calls))
    model.register_forward_pre_hook(lambda *_: (first(torch.ones(1, 4)), None)[1])
    model(torch.ones(1, 4))
    assert calls == [0, CALLS_PER_VISIT]


def test_nodes_lead_to_their_part(places):
    model = Model()
    parts = parts_of(model)
    places.hooks(parts.roots, dict(enumerate(parts.modules.values())))
    outputs = []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, output: outputs.append(output.grad_fn))
    loss = model(torch.ones(1, 4)).sum()
    assert [places.segment_of(node._sequence_nr()).part for node in outputs] == [0, 1, 2]
    assert places.segment_of(loss.grad_fn._sequence_nr()).part == 3
    assert places.segment_of(-5) is None


def test_a_layer_computed_again_is_where_it_was(places):
    model = Model(checkpoints=True)
    parts = parts_of(model)
    places.hooks(parts.roots, dict(enumerate(parts.modules.values())))
    seen = []
    for layer in model.layers:
        layer.register_forward_pre_hook(
            lambda *_: seen.append(
                (places.here().part, places.here().passed, places.here().is_again, places.here().key)
            )
        )
    loss = model(torch.ones(1, 4)).sum()
    model(torch.ones(1, 4))
    del seen[3:]
    loss.backward()
    assert seen[:3] == [(0, 0, False, 0), (1, 0, False, 1), (2, 0, False, 2)]
    assert sorted(seen[3:]) == [(0, 0, True, 0), (1, 0, True, 1), (2, 0, True, 2)]


def test_parts_of_models():
    model = Model()
    assert list(parts_of(model).modules) == ["layers.0", "layers.1", "layers.2"]
    assert parts_of(nn.Linear(2, 2)).modules == {}
    outer = nn.Sequential(model)
    assert parts_of(outer).roots == (outer, model)
    nested = nn.Module()
    nested.blocks = nn.ModuleList([Model(), Model()])
    assert list(parts_of(nested).modules) == ["blocks.0", "blocks.1"]
