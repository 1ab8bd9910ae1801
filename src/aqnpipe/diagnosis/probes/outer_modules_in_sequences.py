"""The ends of the model inside whole sequences: embedding, input of the first layer, final norm, lm_head.

Each module is compared by itself, and what it reads with what was written before it. lm_head runs on a test weight
whose rows each copy one input, so that the logits of every call are known bit for bit. A number that is not finite,
although everything before it was, is a fault of the place where it first occurs.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from aqnpipe.diagnosis.checks import OUTSIDE_LAYERS, compare
from aqnpipe.diagnosis.probes.attention import Observation
from aqnpipe.diagnosis.probes.layers import norm_offset, subtracts_mean
from aqnpipe.diagnosis.probes.linears import copied, selecting_weights
from aqnpipe.diagnosis.probes.norms import has_answer, norm_in_model
from aqnpipe.diagnosis.probes.outer_modules import looked_up, outer_norms
from aqnpipe.diagnosis.probes.patterns import selection
from aqnpipe.diagnosis.probes.reference import on_host, substituted
from aqnpipe.diagnosis.probes.trace import first_input, first_tensor
from aqnpipe.models.layout import decoder_layers, matrices_outside, output_projection, weight_of
from aqnpipe.models.sites import LayerSites

FINITE = "finite_in_sequence"
FIRST_INPUT = "first_layer_input"
FINAL_NORM = "final_norm"
HANDOFFS = "inputs of the first layer, of the final norm and of lm_head"

_ROWS_AT_ONCE = 512
"""Rows of logits that are compared at once, which are large."""
_LARGEST_SQUARE = 2.0**48
"""Healthy devices may overflow on the squares of larger numbers."""


@dataclass
class OuterModulesObserver:
    """Hooks on the ends of a model. `known`: the way between them is that of a model type on which it was tried.

    `clean`: sequences of which all numbers so far were finite, and small enough to be squared.
    """

    model: nn.Module
    observation: Observation
    untested: dict[str, str]
    known: bool
    embedded: Tensor | None = None
    positions: list[Tensor] = field(default_factory=list)
    left: Tensor | None = None
    normed: Tensor | None = None
    raw: Tensor | None = None
    shown: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        """Name what cannot be compared."""
        self.clean = torch.ones(len(self.observation.padding), dtype=torch.bool)
        self.has_handoffs = self.known and not matrices_outside(self.model)
        self.norm = outer_norms(self.model).get(FINAL_NORM)
        if not self.has_handoffs:
            reason = "other matrices stand between them" if self.known else "not tried on this model type"
            self.untested[HANDOFFS] = reason
        elif self.norm is None:
            self.untested["inputs of the final norm and of lm_head"] = "the final norm has no weight"

    def hooks(self, layers: Sequence[LayerSites]) -> list[RemovableHandle]:
        """Register all hooks; the test weight of lm_head is put back after every call of it."""
        embedding = self.model.get_input_embeddings()  # type: ignore[operator]
        handles = [embedding.register_forward_hook(self._embed)]
        inside = set(decoder_layers(self.model).modules())
        for module in self.model.modules():
            if isinstance(module, nn.Embedding) and module is not embedding and module not in inside:
                handles.append(module.register_forward_hook(lambda m, a, out: self.positions.append(out)))
        first = layers[0].layer
        handles.append(
            first.register_forward_pre_hook(lambda m, a, kw: self._begin(first_input(a, kw)), with_kwargs=True)
        )
        for index, sites in enumerate(layers):
            handles.append(
                sites.layer.register_forward_hook(lambda m, a, out, i=index: self._leave(i, first_tensor(out)))
            )
        if self.norm is not None:
            handles.append(self._norm_hook(self.norm))
        return handles + self._head_hooks(output_projection(self.model))

    def finish(self, logits: Tensor) -> None:
        """Compare the logits with finite numbers, once a call of the model is over."""
        self._watch(OUTSIDE_LAYERS, "lm_head", logits)
        self.embedded, self.left, self.normed, self.raw = None, None, None, None
        self.positions.clear()

    def _embed(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.embedded = output
        plain = self.known or type(module) is nn.Embedding
        if plain and isinstance(module.weight, Tensor) and args:
            with on_host():
                expected = looked_up(module, args[0])
            self._compare("embedding", "embedding", expected, output)

    def _begin(self, hidden: Tensor) -> None:
        """Compare the input of the first layer with the embedding of tokens, plus that of positions if there is one."""
        self._watch(OUTSIDE_LAYERS, "embedding", hidden)
        if not self.has_handoffs or self.embedded is None:
            return
        with on_host():
            wanted = self.embedded.detach().cpu()
            for term in self.positions:
                wanted = wanted + term.detach().cpu()
        self._compare("chain", FIRST_INPUT, wanted, hidden)

    def _leave(self, index: int, output: Tensor) -> None:
        self.left = output
        self._watch(index, "layer_output", output)

    def _norm_hook(self, module: nn.Module) -> RemovableHandle:
        """Compare what the final norm reads, and what it makes of it."""
        weight = weight_of(module)
        plain = has_answer(module) and (self.known or type(module) is nn.LayerNorm)
        unit = norm_offset(module, weight.dtype, weight.device) if plain and not subtracts_mean(module) else 0.0

        def check(own: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            self.normed = output
            if self.has_handoffs and self.left is not None:
                self._compare("chain", "final_norm_input", self.left, args[0])
            if plain:
                with on_host():
                    found = norm_in_model(own, OUTSIDE_LAYERS, FINAL_NORM, unit, args[0], output)
                self.observation.checks.append(found)

        return module.register_forward_hook(check)

    def _head_hooks(self, head: nn.Module) -> list[RemovableHandle]:
        """Compare what lm_head reads. A linear has a test weight from here to the end of its call, also if it is tied
        to the embedding.
        """
        pairs: list[tuple[Tensor, Tensor]] = []
        if isinstance(head, nn.Linear):
            pairs = list(selecting_weights(head, selection(head.out_features, head.in_features)))

        def enter(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            self._watch(OUTSIDE_LAYERS, FINAL_NORM, args[0])
            if self.has_handoffs and self.normed is not None:
                self._compare("chain", "lm_head_input", self.normed, args[0])
            self.shown.enter_context(substituted(pairs))

        def leave(module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
            self.shown.close()
            self.raw = output
            if pairs:
                parts = (tensor.flatten(0, -2).split(_ROWS_AT_ONCE) for tensor in (args[0], output))
                for fed, logits in zip(*parts, strict=True):
                    self.observation.checks.append(copied("head", OUTSIDE_LAYERS, "lm_head", module, fed, logits))

        return [head.register_forward_pre_hook(enter), head.register_forward_hook(leave)]

    def _compare(self, probe: str, site: str, wanted: Tensor, seen: Tensor) -> None:
        self.observation.checks.append(compare(probe, OUTSIDE_LAYERS, site, wanted.cpu(), seen))

    def _watch(self, layer: int, site: str, tensor: Tensor) -> None:
        """Record a mismatch if sequences that were clean have a number that is not finite; padding has no answer."""
        with on_host():
            host = tensor.detach().cpu()
            tokens = torch.arange(self.observation.seen, self.observation.seen + host.shape[1])
            real = (tokens >= self.observation.padding.unsqueeze(1)).unsqueeze(-1)
            finite = (host.isfinite() | ~real).flatten(1).all(1)
            broken = self.clean & ~finite
            small = (host.abs() < _LARGEST_SQUARE) | ~real  # not so where NaN
            self.clean = self.clean & small.flatten(1).all(1)
            if not broken.any():
                return
            if host.dtype == torch.float16 and layer != OUTSIDE_LAYERS:
                self.untested["layers behind the first number that is not finite"] = "float16 may overflow there"
                return
            own = host[broken]
            wanted = torch.where(own.isfinite() | ~real[broken], own, 0)
            self.observation.checks.append(compare(FINITE, layer, site, wanted, own))
