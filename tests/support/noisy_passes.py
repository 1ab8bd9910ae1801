"""Forwards over prompts and over single tokens under noise."""

import torch
from on_modules import on_modules


def run(model, ids, error, **settings):
    """Return the receipt of a forward and a short generation with `error`, not checked."""
    with on_modules(model, error=error, **settings) as receipt, torch.no_grad():
        model(input_ids=ids)
        model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
    return receipt
