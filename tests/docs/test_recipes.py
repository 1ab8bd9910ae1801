"""The recipe for torchrun does what its page says."""

import re
import shlex
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "torchrun.md"


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_torchrun_prints_the_line_of_the_page(command_line, tmp_path, monkeypatch):
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (program,) = (text for kind, text in blocks if kind == "python")
    command, output = (text for kind, text in blocks[:3] if not kind)
    (tmp_path / "train.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    name, *words = shlex.split(command)
    assert name == "aqnpipe"
    words[words.index("torchrun")] = str(Path(sys.executable).with_name("torchrun"))
    done = command_line(*words)
    assert done.returncode == 0, done.stderr
    # Losses depend on the kind of processor, and the numbers of products do not.
    ranks, line = output.strip().splitlines()[:-1], output.strip().splitlines()[-1]
    assert line in done.stderr.splitlines()
    assert sorted(each.split(":")[0] for each in done.stdout.splitlines()) == sorted(each[:6] for each in ranks)
