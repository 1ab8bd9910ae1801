"""How errors of other libraries are shown."""

import pytest

from aqnpipe.errors import first_line


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("\n wrong value \nand why"), "wrong value"),
        (RuntimeError("one line"), "one line"),
        (TimeoutError(), "TimeoutError"),
        (OSError(" \n "), "OSError"),
        (
            ValueError("Validation error for field 'x':\n    evil is no choice\n more"),
            "Validation error for field 'x': evil is no choice",
        ),
    ],
)
def test_the_first_line_or_the_type_of_a_silent_error(error, expected):
    assert first_line(error) == expected
