"""Code digests: what a stage depends on changes its digest, and nothing else does. Costs of jobs."""

import ast
import re
import shutil
from pathlib import Path

import pytest

import aqnpipe
from aqnpipe.artifacts.provenance import code_digest, code_of, dependencies, versions
from aqnpipe.artifacts.runs import Cost, read_cost
from aqnpipe.errors import DataError

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


SOURCE = '''
"""What the module is for."""

LIMIT = 3
"""Of what."""
WORDS = "a # b"  # why
TEXT = f"{LIMIT} # {WORDS}"
BYTES = b"#1"
LINES = """
one

two # three
"""


class Settings:
    """Settings."""

    def text(self):
        """Return a text."""
        # Why it is so.
        if WORDS:
            print(WORDS)
        return "é", "#", LINES
'''


@pytest.mark.parametrize(
    "edit",
    [
        ("What the module is for.", "Something else\n\n    with an example: # and so on."),
        ('"""What the module is for."""\n', ""),
        ('"""Of what."""\n', ""),
        ("  # why", ""),
        ("  # why", "  # because 'it' is \"so"),
        ("        # Why it is so.\n", "\n\n\n"),
        ('"""Return a text."""', '"""Return the text, é.\n\n        Raises nothing.\n        """'),
        ("if WORDS:\n", "if WORDS:   \n\n            # a comment\n    # with less indentation\n"),
        ("class Settings:\n", "class Settings:  # data\n\n"),
        ('"#", LINES', '"#", LINES  # é, "'),
        ("\n", "\r\n"),
    ],
)
def test_comments_and_docstrings_do_not_count(package, edit):
    path = package / "deep.py"
    path.write_bytes(SOURCE.replace('"""\none\n\ntwo # three\n"""', '"one"').encode())
    before = code_digest("pkg.stage", package)
    edited = path.read_text().replace(*edit)
    assert edited != path.read_text()
    path.write_bytes(edited.encode())
    assert code_digest("pkg.stage", package) == before


@pytest.mark.parametrize(
    "edit",
    [
        ("a # b", "a # c"),
        ("{LIMIT} # {WORDS}", "{LIMIT} # {LIMIT}"),
        ("{LIMIT} # {WORDS}", "{LIMIT} #"),
        ('b"#1"', 'b"#2"'),
        ("one\n\ntwo", "one\ntwo"),
        ("two # three", "two"),
        ("LIMIT = 3", "LIMIT = 4"),
        ("LIMIT = 3", "# LIMIT = 3"),
        ('"""Return a text."""', 'return """Return a text."""'),
        ("        return", "            return"),
        ('"é", "#"', '"é"  # , "#"'),
        ('"""Of what."""', "WORDS = 1"),
    ],
)
def test_what_the_code_does_counts(package, edit):
    path = package / "deep.py"
    path.write_text(SOURCE)
    before = code_digest("pkg.stage", package)
    assert SOURCE.replace(*edit) != SOURCE
    path.write_text(SOURCE.replace(*edit))
    assert code_digest("pkg.stage", package) != before


def _tree(source):
    """The parsed source without docstrings, as plain data."""
    for node in ast.walk(tree := ast.parse(source)):
        for name, value in ast.iter_fields(node):
            if isinstance(value, list):
                kept = [
                    item for item in value if not (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant))
                ]
                setattr(node, name, kept)
    return ast.dump(tree)


@pytest.mark.parametrize("path", sorted((PACKAGE / "artifacts").glob("*.py")), ids=lambda path: path.stem)
def test_code_without_comments_does_the_same(path):
    code = code_of(path)
    assert _tree(code) == _tree(path.read_bytes())
    assert len(code) < path.stat().st_size


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


@pytest.mark.parametrize("stage", STAGES)
def test_no_stage_reads_docstrings_or_sources(stage):
    """These would then do something, and the digests leave them out."""
    readers = re.compile(r"__doc__|getdoc|getcomments|getsource|use_attribute_docstrings|f_lineno|co_firstlineno")
    for path in dependencies(stage).values():
        assert not readers.search(path.read_text(encoding="utf-8")), path


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


HEADER = "s\tmax_rss\tcpu_time\n"


def test_the_costs_of_a_job_are_read(tmp_path):
    path = tmp_path / "job.tsv"
    path.write_text(HEADER + "27.54\t640.19\t12.23\n")
    assert read_cost(path) == Cost(27.54, 12.23, 640.19)
    assert read_cost(tmp_path / "none.tsv") is None


@pytest.mark.parametrize("text", ["", HEADER, "x\ty\n1\t2\n", HEADER + "fast\n", HEADER + "1\tNA\t2\n"])
def test_a_file_of_another_kind_is_refused(tmp_path, text):
    path = tmp_path / "job.tsv"
    path.write_text(text)
    with pytest.raises(DataError, match=r"job\.tsv: expected columns s, cpu_time and max_rss"):
        read_cost(path)
