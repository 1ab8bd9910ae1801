"""Every command of the how-to pages on the diagnosis runs, on a CPU and a small model in place of theirs."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from made_up_diagnoses import diagnosis, located
from random_models import random_model_of
from replacing import replaced

from aqnpipe.artifacts.files import write_json
from aqnpipe.diagnosis.node_reports import node_of

PAGES = Path(__file__).parents[2] / "docs" / "how-to"
NAMES = ("diagnosing-a-machine.md", "diagnosing-a-node.md")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
REPLACED = (
    (r"--devices all", "--devices cpu"),
    (r"--devices cuda:\S+", "--devices cpu,cpu"),
    (r"--device cuda:0", "--device cpu"),
    (r"--duration \w+", "--duration 1s"),
    (r"(?<=diagnose )(tiny|Qwen/\S+|path/to/folder)", "MODEL"),
)
EXPECTED = {"--fault": 3, "--compare": 3}
"""Exit codes that are not 0, by the option that explains them."""


def blocks(page):
    return [(language, text.strip()) for language, text in FENCE.findall((PAGES / page).read_text())]


COMMANDS = [(page, text) for page in NAMES for language, text in blocks(page) if not language]
PYTHON = [text for page in NAMES for language, text in blocks(page) if language == "python"]


@pytest.fixture(scope="module")
def folder(python, tmp_path_factory):
    """A folder with a model, two earlier reports, and `aqnpipe` on the path, forked from a process with its imports."""
    folder = tmp_path_factory.mktemp("pages")
    random_model_of("llama", num_layers=4).save_pretrained(folder / "model")
    write_json(folder / "before.json", node_of(diagnosis()))
    write_json(folder / "after.json", node_of(diagnosis(located(2))))
    program = folder / "bin" / "aqnpipe"
    program.parent.mkdir()
    script = folder / "main.py"
    script.write_text("from aqnpipe.cli.main import main\nmain()\n")
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(str(python.stand_in))} {shlex.quote(str(script))} "$@"\n')
    program.chmod(0o755)
    return folder


def on_this_machine(text, folder):
    for pattern, replacement in REPLACED:
        text = re.sub(pattern, replacement.replace("MODEL", shlex.quote(str(folder / "model"))), text)
    return text


@pytest.mark.parametrize("page", NAMES)
def test_pages_have_commands_and_nothing_but_commands_in_fences(page):
    commands = [text for name, text in COMMANDS if name == page]
    assert len(commands) >= 5
    assert all("aqnpipe" in text for text in commands)


def test_no_command_needs_an_accelerator_after_the_replacement(tmp_path):
    for _, text in COMMANDS:
        assert not re.search(r"cuda|npu|Qwen|--devices all", on_this_machine(text, tmp_path)), text
    for pattern, _ in REPLACED:
        assert any(re.search(pattern, text) for _, text in COMMANDS), pattern


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "text"), COMMANDS, ids=[f"{page}-{number}" for number, (page, _) in enumerate(COMMANDS)]
)
def test_a_command_runs_as_written(page, text, folder, python, tmp_path):
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**python.environment, "PATH": path, "AQNPIPE_WARM_PIDS": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-e", "-c", on_this_machine(text, folder)], cwd=folder, env=environment, capture_output=True, text=True
    )
    expected = next((code for option, code in EXPECTED.items() if option in text), 0)
    assert done.returncode == expected, done.stdout + done.stderr
    if "|| echo" in text:
        assert "look at this node" not in done.stdout
    if "&& echo" in text:
        assert "start the study" in done.stdout


def test_the_python_example_runs_as_written(folder, capsys):
    (text,) = PYTHON
    text = replaced(replaced(text, "path/to/model", str(folder / "model")), '"cuda:0"', '"cpu"')
    scope: dict[str, object] = {}
    exec(compile(text, "example", "exec"), scope)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "healthy"
    assert printed[-2].endswith("forwards of the whole model")
    assert printed[-1].startswith('{"verdict":"healthy"')
