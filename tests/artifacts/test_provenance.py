"""Code digests: what a stage depends on changes its digest, and nothing else does."""

import re
import shutil
from pathlib import Path

import pytest

import aqnpipe
from aqnpipe.artifacts.provenance import code_digest, dependencies, versions

PACKAGE = Path(aqnpipe.__file__).parent
RULES = Path(__file__).parents[2] / "workflow" / "rules"
STAGES = sorted(
    {
        module
        for rules in RULES.glob("*.smk")
        for module in re.findall(r'code_digest\("([\w.]+)"\)', rules.read_text(encoding="utf-8"))
    }
)


@pytest.fixture
def package(tmp_path):
    """A small package: stage -> sub.helper -> deep, and a module that nothing needs."""
    folder = tmp_path / "pkg"
    (folder / "sub").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "sub" / "__init__.py").write_text("")
    (folder / "stage.py").write_text("from pkg.sub import helper\nimport os\n")
    (folder / "sub" / "helper.py").write_text("from pkg.deep import value\n")
    (folder / "deep.py").write_text("value = 1\n")
    (folder / "unrelated.py").write_text("")
    return folder


@pytest.fixture(scope="module")
def copied_package(tmp_path_factory):
    """The sources of this package in another folder, to be edited."""
    folder = tmp_path_factory.mktemp("sources") / "aqnpipe"
    shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("__pycache__", "weights"))
    return folder


def test_digest_follows_imports_and_nothing_else(package):
    before = code_digest("pkg.stage", package)
    (package / "unrelated.py").write_text("edited = True\n")
    assert code_digest("pkg.stage", package) == before
    (package / "deep.py").write_text("value = 2\n")
    assert code_digest("pkg.stage", package) != before


def test_templates_beside_a_module_count_as_its_source(package):
    before = code_digest("pkg.stage", package)
    (package / "sub" / "templates").mkdir()
    (package / "sub" / "templates" / "page.html").write_text("<p>")
    assert code_digest("pkg.stage", package) != before


@pytest.mark.parametrize("named", ["pkg.unrelated", "pkg.unrelated:Class"])
def test_a_module_named_by_a_string_is_in_the_digest(package, named):
    (package / "deep.py").write_text(f"PLUGIN = {named!r}\n")
    assert "pkg.unrelated" in dependencies("pkg.stage", package)
    before = code_digest("pkg.stage", package)
    (package / "unrelated.py").write_text("class Class: ...\n")
    assert code_digest("pkg.stage", package) != before


def test_a_module_named_in_a_sentence_is_no_dependency(package):
    (package / "deep.py").write_text('"""Not at all like pkg.unrelated."""\n')
    assert "pkg.unrelated" not in dependencies("pkg.stage", package)


@pytest.mark.parametrize("named", ["pkg.missing", "pkg.missing:Class", "pkg.sub.gone"])
def test_a_string_that_names_a_missing_module_is_an_error(package, named):
    (package / "deep.py").write_text(f"value = 1\nPLUGIN = {named!r}\n")
    with pytest.raises(ModuleNotFoundError, match=rf"deep\.py:2: '{named}'"):
        code_digest("pkg.stage", package)


@pytest.mark.parametrize("module", ["pkg.missing", "pkg.sub.missing", "other.stage", "aqnpipe.training.stage"])
def test_an_unknown_module_is_an_error(package, module):
    with pytest.raises(ModuleNotFoundError, match=f"no module {module}"):
        code_digest(module, package)


def test_an_unknown_module_of_this_package_is_an_error():
    with pytest.raises(ModuleNotFoundError, match=r"no module aqnpipe\.training\.stages"):
        code_digest("aqnpipe.training.stages")


def test_every_rule_that_runs_code_names_its_stage():
    assert {"aqnpipe.training.stage", "aqnpipe.evaluation.stage", "aqnpipe.comparison.stage"} <= set(STAGES)


def test_the_training_stage_depends_on_the_noise_but_not_on_the_report():
    sources = dependencies("aqnpipe.training.stage")
    assert {"aqnpipe.machine.operators", "aqnpipe.noise.aqn", "aqnpipe.data.scoring"} <= set(sources)
    assert not {name for name in sources if name.startswith(("aqnpipe.report", "aqnpipe.statistics"))}


@pytest.mark.parametrize("stage", ["aqnpipe.training.stage", "aqnpipe.evaluation.stage"])
def test_the_stop_processor_that_vllm_loads_by_name_is_in_the_digests(stage):
    path = PACKAGE / "generation" / "vllm" / "stop_processor.py"
    assert dependencies(stage)["aqnpipe.generation.vllm.stop_processor"] == path


@pytest.mark.parametrize("stage", STAGES)
def test_no_stage_depends_on_how_it_is_run(stage):
    """So an edit in runtime/ or cli/ repeats no stage."""
    for path in dependencies(stage).values():
        assert path.relative_to(PACKAGE).parts[0] not in ("runtime", "cli"), path


def test_an_edit_changes_the_digests_of_the_stages_that_need_the_file(copied_package):
    def digests():
        return {stage: code_digest(stage, copied_package) for stage in STAGES}

    before = digests()
    assert before == {stage: code_digest(stage) for stage in STAGES}
    for folder in ("runtime", "cli"):
        for path in (copied_package / folder).rglob("*.py"):
            path.write_text(path.read_text(encoding="utf-8") + "\nEDITED = True\n", encoding="utf-8")
    assert digests() == before
    path = copied_package / "noise" / "kernels" / "gaussian.py"
    path.write_text(path.read_text(encoding="utf-8") + "\nEDITED = True\n", encoding="utf-8")
    changed = {stage for stage, digest in digests().items() if digest != before[stage]}
    assert {"aqnpipe.training.stage", "aqnpipe.evaluation.stage"} <= changed
    assert not changed & {"aqnpipe.data.stage", "aqnpipe.comparison.stage", "aqnpipe.report.stage"}


def test_versions_name_what_decides_results():
    assert {"torch", "trl", "transformers"} <= set(versions())
