"""docs/parity.md has a section for each environment; a run replaces its own and leaves the other, dated, as it was."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = ("tiny", "a and b", "rounding", "none", "1e-06", "1e-06", "4e-06", "0.0 %")


@pytest.fixture(scope="module")
def parity():
    """The benchmark as a module."""
    spec = importlib.util.spec_from_file_location("benchmark_parity", ROOT / "benchmarks" / "parity.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_run_replaces_its_own_section_and_keeps_the_other(parity):
    kept = parity.sections_in(parity.PAGE.read_text())
    assert list(kept) == ["transformers", "vLLM"]
    assert all("\nMeasured on 20" in section for section in kept.values())
    page = parity.page_of({**kept, "transformers": parity.section_of(parity.TRANSFORMERS, [ROW])})
    after = parity.sections_in(page)
    assert after["vLLM"] == kept["vLLM"]
    assert after["transformers"].splitlines()[-1] == f"| {' | '.join(ROW)} |"
    assert "tiny-large" not in after["transformers"]
    assert page.count("# Parity of the built-in models on a CPU\n") == 1
    assert parity.page_of(after) == page


def test_a_section_that_was_never_measured_is_missing(parity):
    assert list(parity.sections_in(parity.page_of({"vLLM": "## vLLM\n\nrows"}))) == ["vLLM"]
