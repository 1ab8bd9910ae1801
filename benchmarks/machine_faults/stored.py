"""Faults of stored weights: the arithmetic is right, the values in memory are not."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from machine_faults.base import MachineFault, layer_module
from machine_faults.bits import flip_bit
from machine_faults.models import Architecture

GROUP = "weights in memory"


def _stored(name: str, role: str, change: Callable[[Tensor], None], **more: Any) -> MachineFault:
    def run(model: nn.Module, architecture: Architecture, layer: int) -> None:
        change(next(layer_module(model, architecture, layer, role).parameters()))

    return MachineFault(f"{role}: {name}", GROUP, weights=run, weight_roles=(role,), **more)


def _swap_rows(weight: Tensor) -> None:
    weight[[2, 3]] = weight[[3, 2]]


def _swap_columns(weight: Tensor) -> None:
    weight[..., [20, 21]] = weight[..., [21, 20]]


def _flip(bit: int) -> Callable[[Tensor], None]:
    def run(weight: Tensor) -> None:
        flat = weight.view(-1)
        index = flat.shape[0] // 3
        flat[index : index + 1] = flip_bit(flat[index : index + 1], bit if weight.element_size() == 4 else bit - 16)

    return run


def _int4(weight: Tensor) -> None:
    scale = weight.abs().amax(-1, keepdim=True) / 7
    weight.copy_((weight / scale).round() * scale)


def _zero_tile(weight: Tensor) -> None:
    weight[4:8, 16:24] = 0


def _one_entry(factor: float) -> Callable[[Tensor], None]:
    def run(weight: Tensor) -> None:
        weight.view(-1)[5] *= factor

    return run


FAULTS = (
    _stored("two rows swapped", "q", _swap_rows),
    _stored("two rows swapped", "down", _swap_rows),
    _stored("two columns swapped", "o", _swap_columns),
    _stored("exponent bit of one weight flipped", "k", _flip(29)),
    _stored("top exponent bit of one weight flipped", "o", _flip(30)),
    _stored("low exponent bit of one weight flipped", "down", _flip(26)),
    _stored("sign of one weight flipped", "v", _flip(31), dtypes=("float32",)),
    _stored("quantised to 4 bits", "up", _int4),
    _stored("quantised to 4 bits", "q", _int4),
    _stored("tile of zeros", "gate", _zero_tile),
    _stored("one gain doubled", "norm1", _one_entry(2.0)),
    _stored("one gain lost", "norm2", _one_entry(0.0)),
    _stored("two rows swapped", "embedding", _swap_rows, where="ends"),
    _stored("tile of zeros", "lm_head", _zero_tile, where="ends"),
    _stored("one gain halved", "final_norm", _one_entry(0.5), where="ends"),
    _stored("rows of an expert swapped", "experts", lambda w: _swap_rows(w[1]), needs=("moe",)),
    _stored("tile of zeros", "router", lambda w: w[1, 8:16].zero_(), needs=("moe",)),
)
