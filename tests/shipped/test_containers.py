"""The container files copy what the package is built from."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTAINERS = sorted((ROOT / "containers").glob("*.Dockerfile"))


@pytest.mark.parametrize("file", CONTAINERS, ids=lambda path: path.stem)
def test_an_image_has_what_the_package_links_to(file):
    """Links to files that are not copied are silently left out of the package; `aqnpipe init` would fail."""
    linked = {path.resolve().name for path in (ROOT / "src" / "aqnpipe" / "shipped").iterdir() if path.is_symlink()}
    assert linked == {"Snakefile", "workflow", "config", "profiles"}
    text = file.read_text(encoding="utf-8")
    copied = {name for line in re.findall(r"(?m)^COPY (.*) \S+$", text) for name in line.split()}
    assert linked | {"src", "pyproject.toml", "README.md", "LICENSE"} <= copied
    assert text.rindex("COPY profiles") < text.index("RUN pip install")


@pytest.mark.parametrize("file", CONTAINERS, ids=lambda path: path.stem)
def test_an_image_installs_what_the_tests_of_kernels_need(file):
    """As `make setup` does on devices, for `aqnpipe doctor --try`."""
    extras = re.search(r"'\.\[(.*?)\]'", file.read_text(encoding="utf-8"))[1].split(",")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    on_devices = re.search(rf"(?m)^EXTRAS_{file.stem} := (\S+)$", makefile)
    assert {*on_devices[1].split(","), "check"} == set(extras)


def test_there_are_container_files():
    assert [path.stem for path in CONTAINERS] == ["cpu", "cuda"]
