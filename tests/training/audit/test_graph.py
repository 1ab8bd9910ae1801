"""Terms of the loss that have no gradient at the logits are found in its graph."""

import pytest
import torch

from aqnpipe.training.audit.scoring import reaches_around


@pytest.mark.parametrize(
    ("term", "expected"),
    [
        (lambda weights, hidden, logits: 0.0, False),
        (lambda weights, hidden, logits: logits.square().sum(), False),
        (lambda weights, hidden, logits: weights.detach().square().sum(), False),
        (lambda weights, hidden, logits: 1e-3 * weights.square().sum(), True),
        (lambda weights, hidden, logits: hidden.mean(), True),
    ],
)
def test_only_terms_that_bypass_the_logits_are_found(term, expected):
    weights = torch.randn(3, 3, requires_grad=True)
    hidden = torch.randn(2, 3) @ weights
    logits = hidden.tanh() @ weights
    loss = logits.log_softmax(-1)[:, 0].mean() + term(weights, hidden, logits)
    assert reaches_around(loss, logits) is expected
