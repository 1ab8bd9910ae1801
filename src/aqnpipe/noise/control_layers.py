"""Which layers a control of targeted noise puts its noise in."""

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
    """Return the layers of a control of noise in `targets`: none of these, sorted.

    healthy_layers: all others. wrong_layers: as many as there are targets, the farthest from them in depth.
    random_layers: as many, drawn by `seed`. Where fewer are left, all of them. DataError if none is.
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
