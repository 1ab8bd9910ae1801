"""Audit of routing: observes which experts of a mixture run, by hooks of its own at the modules that compute them.

What the sampler noted must be what ran in an audited rollout. With routing replay every pass of the policy over sampled
tokens must run exactly these experts, and a backward pass that computes layers again those of its forward.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aqnpipe.artifacts.training_facts import REPLAYED
from aqnpipe.reference.decoder import unobserved
from aqnpipe.training.audit.measure import Ledger
from aqnpipe.training.audit.scoring import RolloutBook, rows_of


class RoutingAudit:
    """Observes the experts of one worker's policy; of a dense model it observes nothing."""

    def __init__(self, model: nn.Module, ledger: Ledger, *, replays: bool) -> None:
        self._ledger, self._report, self._replays = ledger, ledger.report, replays
        self._running: dict[int, Tensor] = {}
        named = (module for name, module in model.named_modules() if name.endswith(".experts"))
        for number, module in enumerate(module for module in named if not isinstance(module, nn.ModuleList)):
            module.register_forward_pre_hook(partial(self._note, number))

    def _note(self, number: int, module: nn.Module, args: Sequence[Any]) -> None:
        found = [value for value in args if isinstance(value, Tensor) and not value.is_floating_point()]
        if not found:
            return
        if torch._C._current_autograd_node() is None:
            self._running[number] = found[0]
        elif self._replays:
            with unobserved():
                if not torch.equal(found[0], self._running[number]):
                    self._report("a backward pass has computed a layer again with other experts than its forward")

    def of_pass(self, rows: int) -> Tensor | None:
        """Return the experts of the last pass, [rows, places, slots] on the host; None if none ran."""
        if not self._running:
            return None
        with unobserved():
            experts = torch.cat([self._running[number] for number in sorted(self._running)], -1)
            return experts.unflatten(0, (rows, -1)).to("cpu", torch.int16)

    def check_replay(self, kwargs: Mapping[str, Any], book: RolloutBook) -> None:
        """Compare the experts of a pass of the policy over completions with those that the sampler noted."""
        if not self._replays:
            return
        rows, experts = rows_of(kwargs)[0], self.of_pass(len(kwargs["input_ids"]))
        for place, (row, visible) in enumerate(zip(rows, kwargs["attention_mask"].bool().cpu(), strict=True)):
            # The sampler did not read the last token.
            found = None if experts is None else experts[place][visible][:-1]
            noted = [completed.experts for completed in book.candidates(row) if completed.experts is not None]
            is_replayed = found is not None and any(torch.equal(found, of_row) for of_row in noted)
            self._ledger.note(REPLAYED, sum(map(len, row)) - 1, 0.0 if is_replayed else 2.0)
            if not is_replayed:
                self._report("a forward pass of the policy has not run the experts that the sampler's routers chose")
