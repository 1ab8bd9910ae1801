"""A device that errs: a kernel of the CPU in whose result single bits are flipped."""

import warnings
from contextlib import contextmanager

import torch


@contextmanager
def erring(operator, is_wrong):
    """Replace the CPU's kernel of an operator; a call for which `is_wrong()` holds has a flipped bit in one value."""
    kernel = torch.library.get_kernel(f"aten::{operator}", "CPU")

    def run_kernel(keys, *args, **kwargs):
        result = kernel.call_boxed(keys, *args, **kwargs)
        if is_wrong():
            # Of the first sequence a token behind the padding.
            result.view(-1).view(torch.int32)[result.numel() * 3 // 16] ^= 1 << 20
        return result

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = torch.library.Library("aten", "IMPL")
        library.impl(operator, run_kernel, "CPU", with_keyset=True)
    try:
        yield
    finally:
        library._destroy()
