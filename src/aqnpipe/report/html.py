"""Templates of HTML pages: all text is made visible and escaped; style sheets and scripts with their hashes."""

import base64
import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from aqnpipe.report.text import visible


@dataclass(frozen=True)
class Inline:
    """A style sheet or script of the package for the inside of a page, and the hash by which a policy allows it."""

    code: Markup
    sha256: str


def page_template(name: str) -> Template:
    """Return the template `name`; of the values that it gets, only `Markup` stays markup."""
    environment = Environment(
        loader=PackageLoader("aqnpipe.report"),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def inline(name: str) -> Inline:
    """Return the file `name` of the templates."""
    text = (resources.files("aqnpipe.report") / "templates" / name).read_text(encoding="utf-8").strip()
    code = Markup(text)  # noqa: S704 - a file of the package
    return Inline(code, base64.b64encode(hashlib.sha256(text.encode()).digest()).decode())


def _visible(value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value
