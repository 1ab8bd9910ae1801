"""A file of published figures with wrong ids is refused with a message that can be printed."""

import pytest
from pydantic import ValidationError

from aqnpipe.config.published import PublishedFile

ACCURACY = {"label": "ours", "percent": "70.0", "num_questions": 100}
HALF_A_SURROGATE_PAIR = "\ud800"


@pytest.mark.parametrize(
    ("accuracies", "series"),
    [
        ([HALF_A_SURROGATE_PAIR], {"id": "s", "accuracies": ["a", "b"]}),
        (["a", "b"], {"id": HALF_A_SURROGATE_PAIR, "accuracies": ["a", "c"]}),
        ([HALF_A_SURROGATE_PAIR] * 2, None),
    ],
)
def test_ids_that_cannot_be_encoded_are_shown_escaped(accuracies, series):
    content = {
        "title": "Paper",
        "source": "nowhere",
        "accuracies": [ACCURACY | {"id": name} for name in accuracies],
        "series": [series | {"label": "levels"}] if series else [],
    }
    with pytest.raises(ValidationError, match=r"'\\ud800'"):
        PublishedFile.model_validate(content)
