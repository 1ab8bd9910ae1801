"""Outputs of layers and faults, computed a second time: requested faults pass, and every other output is found."""

import pytest
import torch

from aqnpipe.config.noise import AdaptiveNoise, ConstantSigma, Fault, ModuleNoise, NoiseSpec, RelativeGaussian
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.noise.injection.faults import ActiveFault, ActiveFaults
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

IDS = torch.randint(2, 64, (3, 9), generator=torch.Generator().manual_seed(1))
TYPES = ["dead_zone", "saturation", "noise", "bias", "spike"]
SITES = ["layer_output", "attention_output", "mlp_output", "k_proj", "post_attention_layernorm"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEAD_ZONE = Fault(type="dead_zone", layer=1, magnitude=0.2)


def found(model, *faults, sigma=0.0, module_noise=None, seeds=(0, 1), hook=None, phase="rollout"):
    """Problems with outputs after a prompt and single tokens under each seed, with what earlier calls have left."""
    aqn = AdaptiveNoise(targets="hidden_states", schedule=ConstantSigma(sigma=sigma)) if sigma else None
    spec = NoiseSpec(faults=faults, aqn=aqn, module_noise=module_noise)
    active, problems = ActiveFaults.of(faults), []
    for seed in seeds:
        recorder = ReceiptRecorder(spec, expected_phases=(phase,), num_layers=3, num_norms=7, num_steps=4, num_epochs=1)
        sigmas = dict.fromkeys(range(3), sigma) if sigma else None
        key = NoiseKey(seed=seed, step=2, rank=1)
        with torch.no_grad(), phase_noise(model, spec, phase, key, recorder, faults=active, hidden_sigmas=sigmas):
            handle = model.model.layers[2].register_forward_hook(hook) if hook else None
            cache = model(IDS, use_cache=True).past_key_values
            model(IDS[:, :1], past_key_values=cache)
            model(IDS[:, :1], past_key_values=cache)
        if handle:
            handle.remove()
        problems += [line for line in recorder.receipt().mismatches if " of layer " in line]
    return problems


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threshold", ["dynamic", "cached"])
def test_every_fault_at_every_site_is_as_expected(make_model, dtype, threshold):
    """A type per site, and another one in each turn: over the five turns, every type is at every site."""
    model = make_model().to(dtype)
    for turn in range(5):
        faults = [
            Fault(
                type=TYPES[(number + turn) % 5],
                layer=number % 3,
                magnitude=0.3,
                site=site,
                threshold=threshold,
                sparsity=0.3 if (number + turn) % 2 else 1.0,
                seed=number,
            )
            for number, site in enumerate(SITES)
        ]
        assert found(model, *faults) == [], faults


@pytest.mark.parametrize("threshold", ["dynamic", "cached"])
@pytest.mark.parametrize("kind", TYPES)
def test_faults_before_and_behind_noise_are_as_expected(model, kind, threshold):
    """A layer for each order."""
    faults = [
        Fault(type=kind, layer=layer, magnitude=0.3, order=order, threshold=threshold)
        for layer, order in enumerate(("after_noise", "before_noise", "around_noise"))
    ]
    assert found(model, *faults, sigma=0.2) == []
    assert found(model, *faults) == []


def test_several_faults_on_modules_with_noise_are_as_expected(model):
    noise = ModuleNoise(modules=("*.k_proj",), error=RelativeGaussian(scale=0.1), point="output", phases=("rollout",))
    faults = [
        Fault(type="noise", layer=0, magnitude=0.2, site="k_proj"),
        Fault(type="bias", layer=1, magnitude=0.2, site="k_proj"),
        Fault(type="dead_zone", layer=1, magnitude=0.1),
        Fault(type="noise", layer=1, magnitude=0.1, order="before_noise"),
        Fault(type="saturation", layer=1, magnitude=0.2, order="around_noise"),
    ]
    assert found(model, *faults, module_noise=noise) == []
    assert found(model, *faults, sigma=0.1) == []


@pytest.mark.parametrize("dtype", [DTYPES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in DTYPES[1:])])
@pytest.mark.parametrize("first", ["noise", "bias", "saturation"])
@pytest.mark.parametrize("last", ["saturation", "dead_zone", "noise"])
def test_of_several_faults_at_one_site_each_is_proven(make_model, monkeypatch, first, last, dtype):
    model = make_model().to(dtype)
    faults = [Fault(type=kind, layer=1, magnitude=0.2, seed=seed) for seed, kind in enumerate((first, last))]
    assert found(model, *faults) == []
    apply = ActiveFault.apply
    for left_out in faults:
        monkeypatch.setattr(
            ActiveFault,
            "apply",
            lambda self, hidden, call, left_out=left_out: (
                hidden if self.fault is left_out else apply(self, hidden, call)
            ),
        )
        assert found(model, *faults, seeds=(0,))


def test_a_value_at_the_threshold_is_on_the_side_that_the_definition_says(model):
    """The threshold is one of the values, to the bit or nearly."""
    with torch.no_grad():
        values = model.model.layers[1].mlp(torch.ones(1, 1, 32)).abs().flatten().double()
    for value in values.sort().values[3:12]:
        ratio = float(value / values.max())
        for magnitude in (ratio, ratio * (1 + 1e-7), ratio * (1 - 1e-7)):
            fault = Fault(type="dead_zone", layer=1, magnitude=magnitude, site="mlp_output")
            assert found(model, fault, seeds=(0,)) == []


def _half(active, hidden, call, faulty):
    return torch.where(hidden.abs() < 0.5 * active.fault.magnitude * hidden.abs().max(), 0.0, hidden)


WRONG = {
    "nothing": lambda active, hidden, call, faulty: hidden,
    "half the size": lambda active, hidden, call, faulty: hidden + (faulty(call) - hidden) / 2,
    "half the threshold": _half,
    "other random numbers": lambda active, hidden, call, faulty: faulty(call + 1),
    "not in the last channels": lambda active, hidden, call, faulty: torch.cat(
        [faulty(call)[..., :16], hidden[..., 16:]], -1
    ),
    "a value that is no number": lambda active, hidden, call, faulty: torch.where(
        torch.arange(hidden.shape[-1]) == 5, torch.nan, faulty(call)
    ),
}
RANDOM = {"noise", "spike"}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("kind", TYPES)
def test_another_fault_than_the_requested_one_is_found(model, monkeypatch, kind, wrong):
    apply = ActiveFault.apply
    monkeypatch.setattr(
        ActiveFault,
        "apply",
        lambda self, hidden, call: WRONG[wrong](self, hidden, call, lambda other: apply(self, hidden, other)),
    )
    fault = Fault(type=kind, layer=1, magnitude=1.0 if kind == "spike" else 0.3)
    lines = found(model, fault, seeds=(0,))
    if wrong == "other random numbers" and kind not in RANDOM:
        assert lines == []
        return
    assert lines
    assert all(line.startswith("rollout: layer_output of layer 1: ") for line in lines)
    assert all(line.endswith(f"values are not those of a fault {kind} on what it computed") for line in lines)


def test_a_threshold_that_the_first_call_did_not_leave_is_found(model, monkeypatch):
    fault = DEAD_ZONE.model_copy(update={"threshold": "cached"})
    assert found(model, fault) == []
    monkeypatch.setattr(
        "aqnpipe.noise.injection.faults.fault_reference", lambda hidden, fault: hidden.detach().abs().max() / 2
    )
    assert found(model, fault)


def test_a_fault_on_the_wrong_side_of_the_noise_is_found(model, monkeypatch):
    monkeypatch.setattr(
        "aqnpipe.noise.injection.phase.FaultInjection._through",
        lambda self, site, hidden: self._apply(
            site, list(site.faults), 1, self.state.noised_hidden(site.layer, site.sigma, hidden), {}
        ),
    )
    assert found(model, DEAD_ZONE.model_copy(update={"order": "before_noise"}), sigma=0.3)


@pytest.mark.parametrize(
    ("hook", "is_found"),
    [
        (lambda module, args, output: output * 1.01, True),
        (lambda module, args, output: args[0], True),
        (lambda module, args, output: output[:1], True),
        (lambda module, args, output: output.mul_(1.01), True),
        (lambda module, args, output: output.clone(), False),
        (lambda module, args, output: output.view_as(output), False),
        (lambda module, args, output: None, False),
    ],
)
def test_a_hook_that_replaces_a_layers_output_is_found(model, hook, is_found):
    lines = found(model, seeds=(0,), hook=hook)
    assert bool(lines) == is_found
    assert all("layer_output of layer 2" in line for line in lines)
    assert bool(found(model, DEAD_ZONE, seeds=(0,), hook=hook)) == is_found


def test_a_site_that_is_not_called_proves_no_fault(model):
    """The MLP's projections are computed by other code: the module of the site is passed by."""
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda hidden: torch.nn.functional.linear(hidden, mlp.down_proj.weight @ mlp.up_proj.weight)
    lines = found(model, Fault(type="bias", layer=1, magnitude=0.3, site="up_proj"), seeds=(0,))
    assert "rollout: up_proj of layer 1 was not computed again, and its fault not proven" in lines
