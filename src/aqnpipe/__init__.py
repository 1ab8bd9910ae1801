"""aqnpipe: declarative experiments on noise-robust post-training of language models, with measured noise in every run.

`aqnpipe.diagnose(model)` diagnoses the machine with a model in memory, `aqnpipe.noisy(model, scale=0.05)` puts noise on
its matrix products, `aqnpipe.sensitivity(model, texts)` finds its fragile layers, and `aqnpipe.compare` compares graded
answers. `aqnpipe.AQNCallback` puts AQN into a stock trainer of TRL. They are imported on first use, because they need
torch or scipy. The imports are relative so that the digest of the code of a stage (artifacts/provenance.py), which
follows imports by their full names, does not include the diagnosis for every stage.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .diagnosis.api import diagnose as diagnose
    from .diagnosis.sensitivity.layers import sensitivity as sensitivity
    from .integrations.aqn_callback import AQNCallback as AQNCallback
    from .noise.noisy import noisy as noisy
    from .statistics.compare import compare as compare

__version__ = "0.1.0"

_PUBLIC = {
    "AQNCallback": ".integrations.aqn_callback",
    "compare": ".statistics.compare",
    "diagnose": ".diagnosis.api",
    "noisy": ".noise.noisy",
    "sensitivity": ".diagnosis.sensitivity.layers",
}
"""Public functions and classes by the module that defines them."""


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
