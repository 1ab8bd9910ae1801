import aqnpipe.artifacts.provenance as provenance
from aqnpipe.artifacts.provenance import code_digest, versions


def test_digest_follows_imports_and_nothing_else(monkeypatch, tmp_path):
    package = tmp_path / "pkg"
    (package / "sub").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "sub" / "__init__.py").write_text("")
    (package / "stage.py").write_text("from pkg.sub import helper\nimport os\n")
    (package / "sub" / "helper.py").write_text("from pkg.deep import value\n")
    (package / "deep.py").write_text("value = 1\n")
    (package / "unrelated.py").write_text("")
    monkeypatch.setattr(provenance, "_PACKAGE_ROOT", package)
    before = code_digest("pkg.stage")
    (package / "unrelated.py").write_text("edited = True\n")
    assert code_digest("pkg.stage") == before
    (package / "deep.py").write_text("value = 2\n")
    assert code_digest("pkg.stage") != before


def test_the_training_stage_depends_on_the_noise_but_not_on_the_report():
    sources = provenance._reachable_sources("aqnpipe.training.stage")
    assert {"aqnpipe.noise.injection.operators", "aqnpipe.noise.aqn", "aqnpipe.data.scoring"} <= set(sources)
    assert not {name for name in sources if name.startswith(("aqnpipe.report", "aqnpipe.statistics"))}


def test_versions_name_what_decides_results():
    assert {"torch", "trl", "transformers"} <= set(versions())
