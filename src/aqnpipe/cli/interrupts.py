"""Ctrl-C while libraries are imported: the process ends, without a traceback through them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from signal import SIGINT, default_int_handler, getsignal, signal
from threading import current_thread, main_thread

EXIT_INTERRUPTED = 128 + SIGINT


@contextmanager
def interrupts_end_at_once() -> Iterator[None]:
    """End the process at a SIGINT in the body. An exception would not do: callbacks of imports print it and go on."""
    # Other programs import the commands too, in threads and with handlers of their own.
    is_ours = current_thread() is main_thread() and getsignal(SIGINT) is default_int_handler
    if is_ours:
        signal(SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    yield
    if is_ours:
        signal(SIGINT, default_int_handler)
