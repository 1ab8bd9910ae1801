"""Validation errors of pydantic in words of this package: key, what was found, what is expected, and near misses."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

_MAX_SHOWN = 3
_MAX_KEYS_LISTED = 12
_LONGEST_VALUE = 80
_LISTED = ", expected one of "

IDENTIFIER_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
FOLDER_PATTERN = r"^/?[A-Za-z0-9_]([\w ./+@-]*[\w./+@-])?$"
FUNCTION_PATTERN = r"^([^:]*/)?[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
GRES_PATTERN = r"^[A-Za-z_]\w*(:([A-Za-z_][\w.]?|[\w.]{3,}))?$"
DURATION_PATTERN = r"^[1-9]\d*[mhdw]$"
PARTITION_PATTERN = r"^[^\s,]+(,[^\s,]+)*$"
SHARE_PATTERN = r"^(0\.\d*[1-9]\d*|[1-9]\d?(\.\d+)?)%$"

_PATTERNS = {
    GRES_PATTERN: "a name such as gpu or gpu:a100, without number, hyphen or comma (gpu if the type has a hyphen)",
    DURATION_PATTERN: "a duration such as 48h",
    SHARE_PATTERN: "a share of the time such as 3%",
    PARTITION_PATTERN: "the name of a partition",
    FUNCTION_PATTERN: "a function as package.module:function",
    IDENTIFIER_PATTERN: "a name of letters, digits, `_`, `.` and `-` that begins with a letter or digit",
    FOLDER_PATTERN: "a folder below this one or an absolute path, of letters, digits, spaces and `_.-+@/`",
    r"^[\w.-]+/[\w.-]+$": "an id of the form owner/name",
}
"""Patterns of text fields, and what they mean."""

_EXPECTED = {
    "int": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number",
    "float": "a number",
    "finite_number": "a finite number",
    "string": "text",
    "bool": "true or false",
    "dict": "a mapping of keys",
    "model": "a mapping of keys",
    "model_attributes": "a mapping of keys",
    "list": "a list",
    "tuple": "a list",
    "none": "null",
    "none_required": "null",
    "literal_error": "{expected}",
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "at most {le:,}",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "at least {min_length} characters",
    "too_long": "at most {max_length:,} entries",
    "too_short": "at least {min_length} entries",
}
"""What is expected in place of a value, by pydantic's kind of error, without `_type` and `_parsing`."""


@dataclass(frozen=True)
class _Problem:
    """A problem: its key without pydantic's tags, the raw location, and either a text or what is expected."""

    key: tuple[str | int, ...]
    kind: str
    text: str
    found: str | None = None
    """The value found, if the text is what is expected in its place."""

    meant: str | None = None
    """The key that an unknown one probably stands for."""


def describe_validation_error(error: ValidationError, content: Any = None, model: type[BaseModel] | None = None) -> str:
    """Return the problems of `error` on one line, the most telling first: key, what was found, what is expected.

    content, model: what was validated and as what, for exact keys and for suggestions of similar ones.
    """
    problems = [_problem(details, content, model) for details in error.errors(include_url=False)]
    # An unknown key is often a misspelling of the key reported as missing, so it comes first and stands for it.
    problems.sort(key=lambda problem: problem.kind != "extra_forbidden")
    explained = {(*problem.key[:-1], problem.meant) for problem in problems if problem.meant is not None}
    problems = [problem for problem in problems if problem.kind != "missing" or problem.key not in explained]
    # A list counts only the elements that are right: it is too short because others are wrong, and these are named.
    wrong = {problem.key[:depth] for problem in problems for depth in range(len(problem.key))}
    problems = [problem for problem in problems if problem.kind != "too_short" or problem.key not in wrong]
    texts = list(_texts(problems))
    # The keys that exist are listed once.
    texts[1:] = [text.partition(_LISTED)[0] for text in texts[1:]]
    left = len(texts) - _MAX_SHOWN
    more = f"; and {left} more mistake{'s' if left > 1 else ''}" if left > 0 else ""
    return "; ".join(texts[:_MAX_SHOWN]) + more


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean X?)` for the known name that is most similar to `name`; "" if none is."""
    near = _nearest(name, known)
    return f" (did you mean {near}?)" if near is not None else ""


_BEGINS_WITH_KEY = re.compile(r"[a-z_]+(\.\w+)+(:| is )")


def _nearest(name: str, known: Iterable[str]) -> str | None:
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=0.6)), None)


def one_of(name: str, known: Collection[str]) -> str | None:
    """Return what is expected in place of a name: the known ones with it in them, the most similar one, or all.

    None if it is a known one.
    """
    if name in known:
        return None
    longer = [each for each in known if name in each]
    near = did_you_mean(name, known) if len(longer) < 2 else ""
    return f"a known name{near}" if near else f"one of {', '.join(longer or known)}"


def _texts(problems: Sequence[_Problem]) -> Iterator[str]:
    """Yield one text per key; a value that fits no member of a union has one problem per member."""
    by_key: dict[tuple[str | int, ...], list[_Problem]] = {}
    for problem in problems:
        by_key.setdefault(problem.key, []).append(problem)
    for key, members in by_key.items():
        name = ".".join(map(str, key)) or "(top level)"
        wanted = list(dict.fromkeys(member.text for member in members if member.found is not None))
        other = list(dict.fromkeys(member.text for member in members if member.found is None))
        if wanted:
            found = next(member.found for member in members if member.found is not None)
            yield f"{name}: found {found}, expected {' or '.join(wanted)}"
        elif other:
            # A check of the whole file names the key itself.
            yield other[0] if not key and _BEGINS_WITH_KEY.match(other[0]) else f"{name}: {other[0]}"


def _problem(details: Any, content: Any, model: type[BaseModel] | None) -> _Problem:
    raw, kind, context = details["loc"], details["type"], details.get("ctx", {})
    key = _plain_key(raw, kind, content)
    found = shown(details["input"])
    if kind == "extra_forbidden":
        known = _keys_at(model, raw[:-1]) if model is not None else []
        near = did_you_mean(str(raw[-1]), known)
        listed = f"{_LISTED}{', '.join(known)}" if 0 < len(known) <= _MAX_KEYS_LISTED else ""
        return _Problem(key, kind, f"unknown key{near or listed}", meant=_nearest(str(raw[-1]), known))
    if kind == "missing":
        return _Problem(key, kind, "missing key")
    if kind == "union_tag_not_found":
        tag = context["discriminator"].strip("'")
        return _Problem((*key, tag), "missing", "missing key")
    if kind == "union_tag_invalid":
        wanted = f"{context['expected_tags']}{_near_value(context['tag'], context['expected_tags'])}"
        return _Problem((*key, context["discriminator"].strip("'")), kind, wanted, repr(context["tag"]))
    if kind == "json_invalid":
        return _Problem((), kind, f"a text or value that cannot be stored ({context['error']})")
    if kind in ("value_error", "assertion_error"):
        return _Problem(key, kind, str(context["error"]))
    expected = _expected(kind, context, details["input"])
    if expected is None:
        return _Problem(key, kind, f"{details['msg']}, found {found}")
    return _Problem(key, kind, expected, found)


def _expected(kind: str, context: Mapping[str, Any], value: Any) -> str | None:
    """Return what is expected in place of a value; None for a kind of error that has no words here."""
    if kind == "string_pattern_mismatch":
        return _PATTERNS.get(context["pattern"], f"text that matches {context['pattern']}")
    text = _EXPECTED.get(kind.removesuffix("_type").removesuffix("_parsing"))
    if text is None:
        return None
    expected = text.format(**context)
    if kind == "literal_error":
        return f"{expected}{_near_value(value, expected)}"
    is_percent = kind == "less_than" and context["lt"] == 1 and isinstance(value, int | float) and 1 <= value < 100
    return f"{expected} (did you mean {value / 100:g}?)" if is_percent else expected


def _near_value(value: Any, expected: str) -> str:
    """Return a suggestion from pydantic's list of allowed values, `'a', 'b' or 'c'`."""
    return did_you_mean(str(value), expected.split("'")[1::2])


def shown(value: Any) -> str:
    """Return a value as a user may have written it, on one line and cut."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def _plain_key(raw: Sequence[str | int], kind: str, content: Any) -> tuple[str | int, ...]:
    """Return a location without the parts that pydantic adds for members of unions and for keys."""
    if content is None:
        return tuple(part for part in raw if part != "[key]")
    key: list[str | int] = []
    inner = content
    for place, part in enumerate(raw):
        if isinstance(inner, Mapping):
            name = next((own for own in inner if own == part or str(own) == str(part)), None)
            if name is not None:
                key.append(part)
                inner = inner[name]
                continue
        elif isinstance(inner, list | tuple) and isinstance(part, int) and part < len(inner):
            key.append(part)
            inner = inner[part]
            continue
        if kind == "missing" and place == len(raw) - 1:
            key.append(part)
    return tuple(key)


def _keys_at(model: type[BaseModel], raw: Sequence[str | int]) -> list[str]:
    """Return the keys of the models that may stand at a raw location within `model`."""
    annotations: list[Any] = [model]
    for part in raw:
        annotations = [step for annotation in annotations for step in _step(annotation, part)]
    members = [member for annotation in annotations for member in _members(annotation)]
    models = [member for member in members if isinstance(member, type) and issubclass(member, BaseModel)]
    return list(dict.fromkeys(name for found in models for name in found.model_fields))


def _step(annotation: Any, part: str | int) -> Iterator[Any]:
    """Yield the types one part of a location further; a tag of a union selects its member."""
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            if part in member.model_fields:
                yield member.model_fields[str(part)].annotation
            elif part == member.__name__ or any(
                part in get_args(field.annotation)
                for field in member.model_fields.values()
                if get_origin(field.annotation) is Literal
            ):
                yield member
        elif get_origin(member) is dict:
            yield get_args(member)[1]
        elif get_origin(member) in (tuple, list) and isinstance(part, int):
            yield get_args(member)[0]


def _members(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union at any depth; `annotation` itself if it is none."""
    if get_origin(annotation) is Annotated:
        yield from _members(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation
