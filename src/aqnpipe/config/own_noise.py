"""Error models and schedules of a user's own: what a study says about them, and the contract of their functions.

Each is a function, named as `package.module:function`. The digest of its source is in the settings of every job. What a
study announces about a function is compared with what was measured; a receipt refuses any difference.
"""

import math
from numbers import Real
from typing import TYPE_CHECKING, Annotated, Literal, Protocol, Self, TypeGuard

from pydantic import Field, model_validator

from aqnpipe.config.base import FrozenModel
from aqnpipe.config.own_code import OwnFunction, planned_digest

if TYPE_CHECKING:
    from torch import Tensor

OwnValue = bool | int | float | str
"""A setting that is passed to a function by its name."""

MOST_DRAWS = 8


class ErrorFunction(Protocol):
    """An error model: `def my_error(values, normals, **settings)` returns the values with their error.

    values: the computed values, in any shape, in the units of the operator's result. float32, or float64 where the
    model computes in it; 16-bit results are widened before, and the result is rounded once to their format.
    normals: `[draws, *values.shape]`, independent N(0, 1) numbers in the dtype of `values`, keyed by seed, step,
    forward pass, layer, call and element. They are the only random numbers that the function may use.
    settings: `settings` of the study, by name.

    It returns a finite tensor of the shape, dtype and device of `values`. It must be elementwise: each result depends
    on its value and its normals alone, so that the audit can recompute any of them by itself, which it does on the
    CPU. It keeps no state. In the backward phase `values` are gradients.
    """

    def __call__(self, values: "Tensor", normals: "Tensor", **settings: OwnValue) -> "Tensor":
        """Return `values` with their error."""
        ...


class ScheduleFunction(Protocol):
    """A schedule: `def my_schedule(step, num_steps, num_epochs, **settings)` returns AQN's sigma.

    step: optimiser steps that are done, from 0 to num_steps. It returns a finite number from 0 to the announced
    `sigma_max`, the same for the same arguments: relative for noise on hidden states, in the units of the weights for
    noise on norms.
    """

    def __call__(self, step: int, num_steps: int, num_epochs: int, **settings: OwnValue) -> float:
        """Return sigma after `step` optimiser steps."""
        ...


_Size = Annotated[float, Field(ge=0)]


_TOLERANCE = 0.1
"""Relative deviation of a size from what was announced that is accepted as an approximation of the user's."""

_STANDARD_ERRORS = 5.0
_LARGEST_KURTOSIS = 9.0
"""Of the errors, for the standard error of their root mean square: 3 for a normal distribution, 6 for Laplace's."""


class OwnError(FrozenModel):
    """A custom error model: a function with the signature `ErrorFunction`."""

    kind: Literal["own"] = "own"
    function: OwnFunction = Field(
        description="package.module:function of (values, normals, **settings), run with your rights"
    )
    settings: dict[str, OwnValue] = Field(default={}, description="passed to the function by name")
    draws: int = Field(
        default=1, ge=0, le=MOST_DRAWS, description="independent normal numbers per element; 0: it is not random"
    )
    quantity: Literal["relative", "absolute"] = Field(
        default="relative", description="what size is of: (y' - y)/y over values other than 0, or y' - y"
    )
    size: _Size | tuple[_Size, _Size] = Field(
        description="announced root mean square of the error, or its limits [low, high]; what is measured must agree "
        "within 10 % and the error of the measurement"
    )
    source_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$", description="set by the workflow")

    @model_validator(mode="after")
    def _sizes_are_in_order(self) -> Self:
        low, high = self.sizes
        if high == 0 or low > high:
            raise ValueError(f"size: found {self.size}, expected a number above 0, or [low, high] with low below high")
        return self

    @property
    def sizes(self) -> tuple[float, float]:
        """Limits of the announced size."""
        return self.size if isinstance(self.size, tuple) else (self.size, self.size)

    def size_problem(
        self, measured: float, count: int, what: str, limits: tuple[float, float] | None = None
    ) -> str | None:
        """Return how a size that was measured over `count` values disagrees with the announced one; None if it agrees.

        `limits`: those of the announced size with what rounding makes of them.
        """
        low, high = self.sizes if limits is None else limits
        tolerance = _TOLERANCE + _STANDARD_ERRORS * math.sqrt((_LARGEST_KURTOSIS - 1) / (4 * count))
        if low * max(1 - tolerance, 0.0) <= measured <= high * (1 + tolerance):
            return None
        announced = f"{self.size:g}" if isinstance(self.size, float) else "{:g} to {:g}".format(*self.sizes)
        size = f"a measured {self.quantity} size of {measured:.4g} over {count:,} {what}"
        return f"{self.function} has {size}, announced {announced}"

    def planned(self) -> "OwnError":
        """Return this error with the digest of its source; ConfigError if there is none, or another."""
        digest = planned_digest(self.function, self.source_sha256, "source_sha256")
        return self.model_copy(update={"source_sha256": digest})


class OwnSchedule(FrozenModel):
    """A schedule of a user's own, which is a function of the contract `ScheduleFunction`."""

    kind: Literal["own"] = "own"
    function: OwnFunction = Field(
        description="package.module:function of (step, num_steps, num_epochs, **settings), run with your rights"
    )
    settings: dict[str, OwnValue] = Field(default={}, description="passed to the function by name")
    sigma_max: float = Field(gt=0, description="announced upper limit of sigma")
    source_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$", description="set by the workflow")
    sigmas: tuple[float, ...] | None = Field(
        default=None, description="after each number of steps; a job computes them with the function, not to be given"
    )

    @model_validator(mode="after")
    def _sigmas_are_possible(self) -> Self:
        if self.sigmas is not None and not all(0 <= sigma <= self.sigma_max for sigma in self.sigmas):
            raise ValueError("sigmas: expected numbers from 0 to sigma_max")
        return self

    def planned(self) -> "OwnSchedule":
        """Return this schedule with the digest of its source; ConfigError if there is none, or another."""
        digest = planned_digest(self.function, self.source_sha256, "source_sha256")
        return self.model_copy(update={"source_sha256": digest})


def is_usable_sigma(sigma: object, largest: float) -> TypeGuard[Real]:
    """Return whether a schedule may return `sigma`: a finite number, also one of NumPy's, from 0 to `largest`."""
    return isinstance(sigma, Real) and not isinstance(sigma, bool) and 0 <= float(sigma) <= largest
