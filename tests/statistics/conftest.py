"""The made-up study lives beside the report's tests; both use it."""

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def synthetic():
    """The module that makes up studies and their artifacts."""
    name = "synthetic_study"
    if name not in sys.modules:
        path = Path(__file__).parents[1] / "report" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
