"""Synthetic evaluations for tests of the whole stage."""

import pytest
import synthetic_evaluations


@pytest.fixture(scope="session")
def synthetic():
    """The module that generates studies and their evaluations."""
    return synthetic_evaluations
