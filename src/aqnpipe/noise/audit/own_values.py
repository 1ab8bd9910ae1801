"""The values that an error model of a user's own gives to sampled elements, computed a second time.

The function is the same, for its definition is all there is. Everything else is derived anew: the keys, the normal
numbers (in numpy) and the elements, which the function gets apart from the tensor that they belong to. A function that
keeps a state, draws numbers of its own, or mixes elements gives other values here.
"""

import numpy as np
import torch
from torch import Tensor

from aqnpipe.config.own_functions import as_config_error, unchanged_function
from aqnpipe.config.own_noise import OwnError
from aqnpipe.noise.audit.random_numbers import Draws, FloatArray, IntArray, derived_key, normals


def own_values(
    clean: FloatArray, error: OwnError, dtype: torch.dtype, draws: Draws, elements: IntArray
) -> tuple[FloatArray, FloatArray]:
    """Return what the function of `error` makes of `clean`, and how far the kernels' normals may move each result.

    The kernels' numbers differ slightly from those in numpy. The second array is the sum over draws of the largest
    change of the result when a number is moved by that difference, so it also covers a step at exactly this number.
    Raises ConfigError if the function raises here.
    """
    drawn = [normals(elements, _of_draw(draws, number)) for number in range(error.draws)]
    numbers = np.stack([z for z, _ in drawn]) if drawn else np.zeros((0, *clean.shape))
    values = torch.from_numpy(clean).to(torch.float64 if dtype == torch.float64 else torch.float32)

    def of(changed: FloatArray) -> FloatArray:
        return _called(error, values, torch.from_numpy(changed).to(values.dtype, copy=True))

    expected, slack = of(numbers), np.zeros(clean.shape)
    for number, (_, difference) in enumerate(drawn):
        moved = []
        for sign in (-1, 1):
            shifted = numbers.copy()
            shifted[number] += sign * difference
            moved.append(np.abs(of(shifted) - expected))
        slack += np.maximum(*moved)
    # Numbers of the function's own would count as what moving the normals changes. NaN contradicts any value.
    return np.where(of(numbers) == expected, expected, np.nan), slack


def _of_draw(draws: Draws, number: int) -> Draws:
    """Return the random numbers of draw `number`: the first has the key itself, others have keys derived from it."""
    if number == 0:
        return draws
    keys, places = np.unique(draws.key, return_inverse=True)
    derived = np.array([derived_key(int(key), "own draw", number) for key in keys], np.uint64)
    return draws._replace(key=derived[places].reshape(draws.key.shape))


def _called(error: OwnError, values: Tensor, drawn: Tensor) -> FloatArray:
    call = unchanged_function(error.function, error.source_sha256 or "")
    with torch.no_grad(), as_config_error(error.function, f"for {values.numel()} values by themselves"):
        found = call(values.clone(), drawn, **error.settings)
    # Whatever is no tensor of these elements has none of the values that were used.
    if not isinstance(found, Tensor) or (found.shape, found.device) != (values.shape, values.device):
        return np.full(tuple(values.shape), np.nan)
    return np.asarray(found.detach().double().numpy())
