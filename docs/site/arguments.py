"""Arguments in the API reference: the bullets of a docstring, and the keys of a model, become lists with types."""

import inspect
import re
from collections.abc import Container
from typing import Any, get_type_hints

from pydantic import BaseModel
from sphinx.util.typing import stringify_annotation

from aqnpipe.config.schema import texts_of

_BULLET = re.compile(r"- (\w+): (.*)")
_FIXED = {"kind"}
"""Keys of models that have one possible value."""


def describe_arguments(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Replace the bullets of `lines` by fields of Sphinx, and add those of the fields of a pydantic model."""
    types = _types(obj)
    if not types:
        return
    lines[:], texts = _split(lines, types)
    lines.append("")
    for argument, text in {**_descriptions(obj), **texts}.items():
        lines += [f":param {argument}: {text}", f":type {argument}: {types[argument]}"]
    lines.append("")


def undescribed(obj: Any) -> set[str]:
    """Return the arguments that neither a bullet of the docstring nor a description of a model says anything about."""
    types = _types(obj)
    _, texts = _split((inspect.getdoc(obj) or "").splitlines(), types)
    return types.keys() - texts.keys() - _descriptions(obj).keys() - (_FIXED if _is_model(obj) else set())


def _descriptions(obj: Any) -> dict[str, str]:
    """Return the descriptions of the keys of a model; nothing for other objects."""
    return {name: _as_text(text) for name, text in texts_of(obj).items()} if _is_model(obj) else {}


def _as_text(description: str) -> str:
    """Return a description on one line, whose stars outside of code are no markup."""
    parts = " ".join(description.split()).split("`")
    return "`".join(part if number % 2 else part.replace("*", "\\*") for number, part in enumerate(parts))


def _types(obj: Any) -> dict[str, str]:
    """Return the arguments of a function or class with their types in words; nothing for others."""
    if _is_model(obj):
        hints, names = get_type_hints(obj), list(obj.model_fields)
    else:
        call = obj.__init__ if inspect.isclass(obj) else obj
        if not inspect.isfunction(call):
            return {}
        hints = get_type_hints(call)
        names = [name for name in inspect.signature(call).parameters if name != "self"]
    return {name: _in_words(hints.get(name, Any)) for name in names}


def _is_model(obj: Any) -> bool:
    return inspect.isclass(obj) and issubclass(obj, BaseModel)


def _in_words(annotation: Any) -> str:
    return re.sub(r"~?[\w.]+\.(\w+)", r"\1", stringify_annotation(annotation, "smart")).replace("NoneType", "None")


def _split(lines: list[str], names: Container[str]) -> tuple[list[str], dict[str, str]]:
    """Return the lines that are no bullets of arguments, and the text of each bullet."""
    rest: list[str] = []
    texts: dict[str, str] = {}
    open_bullet = None
    for line in lines:
        found = _BULLET.match(line)
        if found and found[1] in names:
            open_bullet = found[1]
            texts[open_bullet] = found[2]
        elif open_bullet and line.startswith("  "):
            texts[open_bullet] += f" {line.strip()}"
        else:
            open_bullet = None
            rest.append(line)
    return rest, texts
