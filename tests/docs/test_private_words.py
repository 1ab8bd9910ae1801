"""User pages, studies, the report and messages use the field's words: private words do not come back."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml

from aqnpipe.cli.main import app
from aqnpipe.config.schema import study_schema
from aqnpipe.report.words import catalogue

ROOT = Path(__file__).parents[2]
GENERATED = {"parity.md", "machine-faults.md"}
"""Pages that a program in `benchmarks/` writes."""
PAGES = sorted(
    path
    for pattern in ("README.md", "RUNNING.md", "docs/*.md", "docs/how-to/*.md", "docs/site/*.md", "config/*.md")
    for path in ROOT.glob(pattern)
    if path.name not in GENERATED
)
STUDIES = sorted((ROOT / "config").glob("*.yaml"))
TABLE = re.compile(r"<!-- table: begin -->.*<!-- table: end -->", re.DOTALL)
CODE = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)", re.DOTALL)
SHOWN_KEYS = {"claim", "description", "title", "question"}

PRIVATE = {
    # word: (pattern of its private sense, what to write)
    "pass": (r"(?<!forward )(?<!backward )(?<!did not )\bpass(es)?\b(?!@)", "forward pass, evaluation"),
    "leap": (r"\bleap(s|ed)?\b", "jump"),
    "look": (r"\blooks?\b(?! at\b| for\b| like\b)", "interim analysis"),
    "draw": (r"\b(re)?(draws?|drawn)\b", "sample, noise seed, random numbers"),
    "family": (r"(?<!model )(?<!decoder )\bfamil(y|ies)\b", "group of claims tested together, model family"),
    "role": (r"\broles?\b", "name of the model, kind of claim"),
    "lease": (r"\bleas(e|es|ed)\b", "reservation, reserve"),
    "counterpart": (r"\bcounterparts?\b", "the other machine"),
    "energy": (r"\benergy\b", "total noise variance, root mean square"),
    "own": (r"(?<!your )\bown\b", "custom, separate"),
    "refuse": (r"\brefus(e|es|ed|ing|als?)\b", "is an error, is not accepted, is not supported"),
    "escape": (r"(?<!printable )\bescap(e|es|ed)\b", "has no noise, is not observed"),
    "one line": (r"\b(is|are) (a|one) line\b|\bone line each\b|\bin one line\b", "ends with an error"),
    "on top": (r"\bon top\b", "added to, in addition"),
}


def prose(page: str) -> str:
    """Text of a page without code, keys in backticks, targets of links, and generated tables."""
    return CODE.sub(" ", TABLE.sub(" ", page))


def shown_in(value: object, keys: set[str]) -> Iterator[str]:
    """Yield the texts under these keys of a study, or of the schema of studies."""
    if isinstance(value, dict):
        yield from (text for key, text in value.items() if key in keys and isinstance(text, str))
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        yield from shown_in(each, keys)


def words_of_study(text: str) -> str:
    """Comments of a study or arms file, and the texts that people read."""
    return prose("\n".join([*re.findall(r"#.*", text), *shown_in(yaml.safe_load(text), SHOWN_KEYS)]))


def uses(pattern: str, text: str) -> list[str]:
    line = " ".join(text.split())
    return [line[max(0, found.start() - 40) : found.end() + 30] for found in re.finditer(pattern, line, re.IGNORECASE)]


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """What users read, by where it stands."""
    pages = {str(page.relative_to(ROOT)): prose(page.read_text(encoding="utf-8")) for page in PAGES}
    studies = {str(path.relative_to(ROOT)): words_of_study(path.read_text(encoding="utf-8")) for path in STUDIES}
    placeholder = re.compile(r"\{[^}]*\}")
    report = {f"words.yaml {key}": prose(placeholder.sub(" ", text["en"])) for key, text in catalogue().items()}
    keys = {"keys of studies": prose("\n".join(shown_in(json.loads(study_schema()), {"description"})))}
    return pages | studies | report | keys | messages() | help_of(typer.main.get_command(app), "aqnpipe")


KEY = re.compile(r"[\w.]*\.(redraw|role|counterpart)\b|\b(redraw|draws|role|family|counterpart):")
"""Keys of a study that a message names without backticks, as all messages do."""
NO_TEXTS = {"own draw", '<svg viewBox="{}" role="img" aria-label="{}">'}
"""What is no text: part of a key of random numbers, and markup."""


def messages() -> dict[str, str]:
    """Texts with several words in the code, errors above all; without docstrings and what is put in."""
    found = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        parts |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            text = text_in(node) if id(node) not in parts else ""
            if " " in text.strip() and text not in NO_TEXTS:
                found[f"{path.relative_to(ROOT)}:{node.lineno}"] = KEY.sub(" ", prose(text))
    return found


def text_in(node: ast.AST) -> str:
    """Return a string of the code, of an f-string with `{}` for what is put in; empty for other code."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_in(part) or "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def help_of(command: typer.core.TyperCommand, name: str) -> dict[str, str]:
    """Help of a command, of its options and of the commands below it."""
    options = {f"{name} --{each.name}": prose(getattr(each, "help", "") or "") for each in command.params}
    below = [help_of(each, f"{name} {word}") for word, each in getattr(command, "commands", {}).items()]
    return {name: prose(command.help or ""), **options, **{key: text for part in below for key, text in part.items()}}


@pytest.mark.parametrize("word", PRIVATE)
def test_private_words_stay_out(texts, word):
    pattern, better = PRIVATE[word]
    found = [f"{where}: ... {use} ..." for where, text in texts.items() for use in uses(pattern, text)]
    assert found == [], f"write {better}"


@pytest.mark.parametrize(
    ("text", "word", "count"),
    [
        ("a pass of the model, two passes", "pass", 2),
        ("a forward\npass and backward passes, pass@1", "pass", 0),
        ("each look; look at the table, looks for faults", "look", 1),
        ("the family `main`, a model family", "family", 1),
        ("`role: primary`, [text](role.md)", "role", 0),
        ("its own key, your own data", "own", 1),
        ("```\nrefused\n``` is Refused", "refuse", 1),
        ("<!-- table: begin -->refused<!-- table: end -->", "refuse", 0),
    ],
)
def test_words_are_counted_outside_of_code_and_in_their_private_sense(text, word, count):
    assert len(uses(PRIVATE[word][0], prose(text))) == count


def test_comments_and_shown_texts_of_a_study_are_read_and_keys_are_not():
    study = (
        "energy: 1  # the role\nclaims:\n  - {role: primary, claim: less energy}\narms: {a: {description: a look}}\n"
    )
    assert set(words_of_study(study).splitlines()) == {"# the role", "a look", "less energy"}


def test_the_glossary_is_short():
    terms = re.findall(r"^## .+$", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert 0 < len(terms) <= 15


def test_messages_are_read_whole_and_docstrings_are_not():
    source = '"""A look."""\nraise E(f"{path}: {n} passes of "\n    f"{role}")'
    nodes = list(ast.walk(ast.parse(source)))
    assert "{}: {} passes of {}" in [text_in(node) for node in nodes]
    found = messages()
    assert any(text.endswith("no such file") for text in found.values())
    assert not any("Raises DataError" in text for text in found.values())
