"""The catalogue of words: complete in both languages, in one vocabulary, and in step with the code that uses it."""

import ast
import inspect
import re
import string
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Environment, nodes

import aqnpipe
from aqnpipe.artifacts.base import statement
from aqnpipe.report.numbers import FORMATS
from aqnpipe.report.tables import specifications, table
from aqnpipe.report.words import Language, catalogue, clipped, load_words, visible

PACKAGE = Path(aqnpipe.__file__).parent
LANGUAGES = get_args(Language)
CATALOGUE = catalogue()
TEMPLATES = PACKAGE / "report" / "templates"
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
CONSTANTS = {
    node.value
    for tree in TREES.values()
    for node in ast.walk(tree)
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
}
TABLES = specifications()
_COLUMN = re.compile(r"(\w+)(?:=\w+)?(?::([\w.,]+))?")
COLUMNS = [_COLUMN.fullmatch(column).groups() for table in TABLES.values() for column in table["columns"].split()]
"""(key of the header, form) of every column of a table, see `report.tables.table_of`."""
CONSTANTS |= {key for key, _ in COLUMNS} | {
    table[key] for table in TABLES.values() for key in ("caption", "note") if key in table
}

CHINESE_BANNED = {
    "回执": "凭证",
    "主张": "论断",
    "运气": "训练间方差",
    "偶然性": "训练间方差",
    "假处理": "A/A 对照",
    "界限": "界值",
    "要求了": "设定了",
    "原始 torch": "普通 torch",
}
ENGLISH_BANNED = {
    "luck": "run-to-run variance",
    "seed_variance": "run-to-run (seed) variance",
    "sham": "A/A control",
    "asked": "requested",
    "bare torch": "plain torch",
    "witness": "reference check",
    "seal": "checksum",
    "audit": "check",
    "struck": "faulty",
    "lane": "channel",
}


@dataclass(frozen=True)
class Use:
    """A call with a key of the catalogue: a pattern of the key, and the names of the values passed."""

    where: str
    pattern: re.Pattern[str]
    values: frozenset[str]
    whole: bool

    @property
    def keys(self):
        return {key for key in CATALOGUE if self.pattern.fullmatch(key)}


def pattern_of(parts):
    """Return the pattern of a key from its parts: text, or None for a part that the code computes."""
    return re.compile("".join("([^.]+)" if part is None else re.escape(part) for part in parts))


def keys_in(node):
    """Yield the parts of every key that an expression can give."""
    if isinstance(node, ast.IfExp):
        yield from keys_in(node.body)
        yield from keys_in(node.orelse)
    elif isinstance(node, ast.Constant):
        yield [node.value]
    elif isinstance(node, ast.JoinedStr):
        yield [part.value if isinstance(part, ast.Constant) else None for part in node.values]


def uses_in_code():
    """Yield every use by `words(...)` and `statement(...)`; keys kept in variables are plain constants."""
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
                continue
            if node.func.id not in ("words", "statement"):
                continue
            for parts in keys_in(node.args[0]):
                assert all(word.arg for word in node.keywords), f"{path}:{node.lineno}: values are keywords"
                yield Use(
                    f"{path.relative_to(PACKAGE)}:{node.lineno}",
                    pattern_of(parts),
                    frozenset(word.arg for word in node.keywords),
                    None not in parts,
                )


def uses_in_columns():
    """Yield every use by a form of a column, such as `verdict.`."""
    for form in {form for _, form in COLUMNS if form and form.endswith(".")}:
        yield Use(f"a column of the form {form}", pattern_of([form, None]), frozenset(), True)


def tables_in_code():
    """Yield the name and the values of caption and note of every call of `table`."""
    parameters = set(inspect.signature(table).parameters) - {"values"}
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and "table" in (getattr(node.func, "id", ""), getattr(node.func, "attr", "")):
                parts = [] if not node.args else [parts for parts in keys_in(node.args[0]) if None not in parts]
                for (name,) in parts:
                    yield name, {word.arg for word in node.keywords} - parameters


def uses_in_tables():
    """Yield every caption and note of a table; all their values together are those that its calls give."""
    for name, found in TABLES.items():
        for key in (found["caption"], found.get("note")):
            if key:
                yield Use(f"table {name}", pattern_of([key]), frozenset(placeholders(key)), True)


def uses_in_marks():
    """Yield every text of marks in pictures; its values are fields of frames, which a missing one stops."""
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and "told" in (getattr(node.func, "id", ""), getattr(node.func, "attr", "")):
                for (key,) in keys_in(node.args[1]):
                    where = f"{path.relative_to(PACKAGE)}:{node.lineno}"
                    yield Use(where, pattern_of([key]), frozenset(placeholders(key)), True)


def template_parts(node):
    if isinstance(node, nodes.Concat):
        return [part.value if isinstance(part, nodes.Const) else None for part in node.nodes]
    return [node.value if isinstance(node, nodes.Const) else None]


def uses_in_template():
    for path in sorted(TEMPLATES.glob("*.jinja")):
        for node in Environment().parse(path.read_text(encoding="utf-8")).find_all(nodes.Call):
            if isinstance(node.node, nodes.Name) and node.node.name == "w":
                parts = template_parts(node.args[0])
                values = frozenset(keyword.key for keyword in node.kwargs)
                yield Use(f"{path.name}:{node.lineno}", pattern_of(parts), values, None not in parts)


@pytest.fixture(scope="module")
def uses():
    found = [*uses_in_code(), *uses_in_columns(), *uses_in_tables(), *uses_in_marks(), *uses_in_template()]
    assert len(found) > 200
    return found


def fields(text):
    return [(name, form) for _, name, form, _ in string.Formatter().parse(text) if name]


def placeholders(key):
    return {name for name, _ in fields(CATALOGUE[key]["en"])}


def test_every_text_is_there_in_every_language_with_the_same_values():
    for key, texts in CATALOGUE.items():
        assert set(texts) == set(LANGUAGES), key
        assert all(isinstance(text, str) and text for text in texts.values()), key
        assert len({frozenset(name for name, _ in fields(text)) for text in texts.values()}) == 1, key


def test_no_key_is_there_twice():
    class Strict(yaml.SafeLoader):
        def construct_mapping(self, node, deep=False):
            keys = [key.value for key, _ in node.value]
            assert len(keys) == len(set(keys)), sorted(key for key in keys if keys.count(key) > 1)
            return super().construct_mapping(node, deep)

    text = (TEMPLATES / "words.yaml").read_text(encoding="utf-8")
    assert yaml.load(text, Strict) == CATALOGUE


def test_forms_of_placeholders_are_known():
    for key, texts in CATALOGUE.items():
        for text in texts.values():
            for name, form in fields(text):
                known = form in {*FORMATS, "spaced"} or re.fullmatch(r"|count( [^|]+\|[^|]+)?|\.\d[fg]|g", form)
                assert known, f"{key}: {name}:{form}"


def test_chinese_is_chinese():
    same = {key for key, texts in CATALOGUE.items() if texts["en"] == texts["zh"]}
    assert same == {"column.p", "column.strict", "axis.sigma", "column.sigma", "detail.p"}


def test_one_word_for_one_thing():
    for key, texts in CATALOGUE.items():
        for word, better in CHINESE_BANNED.items():
            assert word not in texts["zh"], f"{key}: {word}, write {better}"
        for word, better in ENGLISH_BANNED.items():
            assert not re.search(rf"\b{word}", texts["en"], re.IGNORECASE), f"{key}: {word}, write {better}"


def test_every_key_that_is_used_exists_and_gets_its_values(uses):
    for use in uses:
        assert use.keys, f"{use.where}: no key {use.pattern.pattern}"
        for key in use.keys:
            assert use.values == placeholders(key), f"{use.where}: {key}"


def test_captions_and_notes_of_tables_get_their_values():
    called = {name: values for name, values in tables_in_code() if name in TABLES}
    assert len(called) > 20
    for name, found in TABLES.items():
        keys = [found[key] for key in ("caption", "note") if key in found]
        assert called.get(name, set()) == set().union(*map(placeholders, keys)), name


def test_every_key_is_used(uses):
    """A key is used whole; or its computed part is a string in the code; or the code holds the whole key as data."""
    for key in CATALOGUE:
        matches = [(use, use.pattern.fullmatch(key)) for use in uses]
        used = any(match and all(part in CONSTANTS for part in match.groups()) for _, match in matches)
        assert used or (key in CONSTANTS and not placeholders(key)), key


def test_every_text_for_the_script_is_read_by_it():
    page, script = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("report.html.jinja", "report.js"))
    given = set(re.findall(r'data-(\w+)="{{ w\("script\.', page))
    assert given == set(re.findall(r"\bsay\.(\w+)", script)) != set()


def test_texts_for_people_are_in_the_catalogue_alone():
    """Except for the default claims, which belong to the configuration like the claims of a study."""
    chinese = re.compile("[\u4e00-\u9fff]")
    for path, tree in TREES.items():
        claims = {id(node) for part in tree.body if _is_default_claim(part) for node in ast.walk(part)}
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in claims]
        assert not [node.value for node in nodes if isinstance(node.value, str) and chinese.search(node.value)], path


def _is_default_claim(part):
    return (isinstance(part, ast.AnnAssign) and ast.unparse(part.target) == "_CLAIMS") or (
        isinstance(part, ast.FunctionDef) and part.name == "_claimed"
    )


@pytest.mark.parametrize("language", LANGUAGES)
def test_values_are_put_in(language):
    assert "17" in load_words(language)("training.stride", stride=17)


def test_numbers_are_put_in_as_their_placeholders_say():
    words = load_words("en")
    assert words("summary.line", count=1, parts="1 supported") == "Of 1 claim: 1 supported."
    assert words("noise.at", level=0.05) == "at 5\u00a0% noise"
    assert words("detail.p", p=0.0004) == "p\u00a0=\u00a04.0e−4"
    assert words("detail.margin", margin=0.02) == "margin 2.0 points"


def test_statements_become_text_with_the_statements_in_them():
    result = statement(
        "result.nats",
        treatment="targeted",
        control="global",
        difference=-0.01234,
        details=(
            statement("detail.interval.nats", level=0.95, low=-0.02, high=-0.0046),
            statement("detail.p_and_holm", p=0.004, p_holm=0.012),
        ),
    )
    english = load_words("en").of(result).replace("\u00a0", " ")
    assert english == (
        "targeted against global: −0.0123 nats (95 % CI −0.0200 to −0.0046; p = 0.004, Holm-adjusted p = 0.012)."
    )
    chinese = load_words("zh").all_of([result, statement("conclusion.supported")]).replace("\u00a0", " ")
    assert chinese == (
        "targeted 对 global：−0.0123 nat（95 % 置信区间 −0.0200 至 −0.0046；p = 0.004，Holm 校正后 p = 0.012）。"
        "这些数字支持该论断。"
    )


def test_a_text_with_braces_is_not_a_placeholder():
    assert load_words("en")("refused.setting", reason="{reason} {x.y}") == "Not compared: {reason} {x.y}."


def test_a_wrong_key_or_a_missing_value_is_an_error():
    words = load_words("en")
    with pytest.raises(KeyError):
        words("no.such.key")
    with pytest.raises(KeyError):
        words("training.stride")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, with 5\u00a0% − ± é 漢字 ✓\n\tnext", "plain, with 5\u00a0% − ± é 漢字 ✓\n\tnext"),
        ("\x1b[31mred\x07", "⟨U+001B⟩[31mred⟨U+0007⟩"),
        ("a\u202eb\u2066c\u200f", "a⟨U+202E⟩b⟨U+2066⟩c⟨U+200F⟩"),
        ("\x00\r\ufeff\ufffe\ud800\ue000\u2028", "⟨U+0000⟩⟨U+000D⟩⟨U+FEFF⟩⟨U+FFFE⟩⟨U+D800⟩⟨U+E000⟩⟨U+2028⟩"),
        ("\u00ad\U000e0041", "⟨U+00AD⟩⟨U+E0041⟩"),
    ],
)
def test_invisible_characters_are_shown_as_codes(text, shown):
    assert visible(text) == shown


@given(st.text(st.characters(codec=None)))
def test_no_invisible_character_is_left_and_repeating_changes_nothing(text):
    shown = visible(text)
    unseen = [c for c in shown if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")]
    assert set(unseen) <= {"\n", "\t"}
    assert visible(shown) == shown
    shown.encode("utf-8")


def test_long_text_is_cut_and_says_by_how_much():
    assert clipped("abcdef", 4) == ("abcd", 2)
    assert clipped("abc", 4) == ("abc", 0)
