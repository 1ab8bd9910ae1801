"""The documentation site: it builds without a warning, and its generated pages have what they are generated from."""

import importlib.util
import inspect
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "site"
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "RUNNING.md", "docs", "config", "benchmarks", "examples")
needs_sphinx = pytest.mark.skipif(
    importlib.util.find_spec("myst_parser") is None, reason="needs Sphinx: pip install 'aqnpipe[docs]'"
)


@pytest.fixture(scope="module")
def generated():
    spec = importlib.util.spec_from_file_location("generated_pages", SITE / "generated_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def sources(tmp_path):
    """A copy of all that pages link to, to build from and to break."""
    for name in ("src", "tests", "workflow", "profiles", "Snakefile", "Makefile", "LICENSE", "CITATION.cff"):
        (tmp_path / name).symlink_to(ROOT / name)
    for path in ROOT.iterdir():
        if path.name.startswith("constraints") or path.name == "pyproject.toml":
            (tmp_path / path.name).symlink_to(path)
    for name in PAGES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    return tmp_path


def build(sources: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs/site", ".", "site"],
        cwd=sources,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@needs_sphinx
@pytest.mark.slow
def test_the_site_builds_and_a_dead_link_is_an_error(sources):
    done = build(sources)
    assert done.returncode == 0, done.stderr
    site = sources / "site"
    assert 'url=docs/site/index.html"' in (site / "index.html").read_text()
    assert "fully_shard" in (site / "docs/site/generated/examples.html").read_text()
    assert "learning_rate" in (site / "docs/site/generated/study-keys.html").read_text()
    assert "receipt.check()" in (site / "docs/how-to/noise-in-your-own-code.html").read_text().replace("<span>", "")
    assert "recomputed" in (site / "docs/site/python.html").read_text()
    assert "saturation of magnitude 0.30" in (site / "docs/site/generated/node_health.html").read_text()
    assert (
        f"aqnpipe {tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['version']}</title>"
        in (site / "docs/gallery.html").read_text()
    )
    with (sources / "README.md").open("a") as page:
        page.write("\n[gone](docs/gone.md) and [no such heading](docs/scorers.md#nowhere)\n")
    done = build(sources)
    assert done.returncode != 0
    assert "docs/gone" in done.stderr
    assert "nowhere" in done.stderr


def test_every_key_of_a_study_is_on_its_page(generated):
    import json

    from aqnpipe.config.schema import study_schema

    schema = json.loads(study_schema())
    page = generated.study_keys(schema)
    for name, model in schema["$defs"].items():
        for key in model.get("properties", {}):
            assert f"| `{key}` |" in page.partition(f"\n## {name}\n")[2].partition("\n## ")[0], (name, key)


def test_the_reference_has_everything_public_and_every_error_model_and_schedule():
    from typing import get_args

    import aqnpipe
    from aqnpipe.config.custom_code import CustomSchedule
    from aqnpipe.config.noise import ErrorModel, Schedule

    page = (SITE / "python.md").read_text()
    assert {name for name in aqnpipe._PUBLIC if f"## aqnpipe.{name}\n" in page} == set(aqnpipe._PUBLIC)
    # Schedules of a user's own need a study.
    for model in (*get_args(ErrorModel), *({*get_args(get_args(Schedule)[0])} - {CustomSchedule})):
        assert f".. autoclass:: {model.__module__}.{model.__qualname__}\n" in page


def test_types_are_in_words(generated):
    defs = {
        "Arm": {
            "properties": {"sigma": {"type": "number", "exclusiveMinimum": 0, "maximum": 1}},
            "required": ["sigma"],
        },
        "Name": {"type": "string"},
    }
    study = {
        "properties": {
            "arms": {"type": "array", "items": {"$ref": "#/$defs/Arm"}, "default": [], "description": "a | b"},
            "label": {"anyOf": [{"$ref": "#/$defs/Name"}, {"type": "null"}], "default": None},
            "kind": {"enum": ["one", "two"]},
        },
        "required": ["kind"],
    }
    page = generated.study_keys({"$defs": defs | {"StudyConfig": study}})
    assert "| `arms` | list of [Arm](#arm) | `[]` | a \\| b |" in page
    assert "| `label` | string or null | `null` |  |" in page
    assert "| `kind` | `one` or `two` | required |  |" in page
    assert "| `sigma` | number > 0, ≤ 1 | required |  |" in page
    assert page.index("## StudyConfig") < page.index("## Arm")


@needs_sphinx
def test_every_argument_of_the_reference_is_described():
    from typing import get_args

    import aqnpipe
    from aqnpipe.config.noise import ErrorModel, Schedule
    from aqnpipe.integrations.lm_harness import NoisyLM
    from aqnpipe.statistics.compare import PairedDifference

    spec = importlib.util.spec_from_file_location("arguments", SITE / "arguments.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    public = [getattr(aqnpipe, name) for name in aqnpipe._PUBLIC]
    models = [*get_args(ErrorModel), *get_args(get_args(Schedule)[0])]
    for each in (*public, *models, NoisyLM, PairedDifference):
        assert module.undescribed(each) == set(), each

    def forgetful(known: int, unknown: int) -> None:
        """Do it.

        - known: an argument,
          on two lines.
        - other: no argument.
        """

    assert module.undescribed(forgetful) == {"unknown"}
    lines = inspect.getdoc(forgetful).splitlines()
    module.describe_arguments(None, "function", "forgetful", forgetful, None, lines)
    assert ":param known: an argument, on two lines." in lines
    assert ":type known: int" in lines
    assert "- other: no argument." in lines
