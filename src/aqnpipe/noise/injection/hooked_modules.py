"""The modules that an injection has put hooks on; a module that takes the place of one of them has no noise."""

from torch import nn

from aqnpipe.errors import ModelError
from aqnpipe.models.layout import output_projection, path_of_layers


class HookedModules:
    """The decoder layers and the output projection of `model` with all modules inside, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._path = path_of_layers(model)
        self._modules = self._present()

    def refuse_others(self) -> None:
        """Raise ModelError if a module has been replaced, added or removed since."""
        present = self._present()
        # Modules compare by identity, and equal lists of them take microseconds.
        if present != self._modules:
            raise ModelError(
                f"{type(self._model).__name__}: {self._first_other()} was replaced, added or removed while noise is "
                "installed, which does not reach new modules; expected the change before the noise begins"
            )

    def _present(self) -> list[nn.Module | None]:
        found: list[nn.Module | None] = [_child(self._model, self._path), output_projection(self._model)]
        # The list grows while it is read.
        for module in found:
            found.extend(module._modules.values() if module is not None else ())
        return found

    def _first_other(self) -> str:
        known = set(self._modules)
        others = (name for name, module in self._model.named_modules() if module not in known)
        inside = (name for name in others if f"{name}.".startswith(f"{self._path}."))
        return next(inside, f"a module of {self._path} or the output projection")


def _child(module: nn.Module, path: str) -> nn.Module | None:
    found: nn.Module | None = module
    for name in path.split("."):
        found = found._modules.get(name) if found is not None else None
    return found
