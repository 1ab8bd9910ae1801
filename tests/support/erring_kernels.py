"""A device that errs: a kernel of the CPU whose results are changed, below everything that a program sees."""

import warnings
from contextlib import contextmanager

import torch


@contextmanager
def changed(operator, change):
    """Call `change(result)` on every result of the CPU's kernel of an operator; it changes the result in place."""
    kernel = torch.library.get_kernel(f"aten::{operator}", "CPU")

    def run_kernel(keys, *args, **kwargs):
        result = kernel.call_boxed(keys, *args, **kwargs)
        change(result)
        return result

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library = torch.library.Library("aten", "IMPL")
        library.impl(operator, run_kernel, "CPU", with_keyset=True)
    try:
        yield
    finally:
        library._destroy()


def erring(operator, is_wrong):
    """Flip a bit in one value of the results of an operator whose calls `is_wrong()` picks."""

    def flip(result):
        if is_wrong():
            # Of the first sequence a token behind the padding.
            result.view(-1).view(torch.int32)[result.numel() * 3 // 16] ^= 1 << 20

    return changed(operator, flip)
