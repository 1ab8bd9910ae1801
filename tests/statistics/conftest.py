"""Made-up evaluations, for tests that look at the whole stage."""

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def synthetic():
    """The module `synthetic_evaluations` beside this file (importlib mode puts no folder on the path)."""
    path = Path(__file__).with_name("synthetic_evaluations.py")
    spec = importlib.util.spec_from_file_location("synthetic_evaluations", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
