"""Import rules: which room may import which. What decides a byte of a result imports nothing that runs it."""

import ast
import collections
import graphlib
import re
from pathlib import Path

import pytest

import aqnpipe
from aqnpipe.artifacts.provenance import dependencies

ROOT = Path(aqnpipe.__file__).parent

LEAVES = frozenset({"errors", "seeding", "device", "error_bounds"})
FOUNDATION = LEAVES | {"config", "artifacts"}
MODELLING = FOUNDATION | {"data", "models", "noise.schedule", "noise.control_layers", "noise.receipts"}
COMPUTING = MODELLING | {"machine", "proof", "noise", "noise.injection", "noise.kernels", "generation"}
AUDITED = COMPUTING | {"reference"}

MAY_IMPORT: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "seeding": frozenset(),
    "device": frozenset({"errors"}),
    "shipped": frozenset(),
    "error_bounds": frozenset(),
    "config": LEAVES,
    "artifacts": LEAVES | {"config"},
    "data": FOUNDATION,
    "models": FOUNDATION | {"data"},
    "statistics": LEAVES,
    "noise.schedule": frozenset({"config", "errors"}),
    "noise.control_layers": LEAVES,
    "noise.kernels": LEAVES | {"config"},
    "noise.receipts": FOUNDATION | {"models", "noise.schedule"},
    "noise.injection": FOUNDATION | {"machine", "proof", "models", "noise.kernels", "noise.receipts"},
    # A simulated machine, and the proof of what it did, which shares no code with it and has keys of its own.
    "machine": FOUNDATION | {"models", "noise.kernels"},
    "proof": (FOUNDATION - {"seeding"}) | {"models", "noise.receipts"},
    "noise": FOUNDATION
    | {
        "machine",
        "proof",
        "models",
        "noise.schedule",
        "noise.control_layers",
        "noise.kernels",
        "noise.receipts",
        "noise.injection",
    },
    "generation": COMPUTING - {"generation"},
    # What a trainer and a decoder must do, written a second time; knows neither of them.
    "reference": FOUNDATION,
    # The stages: they hand each other artifacts and import no other stage.
    "diagnosis": COMPUTING,
    "training": AUDITED,
    "evaluation": AUDITED | {"integrations"},
    "parity": COMPUTING,
    "loss_study": COMPUTING | {"statistics"},
    "comparison": MODELLING | {"statistics"},
    "published": FOUNDATION | {"statistics"},
    # The report's text on a method states the constants of the test.
    "report": MODELLING | {"statistics"},
    # What other programs load.
    "integrations": COMPUTING,
    # What runs them.
    "runtime": COMPUTING | {"training", "evaluation"},
    "cli": COMPUTING
    | {
        "proof",
        "shipped",
        "integrations",
        "statistics",
        "diagnosis",
        "comparison",
        "published",
        "loss_study",
        "report",
        "runtime",
        "training",
        "evaluation",
        "parity",
    },
}
STAGES = ("diagnosis", "training", "evaluation", "loss_study", "comparison", "published", "parity", "report")


def room_of(parts: tuple[str, ...]) -> str:
    """Return the room of a module, given as the parts of its name below the package."""
    within_noise = ".".join(parts[:2])
    return within_noise if within_noise in MAY_IMPORT else parts[0]


def imports_of(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def rooms_imported_by(path: Path) -> set[str]:
    return {room_of(tuple(name.split(".")[1:])) for name in imports_of(path) if name.startswith(f"{ROOT.name}.")}


SOURCES = [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_its_room_may(path):
    room = room_of(path.relative_to(ROOT).with_suffix("").parts)
    assert room in MAY_IMPORT, f"{room} is no known room: add it with what it may import"
    assert rooms_imported_by(path) <= MAY_IMPORT[room] | {room}


def test_the_rules_name_existing_rooms_and_allow_no_cycle():
    assert {room_of(path.relative_to(ROOT).with_suffix("").parts) for path in SOURCES} == set(MAY_IMPORT)
    assert set().union(*MAY_IMPORT.values()) <= set(MAY_IMPORT)
    assert list(graphlib.TopologicalSorter(MAY_IMPORT).static_order())
    for stage in STAGES:
        assert not MAY_IMPORT[stage] & set(STAGES), "stages hand each other artifacts and import no other stage"


@pytest.mark.parametrize("stage", STAGES)
def test_what_decides_bytes_reaches_nothing_that_merely_runs_it(stage):
    reached = {name for path in (ROOT / stage).rglob("*.py") for name in dependencies(_module(path))}
    assert not {name for name in reached if name.startswith(("aqnpipe.runtime", "aqnpipe.cli"))}


def test_tests_mirror_the_rooms():
    tests = Path(__file__).parent
    rooms = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms <= {path.name for path in tests.iterdir()}
    assert {"injection", "kernels", "receipts"} <= {path.name for path in (tests / "noise").iterdir()}


def test_nothing_in_the_package_catches_everything():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                pytest.fail(f"{path}:{node.lineno} catches everything")


def test_device_backends_are_reached_through_one_module():
    # The kernel for CUDA is written for it.
    allowed = {"device.py", "gaussian_cuda.py"}
    for path in SOURCES:
        if path.name in allowed:
            continue
        names = {ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not names & {"torch.cuda", "torch.npu"}, path
        assert "torch_npu" not in set(imports_of(path)), path


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PAGE = (ROOT.parents[1] / "docs" / "architecture.md").read_text().partition("## Size")[2]


@pytest.mark.parametrize(("package", "most"), re.findall(r"^\| `(\w+)` \| ([\d,]+) \|$", PAGE, re.MULTILINE))
def test_a_package_has_no_more_lines_than_the_page_allows(package, most):
    lines = sum(len(path.read_text().splitlines()) for path in (ROOT / package).rglob("*.py"))
    assert 0 < lines <= int(most.replace(",", ""))


def test_every_package_has_a_bound_and_no_folder_more_modules_than_the_page_allows():
    modules = collections.Counter(str(path.parent.relative_to(ROOT)) for path in SOURCES)
    packages = {folder.split("/")[0] for folder in modules} - {".", "shipped"}
    assert packages == set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
    most = {folder: int(count) for folder, count in re.findall(r"`([\w/]+)` \((\d+)\)", PAGE)}
    usual = int(re.search(r"on its modules: (\d+)", PAGE)[1])
    assert {folder: count for folder, count in modules.items() if count > most.get(folder, usual)} == {}
