"""Signals that end a command at once, without a traceback through libraries or with what to do next."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from signal import SIG_DFL, SIGINT, Signals, default_int_handler, getsignal, signal
from threading import current_thread, main_thread

EXIT_INTERRUPTED = 128 + SIGINT


@contextmanager
def ends_at_once(number: Signals = SIGINT, text: str = "") -> Iterator[None]:
    """End the process at this signal in the body, behind `text` on standard error.

    An exception would not do while libraries are imported: callbacks of imports print it and go on.
    """
    usual = default_int_handler if number == SIGINT else SIG_DFL
    # Other programs import the commands too, in threads and with handlers of their own.
    is_ours = current_thread() is main_thread() and getsignal(number) is usual

    def end(*_: object) -> None:
        os.write(2, text.encode())
        os._exit(128 + number)

    if is_ours:
        signal(number, end)
    try:
        yield
    finally:
        if is_ours:
            signal(number, usual)
