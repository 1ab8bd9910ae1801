"""Whether a diagnosis changed anything: sigmas of guided arms against uniform AQN and against a healthy machine."""

from collections.abc import Iterator, Mapping, Sequence

from aqnpipe.artifacts.diagnoses import SigmaFile
from aqnpipe.config.arm import Arm
from aqnpipe.report.inputs import Diagnosis
from aqnpipe.report.words import Words


def guidance_sentences(arms: Mapping[str, Arm], diagnoses: Sequence[Diagnosis], words: Words) -> list[str]:
    """Return a sentence per arm with sigmas from one of `diagnoses` of a model: what the diagnosis changed.

    Without a diagnosis every layer would have the base sigma. Where the machine has simulated faults and a machine
    without them was diagnosed too, the sigmas of both are compared; otherwise nothing can be said about the faults.
    """
    return [sentence for name, arm in arms.items() for sentence in _sentences(name, arm, diagnoses, words)]


def _sentences(name: str, arm: Arm, diagnoses: Sequence[Diagnosis], words: Words) -> Iterator[str]:
    if arm.aqn is None:
        return
    strategy, machine = arm.aqn.layer_sigmas_strategy, arm.aqn.layer_sigmas_from
    own = next((d for d in diagnoses if (d.model, d.machine) == (arm.model, machine)), None)
    if own is None or strategy not in own.strategies:
        return
    sigmas, rule = own.strategies[strategy], strategy.replace("_", " ")
    if _is_uniform(sigmas):
        yield words("guidance.uniform", arm=name, machine=machine, strategy=rule)
        return
    healthy = next((d for d in diagnoses if _is_healthy_twin(d, own) and strategy in d.strategies), None)
    if not own.verdict.simulated_faults or healthy is None:
        return
    changed = _changed_layers(sigmas, healthy.strategies[strategy])
    if not changed:
        yield words("guidance.same_as_healthy", arm=name, machine=machine, strategy=rule, healthy=healthy.machine)
        return
    yield words(
        "guidance.changed",
        arm=name,
        machine=machine,
        strategy=rule,
        healthy=healthy.machine,
        layers=", ".join(map(str, changed)),
        num_layers=len(sigmas.aqn.layer_sigmas),
    )


def _is_healthy_twin(diagnosis: Diagnosis, faulty: Diagnosis) -> bool:
    """Whether a diagnosis is of the same model on the same device, without simulated faults."""
    is_same = (diagnosis.model, diagnosis.device) == (faulty.model, faulty.device)
    return is_same and not diagnosis.verdict.simulated_faults


def _is_uniform(sigmas: SigmaFile) -> bool:
    return set(sigmas.aqn.layer_sigmas.values()) == {sigmas.aqn.base_sigma}


def _changed_layers(sigmas: SigmaFile, healthy: SigmaFile) -> list[int]:
    """Return the layers whose sigma differs between the two machines."""
    without = healthy.aqn.layer_sigmas
    return [layer for layer, sigma in sorted(sigmas.aqn.layer_sigmas.items()) if sigma != without.get(layer)]
