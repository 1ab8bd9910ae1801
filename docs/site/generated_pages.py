"""Pages of the site that are generated: keys of studies from the models, examples and tutorials from their files."""

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import nbformat

from aqnpipe.config.schema import study_schema

_KEYS = """# Keys of studies

Generated from the models that check a study. What the keys are for, and how they belong together, is in
[the manual of the configuration](../../../config/README.md).
"""
_EXAMPLES = """# Examples

Each runs as it stands, and is a test. [Noise in your own code](../../how-to/noise-in-your-own-code.md) explains them.
"""


def write_generated_pages(folder: Path, root: Path) -> None:
    """Write the generated pages into `folder`; `root` is the repository. Unchanged pages keep their times."""
    folder.mkdir(exist_ok=True)
    pages = {"study-keys.md": study_keys(json.loads(study_schema())), "examples.md": examples(root / "examples")}
    pages |= {f"{path.stem}.md": tutorial(path) for path in sorted((root / "docs" / "tutorials").glob("*.ipynb"))}
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def study_keys(schema: Mapping[str, Any]) -> str:
    """Return a page with a table per model of a JSON schema: key, type, default, description."""
    models = {name: model for name, model in schema["$defs"].items() if "properties" in model}
    first = [name for name in ("StudyConfig", "CheckpointStudyConfig") if name in models]
    ordered = [*first, *sorted(set(models) - set(first))]
    return _KEYS + "".join(_model(name, models[name], schema["$defs"]) for name in ordered)


def examples(folder: Path) -> str:
    """Return a page with the Python files of a folder, each under the first line of its docstring."""
    sections = []
    for path in sorted(folder.rglob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or path.stem
        sections.append(
            f"\n## {path.name}\n\n{docstring.splitlines()[0]}\n\n"
            f"```{{literalinclude}} ../../../examples/{path.relative_to(folder)}\n:language: python\n```\n"
        )
    return _EXAMPLES + "".join(sections)


def tutorial(path: Path) -> str:
    """Return a notebook of docs/tutorials as a page, with its outputs."""
    parts = []
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            # Links are relative to the folder of the tutorials, which is one level higher.
            parts.append(cell.source.replace("](../", "](../../"))
        else:
            parts.append(f"```python\n{cell.source}\n```")
            parts += [f"```text\n{output.text.rstrip()}\n```" for output in cell.outputs]
    file = f"../../tutorials/{path.stem}"
    return "\n\n".join([*parts, f"This page [as a notebook]({file}.ipynb), and [as a Python file]({file}.py)."]) + "\n"


def _model(name: str, model: Mapping[str, Any], defs: Mapping[str, Any]) -> str:
    required = model.get("required", [])
    rows = "".join(_row(key, value, key in required, defs) for key, value in model["properties"].items())
    head = "| key | type | default | meaning |\n|---|---|---|---|\n"
    return f"\n## {name}\n\n{model.get('description', '')}\n\n{head}{rows}"


def _row(key: str, value: Mapping[str, Any], is_required: bool, defs: Mapping[str, Any]) -> str:
    meaning = _cell(value.get("description", ""))
    return f"| `{key}` | {_type(value, defs)} | {_default(value, is_required)} | {meaning} |\n"


def _type(value: Mapping[str, Any], defs: Mapping[str, Any]) -> str:
    """Return a type in words, with links to the tables of models."""
    return _cell(" or ".join(dict.fromkeys(_types(value, defs)))) or "any"


def _types(value: Mapping[str, Any], defs: Mapping[str, Any]) -> Iterator[str]:
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        if "properties" in defs[name]:
            yield f"[{name}](#{name.lower()})"
        else:
            yield from _types(defs[name], defs)
    elif members := value.get("anyOf") or value.get("oneOf"):
        for member in members:
            yield from _types(member, defs)
    elif "const" in value:
        yield f"`{value['const']}`"
    elif "enum" in value:
        yield from (f"`{each}`" for each in value["enum"])
    elif value.get("type") == "array":
        yield f"list of {_type(value['items'], defs)}" if "items" in value else "list"
    elif value.get("type") == "object":
        inner = value.get("additionalProperties")
        yield f"mapping of {_type(inner, defs)}" if isinstance(inner, Mapping) else "mapping"
    elif "type" in value:
        yield f"{value['type']}{_limits(value)}"


def _limits(value: Mapping[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    found = [f"{sign} {value[key]:g}" for key, sign in signs.items() if key in value]
    return f" {', '.join(found)}" if found else ""


def _default(value: Mapping[str, Any], is_required: bool) -> str:
    if is_required:
        return "required"
    default = value.get("default")
    return "its own defaults" if isinstance(default, Mapping) and default else f"`{_cell(json.dumps(default))}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
