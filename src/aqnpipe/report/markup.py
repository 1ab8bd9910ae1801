"""Markup of the report: templates of pages, and Altair charts as inline SVG in the page's colours, font and width."""

import base64
import hashlib
import json
import re
from collections.abc import Set
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import altair as alt
import vl_convert
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, Template, select_autoescape
from markupsafe import Markup, escape

from aqnpipe.report.words import visible


@dataclass(frozen=True)
class Inline:
    """A style sheet or script of the package for the inside of a page, and the hash by which a policy allows it."""

    code: Markup
    sha256: str


def page_template(name: str) -> Template:
    """Return the template `name`; of the values that one of HTML gets, only `Markup` stays markup."""
    environment = Environment(
        loader=PackageLoader("aqnpipe.report"),
        autoescape=select_autoescape(disabled_extensions=("md.jinja",), default=True),
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["markdown"] = markdown
    return environment.get_template(name)


_SPECIAL = re.compile(r"([\\`*_\[\]<>#|~&$]|^[-+=])")
_NUMBERED = re.compile(r"^(\d+)([.)])")
"""The start of a list. A backslash has to stand before the point, because digits cannot be escaped."""
_MENTION = re.compile(r"@")


def markdown(text: str) -> str:
    """Escape untrusted text for Markdown: no markup, no HTML, no table break, and no mention of a user."""
    flat = " ".join(visible(text).split())
    escaped = _NUMBERED.sub(r"\1\\\2", _SPECIAL.sub(r"\\\1", flat))
    return _MENTION.sub("@<!-- -->", escaped)


def inline(name: str) -> Inline:
    """Return the file `name` of the templates."""
    text = _template_text(name).strip()
    code = Markup(text)  # noqa: S704 - a file of the package
    return Inline(code, base64.b64encode(hashlib.sha256(text.encode()).digest()).decode())


def _template_text(name: str) -> str:
    return (resources.files("aqnpipe.report") / "templates" / name).read_text(encoding="utf-8")


def _visible(value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


NUM_SERIES = 8
INK, MUTED = "var(--ink)", "var(--muted)"
"""Colours of the page, see `templates/chart.yaml`."""
_DASHES = ([10, 0], [7, 3], [2, 2], [8, 3, 2, 3])

_MANY_DIGITS = re.compile(r"-?\d+\.\d{2,}")
_ROOT = re.compile(r"<svg\b[^>]*?\bviewBox=\"([^\"]+)\"[^>]*>", re.DOTALL)
_TAG = re.compile(r"<[^>]*>")
_NEEDLESS_ATTRIBUTES = re.compile(
    r' (?:(?:font-family|xmlns|xmlns:xlink|aria-\w+|role|class|pointer-events)="[^"]*"'
    r'|opacity="1"|stroke-width="1"|font-weight="normal"|[xy]2="0")'
)
_MARK, _DOT = "¦", "·"
_LABEL = re.compile(rf' aria-label="{_MARK}([^"{_MARK}]*){_MARK}([^"]*)"')
_DOTS = re.compile(rf'(?:<path aria-label="{_DOT}[^>]*/>)+')
_DOT_PARTS = re.compile(
    rf'<path aria-label="{_DOT}([^"]*)"[^>]*? transform="translate\(([^,"]*),([^)"]*)\)"[^>]*? fill="([^"]*)"[^>]*/>'
)
_CIRCLE = re.compile(r' d="M([\d.]+),0A\1,\1,0,1,1,-\1,0A\1,\1,0,1,1,\1,0"')
_EMPTY_PATHS = re.compile(r'<path d="(?:M0,0h0v0h0Z)?"[^>]*/>')


def palette_position(index: int) -> int:
    """Return the number of the page's colour for series `index`; 0 is the neutral colour of the pretrained model."""
    return (index - 1) % NUM_SERIES + 1 if index else 0


def series_colour(index: int) -> str:
    """Return the page's colour of series `index`."""
    return f"var(--c{palette_position(index)})"


def series_dash(index: int) -> list[int]:
    """Return the dash pattern of series `index`, so that colour is never the only difference."""
    round_of_palette = (index - 1) // NUM_SERIES
    return _DASHES[(index - 1 + round_of_palette) % len(_DASHES)] if index else _DASHES[2]


def described(series: str, text: str) -> str:
    """Return the description of a mark: the picture shows `text` at it, if any; `series` switches it on and off."""
    return f"{_MARK}{series.replace(_MARK, ' ')}{_MARK}{text}"


def small_dot(series: str) -> str:
    """Return the description of a dot without values of its own: neighbours of one series become one path."""
    return f"{_DOT}{series}"


def render_svg(chart: alt.TopLevelMixin, label: str) -> Markup:
    """Render `chart` as an inline SVG element labelled `label`; the same chart gives the same bytes."""
    return _slimmed(vl_convert.vegalite_to_svg(_spec(chart, _config())), label)


def light_spec(chart: alt.TopLevelMixin, *, legend: bool) -> dict[str, Any]:
    """Return the Vega-Lite specification of `chart` on white, in the colours of the light page, without gridlines.

    legend: show the names of the colours that are drawn; on the page they stand above a group of pictures.
    """
    axis = _config()["axis"] | {"grid": False, "domainColor": MUTED, "tickColor": MUTED}
    spec = _spec(chart, _config() | {"background": "white", "axis": axis, "padding": 9})
    drawn = {pair for rows in spec["datasets"].values() for row in rows for pair in row.items()} if legend else set()
    # The light page has the first values of the colours in the style sheet.
    css = _template_text("report.css").partition("@media")[0]
    colours = {f"var({name})": colour for name, colour in re.findall(r"(--[\w-]+):(#[0-9a-f]{3,6})\b", css)}
    text = re.sub(r'"(var\([\w-]+\))"', lambda found: f'"{colours.get(found[1], found[1])}"', json.dumps(spec))
    found: dict[str, Any] = json.loads(text, object_hook=lambda part: _with_legend(part, drawn))
    return found


def _with_legend(part: dict[str, Any], drawn: Set[tuple[str, Any]]) -> dict[str, Any]:
    """Return a part of a specification without descriptions, and with the names of colours if some are `drawn`."""
    part.pop("description", None)
    colour = part.get("color")
    if drawn and isinstance(colour, dict) and colour.get("legend", "") is None:
        names = [name for name in colour["scale"]["domain"] if (colour["field"], name) in drawn]
        symbol = {
            "symbolType": "circle",
            "symbolStrokeWidth": 0,
            "symbolOpacity": 1,
            "orient": "bottom",
            "columns": 3,
            "columnPadding": 30,
        }
        part["color"] = colour | {"legend": {"title": None, "values": names} | symbol, "title": None}
    return part


def _spec(chart: alt.TopLevelMixin, config: dict[str, Any]) -> dict[str, Any]:
    # The renderer aborts on some characters (NUL), so invisible characters are replaced before rendering.
    # Altair's validation against its schema would take a fifth of the time; the renderer rejects a wrong chart as well.
    # Altair's limit of 5,000 rows is meant for notebooks.
    with alt.data_transformers.disable_max_rows():
        spec: dict[str, Any] = _visible_texts(chart.to_dict(validate=False))
    return spec | {"config": config}


def _visible_texts(part: Any) -> Any:
    if isinstance(part, str):
        return visible(part)
    if isinstance(part, dict):
        return {key: _visible_texts(value) for key, value in part.items()}
    return [_visible_texts(value) for value in part] if isinstance(part, list) else part


def _slimmed(svg: str, label: str) -> Markup:
    """Label the picture and drop needless markup; texts stay as they are."""
    view_box = _ROOT.search(svg)
    if view_box is None:
        raise ValueError("the renderer returned no SVG element with a viewBox")
    root = f'<svg viewBox="{view_box.group(1)}" role="img" aria-label="{escape(visible(label))}">'
    body = _DOTS.sub(_joined_dots, svg[view_box.end() :])
    body = _EMPTY_PATHS.sub("", _TAG.sub(lambda tag: _slim_tag(tag.group()), body))
    return Markup(root + body)  # noqa: S704 - Vega escapes texts and attributes; hostile strings are tested


def _joined_dots(match: re.Match[str]) -> str:
    """Return one path per series for a run of small dots: a dot is a line of no length with round ends."""
    series: dict[tuple[str, str], list[str]] = {}
    for name, x, y, fill in _DOT_PARTS.findall(match.group()):
        series.setdefault((name, fill), []).append(f"M{float(x):.0f} {float(y):.0f}h0")
    return "".join(
        f'<path data-s="{name}" d="{"".join(dots)}" fill="none" stroke="{fill}" stroke-width="2.6" '
        'stroke-linecap="round" opacity=".45"/>'
        for (name, fill), dots in series.items()
    )


def _slim_tag(tag: str) -> str:
    label = _LABEL.search(tag)
    slim = _slim_attributes(_LABEL.sub("", tag))
    if label is None:
        return slim
    series, text = label.groups()
    name = slim[1:].split(" ", 1)[0]
    owner = f' data-s="{series}"' if series else ""
    if not text:
        return f"{slim.removesuffix('/>')}{owner}/>"
    return f"{slim.removesuffix('/>')}{owner}><title>{text}</title></{name}>"


def _slim_attributes(tag: str) -> str:
    tag = _NEEDLESS_ATTRIBUTES.sub("", tag)
    circle = _CIRCLE.search(tag)
    if circle is not None:
        tag = f'<circle r="{circle.group(1)}"{_CIRCLE.sub("", tag).removeprefix("<path")}'
    return _MANY_DIGITS.sub(lambda number: f"{float(number.group()):.1f}".removesuffix(".0"), tag)


@cache
def _config() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(_template_text("chart.yaml"))
    return content
