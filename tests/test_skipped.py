"""The table of skipped tests with which a run ends: one line per reason."""

from pathlib import Path
from types import SimpleNamespace


class Terminal:
    def __init__(self, skipped):
        self.stats = {"skipped": skipped}
        self.lines = []

    def section(self, title):
        self.lines.append(title)

    def write_line(self, line):
        self.lines.append(" ".join(line.split()))


def skipped(nodeid, reason, **more):
    return SimpleNamespace(nodeid=nodeid, longrepr=("a.py", 3, f"Skipped: {reason}"), **more)


def test_skipped_tests_are_one_line_per_reason_the_most_frequent_first(request):
    conftest = request.config.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))
    reports = [skipped(f"tests/{name}::test[{case}]", "no Slurm") for name in ("a.py", "b.py", "c.py") for case in "12"]
    terminal = Terminal([skipped("tests/gpu/d.py::test", "no GPU"), *reports])
    conftest.pytest_terminal_summary(terminal)
    assert terminal.lines == [
        "skipped",
        "6 no Slurm tests/a.py, tests/b.py and 1 more",
        "1 no GPU tests/gpu/d.py",
    ]
    for none in ([], [skipped("tests/e.py::test", "fails as expected", wasxfail="known")]):
        terminal = Terminal(none)
        conftest.pytest_terminal_summary(terminal)
        assert terminal.lines == []
