"""The import graph: stages hand each other artifacts and never import each other."""

import ast
from pathlib import Path

import pytest

import aqnpipe

ROOT = Path(aqnpipe.__file__).parent
STAGES = ("diagnosis", "training", "evaluation", "statistics", "report")


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def package_imports(package):
    return {name for path in (ROOT / package).rglob("*.py") for name in imports_of(path)}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_no_other_stage(stage):
    others = {f"aqnpipe.{other}" for other in STAGES if other != stage}
    assert not {name for name in package_imports(stage) if name.startswith(tuple(others))}


@pytest.mark.parametrize("package", ["noise", "generation", "data", "models", "config"])
def test_what_stages_stand_on_imports_no_stage(package):
    assert not {name for name in package_imports(package) if name.startswith(tuple(f"aqnpipe.{s}" for s in STAGES))}


def test_nothing_in_the_package_catches_everything():
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                pytest.fail(f"{path}:{node.lineno} catches everything")


def test_device_backends_are_reached_through_one_module():
    # The kernels for CUDA are written for it.
    allowed = {"device.py", "gaussian_cuda.py", "gemm_cuda.py"}
    for path in ROOT.rglob("*.py"):
        if path.name in allowed:
            continue
        names = {ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not names & {"torch.cuda", "torch.npu"}, path
        assert "torch_npu" not in set(imports_of(path)), path
