"""Noise that is calibrated to a measured machine: the error that `aqnpipe parity` found, operator by operator.

A study names a parity file, or a machine whose parity the workflow measures (`MeasuredError`). When a job starts, the
figures of every operator are read from the file. A layer then has `LayerErrors`, and each of its operators an
`OperatorError`.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field

from aqnpipe.config.base import FrozenModel

SCORES = "scores"
"""Product of queries and keys. A parity judges attention as one operator, so its error is on the second product."""

ATTENTION = "attention"
LM_HEAD = "lm_head"


def is_norm(kind: str) -> bool:
    """Return whether operators of a kind, such as `input_layernorm`, are norms: RMSNorm or LayerNorm."""
    return "norm" in kind or kind.startswith("ln_")


class ErrorFigures(FrozenModel):
    """Measured error of an operator with the result y, for an input row of root mean square x.

    `e = bias + gain*y + z*sqrt(absolute^2 + (per_input*x)^2 + (per_result*y)^2)`, with z ~ N(0, 1). `per_result` is the
    rounding of the result, and `per_input` what grows with the input: roundings of operands and of partial sums.
    """

    bias: float = 0.0
    """in the units of the result"""
    gain: float = 0.0
    """slope of the error over the result"""
    absolute: float = Field(default=0.0, ge=0)
    """in the units of the result"""
    per_input: float = Field(default=0.0, ge=0)
    """per unit of the root mean square of the operator's input"""
    per_result: float = Field(default=0.0, ge=0)
    """relative to the result"""

    @property
    def is_zero(self) -> bool:
        """Return whether there is no error at all."""
        return not any((self.bias, self.gain, self.absolute, self.per_input, self.per_result))


class OperatorError(FrozenModel):
    """The measured error of one operator in one layer, times a multiple."""

    kind: Literal["measured"] = "measured"
    multiple: float = Field(gt=0)
    figures: ErrorFigures

    @property
    def size(self) -> float:
        """The multiple, which is the size in units of the measured machine; 0 for an operator without an error."""
        return 0.0 if self.figures.is_zero else self.multiple


class LayerErrors(FrozenModel):
    """The measured errors of the operators of one layer, or outside the layers, by name such as `q_proj`."""

    kind: Literal["measured"] = "measured"
    operators: dict[str, OperatorError]


class MeasuredError(FrozenModel):
    """The error of a measured machine, per operator and layer, times a multiple."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    kind: Literal["measured"] = "measured"
    source: str = Field(alias="from", min_length=1)
    """file that `aqnpipe parity --json` wrote, with the ending .json, relative to the working directory; or a machine
    of the study with a `counterpart`, from which the workflow measures the error"""
    multiple: float = Field(default=1.0, gt=0, le=10_000)
    """1 is the measured machine, 4 four times its error"""
    figures: dict[str, ErrorFigures] | None = None
    """by operator, as layers.3.q_proj; a job reads them from the file, not to be given"""

    @property
    def machine(self) -> str | None:
        """The machine whose parity is measured; None if a file was named."""
        return None if self.source.endswith(".json") else self.source

    def measured_in(self, file: str) -> "MeasuredError":
        """Return the same error with the figures of `file`."""
        return self.model_copy(update={"source": file})

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy whose errors by layer are those of its own multiple and figures."""
        copied = super().model_copy(update=update, deep=deep)
        # pydantic copies cached properties too, which are those of the original.
        for name in ("_by_layer", "has_norms"):
            copied.__dict__.pop(name, None)
        return copied

    @cached_property
    def has_norms(self) -> bool:
        """Return whether the errors of norms are among the figures; files of older versions have none."""
        return any(is_norm(_place_of(name)[1].rpartition(".")[2]) for name in self.figures or ())

    def in_layer(self, layer: int | None) -> LayerErrors:
        """Return the errors of a decoder layer; None: of the output projection and of norms outside the layers.

        Raises ValueError without figures.
        """
        return self._by_layer.get(layer, LayerErrors(operators={}))

    @cached_property
    def _by_layer(self) -> dict[int | None, LayerErrors]:
        # A forward pass asks once per layer, so they are made once.
        if self.figures is None:
            raise ValueError(f"the figures of {self.source} have not been read; this is a bug")
        found: dict[int | None, dict[str, OperatorError]] = {}
        for name, figures in self.figures.items():
            layer, kind = _place_of(name)
            found.setdefault(layer, {})[kind] = OperatorError(multiple=self.multiple, figures=figures)
        none = OperatorError(multiple=self.multiple, figures=ErrorFigures())
        return {
            layer: LayerErrors(operators=operators if layer is None else {**operators, SCORES: none})
            for layer, operators in found.items()
        }


def _place_of(name: str) -> tuple[int | None, str]:
    """Return layer and name of an operator of a parity, such as `layers.3.q_proj`, `norm` or `lm_head`."""
    if not name.startswith("layers."):
        return None, name
    _, layer, kind = name.split(".")
    return int(layer), kind
