"""The experts of a mixture one by one, with known answers.

In transformers the experts of a layer are one module with the weights of all in two three-dimensional parameters. It
is called with the experts of every token given, so that each expert meets its own tokens: the first half of a token's
experts is a turn through all of them, the others have a factor of 0. Up and down projection of every expert select
other channels, and the gate is where the activation is the identity, so that the output is known up to a few roundings
of the core.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from aqnpipe.diagnosis.checks import Check, compare
from aqnpipe.diagnosis.patterns import accumulating_operands, selection, selection_weight
from aqnpipe.diagnosis.reference import (
    FEW_ROWS,
    FLOAT32_EPS,
    LEAST_ROWS,
    PRODUCT_BITS,
    full_mantissas,
    mantissa_bits,
    substituted,
)
from aqnpipe.error_bounds import few_roundings

EXPERT_SITE = "experts"

_OPENING = {torch.float16: 16.0}
_WIDE_OPENING = 128.0
"""Gate at which silu and gelu are the identity."""
_TOKENS_PER_EXPERT = 8
_SHARE_BITS = 8
_BLOCK = 4
"""Inputs of one cancelling sum; see `cancelling_operands`."""
_LEAST_TERMS = 8


def experts_of(layer: nn.Module) -> nn.Module | None:
    """Return the module of all experts of a layer; None without grouped weights of gate, up and down projection."""
    for module in layer.modules():
        shapes = [getattr(getattr(module, name, None), "ndim", 0) for name in ("gate_up_proj", "down_proj")]
        if shapes == [3, 3] and _is_plain(module):
            return module
    return None


@dataclass(frozen=True)
class _Batch:
    """Tokens [tokens, hidden], the expert that each is for, its choices and their shares [tokens, experts of a token].

    `number` is that of each token among those that were drawn. `index` starts with the own expert, which is the only
    one with a share in `alone`. `shares` are those of all.
    """

    number: Tensor
    x: Tensor
    own: Tensor
    index: Tensor
    alone: Tensor
    shares: Tensor

    def rows(self, count: int) -> "_Batch":
        """Return the first `count` tokens; more than there are repeat them."""
        chosen = torch.arange(count) % len(self.x)
        parts = (self.number, self.x, self.own, self.index, self.alone, self.shares)
        return _Batch(*(part[chosen] for part in parts))


def probe_experts(module: nn.Module, layer: int, top_k: int, generator: torch.Generator) -> list[Check]:
    """Return one check per expert, at the sites `experts.0`, `experts.1` and so on, and one of the sum at `experts`."""
    gate_up, down = module.gate_up_proj, module.down_proj
    if not isinstance(gate_up, Tensor) or not isinstance(down, Tensor):
        return []
    count, hidden, width = down.shape
    batch = _drawn_batch(count, hidden, top_k, gate_up.dtype, generator)
    up = [_turned(selection(width, hidden, skip=1), expert) for expert in range(count)]
    shown_up = torch.stack([_gate_and_up(chosen, signs, gate_up) for chosen, signs in up])
    results: list[tuple[Tensor, Tensor, Tensor]] = []
    sums = []
    for turn in range(-(-width // hidden)):  # every channel between the projections reaches an output
        picked = [_turned(_slice_of_selection(hidden, width, turn), expert) for expert in range(count)]
        shown_down = torch.stack([selection_weight(chosen, signs, down[0]) for chosen, signs in picked])
        answers = torch.stack([_answers(batch.x, *chosen) for chosen in zip(up, picked, strict=True)])
        calls = [batch] if turn else [batch.rows(count) for count in _numbers_of_rows(len(batch.x))]
        with substituted([(gate_up, shown_up), (down, shown_down)]):
            for call in calls:
                results.append((call.own, answers[call.own, call.number], _run(module, down, call, call.alone)))
                if top_k > 1 and turn == 0:
                    terms = answers[call.index.T, call.number] * call.shares.T.unsqueeze(-1)
                    sums.append(_sum_check(layer, terms, _run(module, down, call, call.shares)))
    return _checks_by_expert(layer, count, results) + sums + _accumulators(module, layer, batch, generator)


def _accumulators(module: nn.Module, layer: int, batch: _Batch, generator: torch.Generator) -> list[Check]:
    """Return one check per projection of sums that a narrow accumulator gets wrong; one weight serves all experts.

    The gate reads the first channel, and the sums the channels behind the first block of four. Those of the up
    projection are copied by the down projection. Those of the down projection are of channels that the up projection
    copies, in whole blocks of four: a kernel may split a sum between blocks.
    """
    down = module.get_parameter("down_proj")
    _, hidden, width = down.shape
    num_inputs, dtype = hidden - _BLOCK, down.dtype
    terms = min(width, num_inputs) // _BLOCK * _BLOCK
    if terms < _LEAST_TERMS:
        return []
    copied, signs = selection(hidden, width)
    x, weight, answer, allowed = accumulating_operands(_TOKENS_PER_EXPERT, width, num_inputs, dtype, generator)
    calls = [(x, weight, selection_weight(copied, signs, down[0]), answer[:, copied] * signs, allowed)]
    # Each term has passed the activation, whose last bits in float32 are free: larger terms would hide what is lost.
    kind = torch.bfloat16 if dtype == torch.float32 else dtype
    x, of_down, answer, allowed = accumulating_operands(_TOKENS_PER_EXPERT, hidden, terms, kind, generator)
    allowed = (0.0 if dtype == torch.float32 else allowed) + 4 * FLOAT32_EPS * x.abs().sum(1, keepdim=True)
    blocks = torch.arange(terms // _BLOCK) * (width // _BLOCK) // (terms // _BLOCK)
    channels = (blocks.unsqueeze(1) * _BLOCK + torch.arange(_BLOCK)).flatten()
    weight = torch.zeros(width, num_inputs, dtype=torch.float64)
    weight[channels, torch.arange(terms)] = 1.0
    spread = torch.zeros(hidden, width, dtype=torch.float64)
    spread[:, channels] = of_down
    padded = torch.nn.functional.pad(x, (0, num_inputs - terms))
    calls.append((padded, weight, spread.to(down), answer, allowed))
    return [_accumulator_check(module, layer, batch, *operands) for operands in calls]


def _accumulator_check(
    module: nn.Module, layer: int, batch: _Batch, x: Tensor, weight: Tensor, down: Tensor, answer: Tensor, free: Tensor
) -> Check:
    """Run every expert on tokens `x` with the up projection `weight` and compare with `answer`, of one expert each."""
    gate_up, own = module.get_parameter("gate_up_proj"), module.get_parameter("down_proj")
    opening = _OPENING.get(own.dtype, _WIDE_OPENING)
    shown = torch.zeros(gate_up.shape[1:], dtype=torch.float64)
    shown[: len(weight), 0] = opening
    shown[len(weight) :, _BLOCK:] = weight / opening
    token = batch.number // len(own)
    first = torch.zeros(len(x), _BLOCK, dtype=torch.float64)
    first[:, 0] = 1.0
    fed = replace(batch, x=torch.cat([first, x], 1)[token])
    every = [(gate_up, shown.to(gate_up).repeat(len(own), 1, 1)), (own, down.repeat(len(own), 1, 1))]
    with substituted(every):
        observed = _run(module, own, fed, fed.alone)
    wanted = answer[token]
    allowed = few_roundings(wanted, observed.dtype) + free[token]
    return compare("experts", layer, EXPERT_SITE, wanted, observed, allowed=allowed)


def _drawn_batch(count: int, hidden: int, top_k: int, dtype: torch.dtype, generator: torch.Generator) -> _Batch:
    """Return tokens with full mantissas, some for each of `count` experts; their first channel is 1, for the gate."""
    bits = min(mantissa_bits(dtype), PRODUCT_BITS)
    x = full_mantissas((_TOKENS_PER_EXPERT * count, hidden), bits, generator)
    x[:, 0] = 1.0
    number = torch.arange(len(x))
    own = number % count
    index = torch.stack([(own + turn) % count for turn in range(top_k)], dim=1)
    alone = torch.zeros(len(x), top_k, dtype=torch.float64)
    alone[:, 0] = 1.0
    return _Batch(number, x, own, index, alone, _drawn_shares(len(x), top_k, generator))


def _numbers_of_rows(num_tokens: int) -> tuple[int, ...]:
    """Return numbers of tokens of a call: kernels are chosen by it, and on some devices experts have a capacity."""
    return (num_tokens, *FEW_ROWS, LEAST_ROWS) if num_tokens < LEAST_ROWS else (num_tokens, *FEW_ROWS)


def _run(module: nn.Module, like: Tensor, batch: _Batch, share: Tensor) -> Tensor:
    """Return the output of the experts for a batch, in the dtype and on the device of `like`."""
    output: Tensor = module(batch.x.to(like), batch.index.to(like.device), share.to(like))
    return output.cpu()


def _checks_by_expert(layer: int, count: int, results: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[Check]:
    """Return one check per expert of `results`, which are own expert, right and observed output of every token."""
    own, expected, observed = (torch.cat(part) for part in zip(*results, strict=True))
    checks = []
    for expert in range(count):
        wanted, seen = expected[own == expert], observed[own == expert]
        site = f"{EXPERT_SITE}.{expert}"
        checks.append(compare("experts", layer, site, wanted, seen, allowed=few_roundings(wanted, seen.dtype)))
    return checks


def _answers(x: Tensor, up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor]) -> Tensor:
    """Return the output of an expert for every token, from the selections that its projections make."""
    (chosen, signs), (below, of_down) = up, down
    return x[:, chosen[below]] * signs[below] * of_down


def _sum_check(layer: int, terms: Tensor, observed: Tensor) -> Check:
    """Compare the sum over the experts of a token with `terms` [experts of a token, tokens, channels]."""
    magnitudes, dtype = terms.abs().sum(0), observed.dtype
    # Every product and every addition may be rounded to the dtype.
    allowed = few_roundings(magnitudes, dtype) + (1 + len(terms)) * torch.finfo(dtype).eps / 2 * magnitudes
    return compare("experts", layer, EXPERT_SITE, terms.sum(0), observed, allowed=allowed)


def _drawn_shares(num_tokens: int, top_k: int, generator: torch.Generator) -> Tensor:
    """Return shares [tokens, experts of a token] of 8 significant bits, from 1/16 to 1, float64."""
    shares = full_mantissas((num_tokens, top_k), _SHARE_BITS, generator).abs() / 2
    return shares * 2.0 ** -torch.randint(0, 4, shares.shape, generator=generator).double()


def _gate_and_up(chosen: Tensor, signs: Tensor, like: Tensor) -> Tensor:
    """Return the weight [gate and up, hidden] of an expert whose gate is constant, like one of those of `like`."""
    opening = _OPENING.get(like.dtype, _WIDE_OPENING)
    first = torch.zeros(len(chosen), dtype=torch.long)
    constant = torch.full((len(chosen),), opening, dtype=torch.float64)
    return selection_weight(torch.cat([first, chosen]), torch.cat([constant, signs / opening]), like[0])


def _slice_of_selection(out_features: int, in_features: int, turn: int) -> tuple[Tensor, Tensor]:
    """Return a selection of `out_features` inputs; over all turns every input is selected."""
    chosen, signs = selection(max(out_features, in_features), in_features)
    rows = (torch.arange(out_features) + turn * out_features) % len(chosen)
    return chosen[rows], signs[rows]


def _turned(selected: tuple[Tensor, Tensor], by: int) -> tuple[Tensor, Tensor]:
    """Return a selection whose choices are moved by some rows, so that no two experts have the same."""
    return selected[0].roll(by), selected[1]


def _is_plain(module: nn.Module) -> bool:
    """Return whether gate and up rows lie one after the other and nothing is added: not so in GPT-OSS."""
    gate_up, down = module.gate_up_proj, module.down_proj
    if not isinstance(gate_up, Tensor) or not isinstance(down, Tensor):
        return False
    shapes_fit = gate_up.shape[1] == 2 * down.shape[2] and gate_up.shape[2] == down.shape[1]
    return shapes_fit and not hasattr(module, "gate_up_proj_bias")
