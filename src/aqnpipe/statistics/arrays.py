"""The type of arrays of numbers."""

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
