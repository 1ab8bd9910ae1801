"""What most small training runs start from."""

import pytest
from tiny_training import teach, write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, make_model):
    """Model, tokenizer and eight problems; a module that needs others has a fixture of its own by this name."""
    return write_inputs(tmp_path_factory.mktemp("inputs"), make_model)


@pytest.fixture
def rewards_that_teach(monkeypatch):
    """Rewards that differ within groups, because the random model solves nothing."""
    teach(monkeypatch)
