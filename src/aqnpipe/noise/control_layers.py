"""Chooses the layers that get noise in a control of targeted noise."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from aqnpipe.errors import DataError
from aqnpipe.seeding import derive_seed


def control_layers(
    layers: Sequence[int],
    targets: Sequence[int],
    kind: Literal["healthy_layers", "wrong_layers", "random_layers"],
    seed: int,
) -> list[int]:
    """Return the sorted layers of a control of noise in `targets`, none of which are targets.

    healthy_layers: all other layers. wrong_layers: as many layers as targets, the farthest from them in depth.
    random_layers: as many layers as targets, drawn with `seed`. If fewer layers are left, all of them. Raises DataError
    if all layers are targets.
    """
    others = [layer for layer in layers if layer not in targets]
    if not others:
        raise DataError(f"{kind}: all {len(layers)} layers are targeted, expected some that are not")
    count = min(len(targets), len(others))
    match kind:
        case "healthy_layers":
            return others
        case "wrong_layers":
            distance = {layer: min(abs(layer - target) for target in targets) for layer in others}
            return sorted(sorted(others, key=lambda layer: (-distance[layer], layer))[:count])
        case "random_layers":
            draws = np.random.default_rng(derive_seed(seed, "sigmas.random_layers"))
            return sorted(int(layer) for layer in draws.choice(others, size=count, replace=False))
