"""Made-up evaluations, for tests that look at the whole stage."""

import pytest
import synthetic_evaluations


@pytest.fixture(scope="session")
def synthetic():
    """The module that makes up studies and their evaluations."""
    return synthetic_evaluations
