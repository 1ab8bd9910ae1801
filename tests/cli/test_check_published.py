import json
from pathlib import Path

import pytest

from aqnpipe.artifacts.published import PublishedCheck
from aqnpipe.cli.main import main
from aqnpipe.report.words import load_words

PUBLISHED = str(Path(__file__).parents[2] / "config" / "published.yaml")


@pytest.fixture
def check(monkeypatch, capsys):
    """Run `aqnpipe check-published` in this process; return exit code, standard output and standard error."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["aqnpipe", "check-published", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        return stopped.value.code, *capsys.readouterr()

    return run


def test_the_table_names_every_claim_and_the_impossible_figure(check):
    code, output, errors = check(PUBLISHED)
    assert (code, errors) == (0, "")
    assert "NO: between 89.46 and 89.54" in output
    assert "1 of 50 accuracies are impossible" in output
    assert "26 claims: 17 not shown, 9 invalid" in output
    assert max(map(len, output.splitlines())) <= 160


def test_json_is_the_artifact(check):
    found = PublishedCheck.model_validate(json.loads(check(PUBLISHED, "--json")[1]))
    assert found.claims[0].verdict == "not_shown"
    assert found.claims[0].p_holm < 0.05 < found.claims[0].p_run_to_run_holm
    assert load_words("zh").all_of(found.claims[0].statements).startswith("E5 对 baseline：−8.72 个百分点")


def test_a_broken_file_is_one_line_and_exit_2(check, tmp_path):
    path = tmp_path / "paper.yaml"
    path.write_text("title: A paper\nsource: x\naccuracies: [{id: a}]\n")
    code, output, errors = check(str(path))
    assert (code, output) == (2, "")
    assert errors.startswith(f"ERROR: {path}: accuracies.0.label: missing key")
    assert errors.count("\n") == 1
