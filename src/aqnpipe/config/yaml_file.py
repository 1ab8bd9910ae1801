"""Reading YAML files that users write: every mistake is one line with the file, and where YAML is broken the position.

The reader is stricter than plain YAML. A duplicate key is refused, because YAML would silently drop the first one, and
so is `010`, which is 8 in YAML 1.1.
`1e-6` is a number, as in YAML 1.2 and in every programming language; YAML 1.1 reads it as text. Aliases that expand to
very many values are refused before they are expanded.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from aqnpipe.config.base import describe_validation_error, refuse_pipe_or_device
from aqnpipe.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)

_LARGEST_DOCUMENT = 1_000_000
"""Values in a document, aliases counted as often as they are used."""

_EXACT_INTEGERS = 2**53
_TEXT = "tag:yaml.org,2002:str"


def read_yaml_file(path: Path) -> Any:
    """Return the content of a YAML file written by a user; ConfigError if it is missing, unreadable or malformed."""
    refuse_pipe_or_device(path, ConfigError)
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file{_near_files(path)}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid YAML: byte {error.start} is not UTF-8") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        words = ", ".join(part for part in (error.context, error.problem, error.note) if part)
        raise ConfigError(f"{where}: not valid YAML: {' '.join(words.split())}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error


def typed_scalars(content: Any) -> Any:
    """Return `content` with texts that are numbers, true, false or null in YAML as such.

    Snakemake reads `--config training={learning_rate: 1e-6}` as text only.
    """
    return _changed(content, _typed)


def _typed(value: Any) -> Any:
    if not isinstance(value, str) or _StrictLoader("").resolve(yaml.ScalarNode, value, (True, False)) == _TEXT:
        return value
    try:
        return yaml.load(value, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError) as error:
        problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else f"{value!r} is no value ({error})"
        raise ConfigError(f"--config: {problem}") from error


def _changed(content: Any, change: Callable[[Any], Any]) -> Any:
    """Return content with what a function makes of each value that is no mapping and no list."""
    if isinstance(content, Mapping):
        return {key: _changed(value, change) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_changed(value, change) for value in content]
    return change(content)


def validated(model: type[Model], content: Any, source: str) -> Model:
    """Return `content`, read from the file `source`, as a model; ConfigError with all mistakes on one line.

    Text is not converted to numbers: `seeds: ["0"]` is refused. A whole number may be written as `1e4` or `100.0`.
    """
    try:
        # JSON, because pydantic's strict mode accepts lists for tuples only there.
        return model.model_validate_json(json.dumps(_changed(content, _integer), default=str), strict=True)
    except (RecursionError, TypeError) as error:
        raise ConfigError(f"{source}: expected a mapping of keys with simple values") from error
    except ValidationError as error:
        raise ConfigError(f"{source}: {describe_validation_error(error, content, model)}") from error


def load_yaml(path: Path, model: type[Model]) -> Model:
    """Read and validate a YAML file written by a user; ConfigError as in `read_yaml_file` and `validated`."""
    return validated(model, read_yaml_file(path), str(path))


class _StrictLoader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys, keys that are not scalars, and aliases that expand without bound."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _size(node, {}) > _LARGEST_DOCUMENT:
            raise yaml.YAMLError(f"its aliases expand to more than {_LARGEST_DOCUMENT:,} values")
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.composer.ComposerError(None, None, "expected a name as key", key.start_mark)
            if key.value in seen and key.value != "<<":
                first = seen[key.value].start_mark.line + 1
                raise yaml.composer.ComposerError(
                    None, None, f"duplicate key {key.value!r}, first on line {first}", key.start_mark
                )
            seen[key.value] = key
        return node

    def construct_yaml_int(self, node: Any) -> int:
        """Read a whole number; YAML 1.1 would read 010 as 8, and 1:30 as 90."""
        if re.match(r"[-+]?0[0-9_]|.*:", node.value):
            raise yaml.constructor.ConstructorError(
                None, None, f"found {node.value}, expected a number without leading zeros or colons", node.start_mark
            )
        return int(super().construct_yaml_int(node))


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _StrictLoader.construct_yaml_int)
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


def _size(node: yaml.Node, known: dict[int, float]) -> float:
    """Return the number of values that a node expands to; infinite if it contains itself."""
    if id(node) not in known:
        known[id(node)] = float("inf")
        known[id(node)] = 1 + sum(_size(child, known) for child in _children(node))
    return known[id(node)]


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key
            yield value
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def _integer(value: Any) -> Any:
    """Return a float that is a whole number as an integer, which fields of either kind accept."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < _EXACT_INTEGERS
    return int(value) if is_whole else value


def _near_files(path: Path) -> str:
    """Return the most similar name of a file beside the missing one, for a message; extensions do not count."""
    try:
        names = {entry.stem: entry.name for entry in path.parent.iterdir() if entry.suffix == path.suffix}
    except OSError:
        return ""
    near = get_close_matches(path.stem, names, n=1)
    return f" (did you mean {names[near[0]]}?)" if near else ""
