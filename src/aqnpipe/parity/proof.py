"""Proves, on random weights, that the operators found in a model compute what their names say.

Two layers of the model's configuration get random weights, gains and biases, so that no two operators and no missing
term can agree by chance. Every result must then be the one that its form gives, to the rounding of float32. A model
whose layers scale, cap or reorder something that is not described here fails, and is refused. So is one in which an
operator runs where it is not seen: it would be missing from the comparison.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from aqnpipe.errors import ModelError
from aqnpipe.parity.mapping import ModelMap
from aqnpipe.parity.recorder import Recorded, Recorder
from aqnpipe.parity.sample import batches_of, choose_sample
from aqnpipe.parity.taps import watch
from aqnpipe.seeding import keyed_generator

_LAYERS, _VOCABULARY, _TOKENS = 2, 512, 7
_SPREAD = 0.3


def prove(model: Any) -> tuple[ModelMap, dict[str, Recorded]]:
    """Return the map of `model`, and what a random model of its kind recorded for each operator of two layers.

    Raises ModelError, which names the first operator that computes something else.
    """
    small = _random_model(model.config)
    failures = []
    for interleaved in (False, True):
        recorded = _recorded(small, interleaved=interleaved)
        wrong = {name: found for name, found in recorded.items() if found.tally.loose > 1}
        if not wrong:
            return ModelMap(model, interleaved=interleaved), recorded
        failures.append(wrong)
    name, found = next(iter(min(failures, key=len).items()))
    raise ModelError(
        f"{type(model).__name__}: on random weights its {name} is not what parity takes it for (error "
        f"{found.tally.loose:.3g} times the bound of rounding), so the operators of this model cannot be mapped"
    )


def _random_model(config: Any) -> nn.Module:
    settings = copy.deepcopy(config)
    settings.num_hidden_layers = _LAYERS
    if getattr(settings, "layer_types", None):
        kinds = list(dict.fromkeys(settings.layer_types))[:_LAYERS]
        settings.layer_types = [kinds[index % len(kinds)] for index in range(_LAYERS)]
    settings.vocab_size = min(settings.vocab_size, _VOCABULARY)
    for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(settings, token, None)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        model: nn.Module = AutoModelForCausalLM.from_config(
            settings, dtype=torch.float32, attn_implementation=config._attn_implementation
        )
    generator = keyed_generator("cpu", 0, "parity.proof")
    for _, parameter in model.named_parameters():
        if parameter.ndim == 1:
            noise: Tensor = torch.randn(parameter.shape, generator=generator)
            parameter.data += _SPREAD * noise
    return model.eval()


def _recorded(model: Any, *, interleaved: bool) -> dict[str, Recorded]:
    generator = keyed_generator("cpu", 0, "parity.proof.tokens")
    shape = (2, _TOKENS)
    sequences = torch.randint(model.config.vocab_size, shape, generator=generator).tolist()
    sequences[1] = sequences[1][1:]
    sample = choose_sample([len(ids) for ids in sequences], 2 * _TOKENS)
    recorder = Recorder(sample)
    mapped = ModelMap(model, interleaved=interleaved)
    with torch.no_grad(), watch(mapped, recorder):
        for batch in batches_of(sequences, 2, "left"):
            cache = DynamicCache(config=model.config)
            for call in batch.calls(sample, 2, 0):
                recorder.begin(call)
                model(
                    input_ids=call.token_ids,
                    attention_mask=call.mask,
                    position_ids=call.positions,
                    past_key_values=cache,
                    use_cache=True,
                )
    recorded = recorder.finish()
    unseen = [operator.name for operator in mapped.operators if operator.name not in recorded]
    if unseen:
        raise ModelError(
            f"{type(model).__name__}: parity did not see {', '.join(unseen[:3])} run ({len(unseen)} operators in all), "
            "so it could not compare them"
        )
    return recorded
