"""Rows decoded together have the logits that each has alone, in families that differ in positions, masks and caches."""

import pytest
import torch
from decoder_families import FAMILIES, tiny_model_of

from aqnpipe.errors import ModelError
from aqnpipe.generation.transformers_backend import BufferPool, decode
from aqnpipe.models.layout import decoder_layers

SPECIAL = [
    *[
        (family, "eager")
        for family in ("bloom", "mpt", "falcon with ALiBi", "gpt2", "gemma3_text", "llama4_text", "opt")
    ],
    *[(family, "sdpa") for family in ("falcon", "falcon with ALiBi", "doge", "mistral", "gpt_neox", "cohere2")],
]


def decoded_logits(model, prompts):
    """Responses, and the logits of their tokens by row. Rows whose first token is even end after three tokens."""
    logits_of = {row: [] for row in range(len(prompts))}

    def choose(logits, rows):
        for row, values in zip(rows, logits, strict=True):
            logits_of[row].append(values)
        return logits.argmax(dim=-1)

    responses = decode(
        model,
        prompts,
        choose,
        is_finished=lambda response: len(response) >= 3 and response[0] % 2 == 0,
        padding_token=0,
        limit=6,
        pool=BufferPool(),
    )
    return responses, logits_of


def largest_difference(family, attention):
    """Largest difference of logits from those of one forward per row and token, as a share of the largest logit."""
    model = tiny_model_of(family, attention)
    decoder_layers(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)  # so that attention is far from uniform
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 60, (length,), generator=generator).tolist() for length in (12, 9, 12, 5)]
    responses, logits_of = decoded_logits(model, prompts)
    differences = []
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        for place in range(len(response)):
            with torch.no_grad():
                alone = model(input_ids=torch.tensor([prompt + response[:place]])).logits[0, -1]
            differences.append((alone - logits_of[row][place]).abs().max() / alone.abs().max())
    return float(max(differences))


@pytest.mark.parametrize(("family", "attention"), SPECIAL)
def test_a_row_has_the_logits_that_it_has_alone(family, attention):
    assert largest_difference(family, attention) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_every_supported_family_decodes_as_alone(attention):
    wrong, tried = [], 0
    for family in FAMILIES:
        if attention == "sdpa" and not tiny_model_of(family)._supports_sdpa:
            continue
        try:
            difference = largest_difference(family, attention)
        except ModelError:
            continue  # a family that is not supported
        tried += 1
        if difference >= 1e-4:
            wrong.append((family, difference))
    assert wrong == []
    assert tried > 50
