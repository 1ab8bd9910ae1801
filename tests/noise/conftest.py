"""Prompts for the small random model of the tests."""

import pytest
import torch


@pytest.fixture
def ids():
    """Two prompts of nine tokens."""
    return torch.randint(5, 60, (2, 9), generator=torch.Generator().manual_seed(0))
