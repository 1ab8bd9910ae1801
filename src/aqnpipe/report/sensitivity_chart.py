"""The sensitivity of layers over depth, as a picture of its own (not part of a report)."""

from pathlib import Path
from typing import Any

import altair as alt
import polars as pl
import vl_convert

from aqnpipe.artifacts.diagnoses import LayerSensitivity, SensitivityFile
from aqnpipe.artifacts.files import atomic_path
from aqnpipe.errors import ConfigError

FORMATS = (".svg", ".png")

_WIDTH, _HEIGHT = 460, 240
_KINDS = {"measured, ± 2 standard errors": "#1f5fa8", "estimate from one backward pass": "#c2571a"}
_PNG_SCALE = 2


def check_format(path: Path) -> None:
    """Raise ConfigError unless the suffix of `path` is that of a format that can be written."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"--figure {path}: found suffix {path.suffix!r}, expected {' or '.join(FORMATS)}")


def write_sensitivity_chart(path: Path, file: SensitivityFile) -> None:
    """Write the picture as SVG or PNG, by the suffix of `path`; the same result gives the same bytes."""
    check_format(path)
    spec = sensitivity_chart(file).to_dict(validate=False)
    with atomic_path(path) as temporary:
        if path.suffix == ".svg":
            temporary.write_text(vl_convert.vegalite_to_svg(spec), encoding="utf-8")
        else:
            temporary.write_bytes(vl_convert.vegalite_to_png(spec, scale=_PNG_SCALE))


def sensitivity_chart(file: SensitivityFile) -> alt.TopLevelMixin:
    """Return the increase of the loss by layer, measured and estimated, and the change of the accuracy if measured.

    The axis of the loss is linear near 0 and logarithmic beyond, because one fragile layer would hide all others.
    """
    loss = "increase of the loss, nats per token"
    measured, estimate = _KINDS
    rows = [(one, measured, one.loss_increase, one.loss_standard_error) for one in file.layers]
    rows += [(one, estimate, one.estimate, None) for one in file.layers]
    losses = pl.DataFrame([_row(*row) for row in rows])
    # Where the axis turns logarithmic: at a twentieth of the mean size of the values.
    linear = max(float(losses["value"].abs().to_numpy().mean()) / 20, 1e-9)
    scale = alt.Scale(type="symlog", constant=linear)
    panels = [_panel(losses, loss, scale, file)]
    if file.accuracy is not None:
        changes = [(one, measured, one.accuracy_change, one.accuracy_standard_error) for one in file.layers]
        points = pl.DataFrame([_row(*change, factor=100) for change in changes])
        panels.append(_panel(points, "change of the accuracy, points", alt.Scale(), file))
    title: Any = alt.TitleParams(
        f"{file.model}: {100 * file.scale:g} % noise on the matrix products of one layer at a time",
        anchor="start",
        fontSize=13,
    )
    return alt.vconcat(*panels, title=title, background="white")


def _panel(rows: pl.DataFrame, title: str, scale: alt.Scale, file: SensitivityFile) -> alt.LayerChart | alt.FacetChart:
    parts = [_part(layer) for layer in file.layers]
    x = alt.X("part:N").sort(parts).title("layer").axis(labelAngle=0, labelOverlap=True, grid=False)
    colours = alt.Scale(domain=list(_KINDS), range=list(_KINDS.values()))
    colour = alt.Color("kind:N").scale(colours).legend(title=None, orient="top")
    offset = alt.XOffset("kind:N").scale(domain=list(_KINDS), paddingOuter=0.8)
    base = alt.Chart(rows, width=_WIDTH, height=_HEIGHT)
    y = alt.Y("value:Q").title(title).scale(scale).axis(format="~g", tickCount=6)
    bars = base.mark_rule(strokeWidth=1.4).encode(x, y=alt.Y("low:Q").scale(scale), y2="high:Q")
    points = base.mark_point(filled=True, size=45, opacity=1)
    return alt.layer(
        points.encode(x, y, xOffset=offset, color=colour, shape=alt.Shape("kind:N").legend(None)),
        bars.encode(xOffset=offset, color=colour),
        alt.Chart(pl.DataFrame({"zero": [0.0]})).mark_rule(color="#999999", strokeDash=[3, 3]).encode(y="zero:Q"),
    )


def _row(
    layer: LayerSensitivity, kind: str, value: float | None, error: float | None, factor: float = 1.0
) -> dict[str, object]:
    middle, reach = factor * (value or 0.0), 2 * factor * (error or 0.0)
    return {"part": _part(layer), "kind": kind, "value": middle, "low": middle - reach, "high": middle + reach}


def _part(layer: LayerSensitivity) -> str:
    return "head" if layer.layer is None else str(layer.layer)
