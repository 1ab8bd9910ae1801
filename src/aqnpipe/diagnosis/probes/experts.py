"""The experts of a mixture one by one, with known answers.

In transformers the experts of a layer are one module with the weights of all in two three-dimensional parameters. It
is called with the experts of every token given, so that each expert meets its own tokens: the first half of a token's
experts is a turn through all of them, the others have a factor of 0. Up and down projection of every expert select
other channels, and the gate is where the activation is the identity, so that the output is known up to a few roundings
of the core.

The router has known answers, too: its logits, the experts that it chooses, and their shares. A router scores experts by
the softmax of its logits, or by their sigmoid if it has a bias that corrects the choice. It may choose groups of
experts first. The host makes the same choice in float64. Tokens whose choice a rounding could change are left out of
that comparison, by the margin on the host, so a device never decides what is compared.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from aqnpipe.diagnosis.capture import substituted
from aqnpipe.diagnosis.checks import Bench, Check
from aqnpipe.diagnosis.probes import patterns
from aqnpipe.diagnosis.probes.linears import LEAST_TERMS
from aqnpipe.diagnosis.probes.patterns import FEW_ROWS, FLOAT32_EPS, LEAST_ROWS, Selection, full_mantissas, selection
from aqnpipe.error_bounds import TWO_ROUNDINGS, few_roundings

EXPERT_SITE = "experts"

_TOKENS_PER_EXPERT = 8
_SHARE_BITS = 8
_BLOCK = 4
"""Inputs of one cancelling sum; see `accumulating_product`."""

ROUTER_SITE = "router"
_ROUTER_ROWS = (LEAST_ROWS, 96, *FEW_ROWS)
"""Numbers of tokens of a call; kernels are chosen by it."""
_SPANS_OF_LOGITS = (16.0, 4.0, 1.0)
"""Differences of the largest and the smallest logit of a token."""
_CLEAR = 2.0**-18
"""Relative difference of two scores that no rounding in float32 bridges: a sigmoid, the bias, and a sum of two."""
_NUM_SUMMED = 32
_BIAS_BITS = 8


def experts_of(layer: nn.Module) -> nn.Module | None:
    """Return the module of all experts of a layer; None without grouped weights of gate, up and down projection.

    Gate and up rows have to lie one after the other and nothing may be added: not so in GPT-OSS.
    """
    for module in layer.modules():
        gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
        if not (isinstance(gate_up, Tensor) and isinstance(down, Tensor) and gate_up.ndim == down.ndim == 3):
            continue
        shapes_fit = gate_up.shape[1] == 2 * down.shape[2] and gate_up.shape[2] == down.shape[1]
        if shapes_fit and not hasattr(module, "gate_up_proj_bias"):
            return module
    return None


@dataclass(frozen=True)
class _Experts:
    """The experts of a layer, their weights, and how to call them; `index` of a token starts with its own expert.

    `alone` are shares [tokens, experts of a token] of which the own expert has all. There are tokens for each expert.
    """

    module: nn.Module
    gate_up: nn.Parameter
    down: nn.Parameter
    index: Tensor
    alone: Tensor

    @classmethod
    def of(cls, module: nn.Module, top_k: int) -> "_Experts":
        down = module.get_parameter("down_proj")
        own = torch.arange(_TOKENS_PER_EXPERT * len(down))
        index = torch.stack([(own + turn) % len(down) for turn in range(top_k)], dim=1)
        alone = torch.zeros(len(own), top_k, dtype=torch.float64)
        alone[:, 0] = 1.0
        return cls(module, module.get_parameter("gate_up_proj"), down, index, alone)

    def run(self, x: Tensor, index: Tensor, shares: Tensor) -> Tensor:
        """Return the output for tokens [tokens, hidden] with these experts and shares."""
        output: Tensor = self.module(x.to(self.down), index.to(self.down.device), shares.to(self.down))
        return output.cpu()

    def gate_and_up(self, chosen: Selection) -> Tensor:
        """Return the weight [gate and up, hidden] of an expert whose gate is constant."""
        opening = patterns.opening_of(self.down.dtype)
        both = torch.cat([torch.zeros_like(chosen.chosen), chosen.chosen])
        factors = torch.cat([torch.full_like(chosen.factors, opening), chosen.factors / opening])
        return Selection(both, factors).weight(self.gate_up[0])


def probe_experts(module: nn.Module, top_k: int, bench: Bench) -> list[Check]:
    """Return one check per expert, at the sites `experts.0`, `experts.1` and so on, and one of the sum at `experts`."""
    experts = _Experts.of(module, top_k)
    count, hidden, width = experts.down.shape
    num_tokens = _TOKENS_PER_EXPERT * count
    bits = min(patterns.mantissa_bits(experts.down.dtype), patterns.PRODUCT_BITS)
    x = full_mantissas((num_tokens, hidden), bits, bench.generator)
    x[:, 0] = 1.0  # for the gate
    # Shares of 8 significant bits, from 1/16 to 1.
    shares = full_mantissas((num_tokens, top_k), _SHARE_BITS, bench.generator).abs() / 2
    shares = shares * 2.0 ** -torch.randint(0, 4, shares.shape, generator=bench.generator).double()
    up = [_turned(selection(width, hidden, skip=1), expert) for expert in range(count)]
    shown_up = torch.stack([experts.gate_and_up(chosen) for chosen in up])
    # Kernels are chosen by the number of tokens, and on some devices experts have a capacity.
    calls = (num_tokens, *FEW_ROWS, *((LEAST_ROWS,) if num_tokens < LEAST_ROWS else ()))
    results: list[tuple[Tensor, Tensor, Tensor]] = []
    sums = []
    for turn in range(-(-width // hidden)):  # every channel between the projections reaches an output
        picked = [_turned(_slice_of_selection(hidden, width, turn), expert) for expert in range(count)]
        shown_down = torch.stack([chosen.weight(experts.down[0]) for chosen in picked])
        answers = torch.stack([below.product(above.product(x)) for above, below in zip(up, picked, strict=True)])
        with substituted([(experts.gate_up, shown_up), (experts.down, shown_down)]):
            for rows in calls[:1] if turn else calls:
                token = torch.arange(rows) % num_tokens
                index, own = experts.index[token], experts.index[token, 0]
                results.append((own, answers[own, token], experts.run(x[token], index, experts.alone[token])))
                if top_k > 1 and turn == 0:
                    terms = answers[index.T, token] * shares[token].T.unsqueeze(-1)
                    sums.append(_sum_check(bench, terms, experts.run(x[token], index, shares[token])))
    own, expected, observed = (torch.cat(part) for part in zip(*results, strict=True))
    checks = []
    for expert in range(count):
        wanted, seen = expected[own == expert], observed[own == expert]
        allowed = few_roundings(wanted, seen.dtype)
        checks.append(bench.compare("experts", f"{EXPERT_SITE}.{expert}", wanted, seen, allowed))
    return checks + sums + _accumulators(experts, bench)


def _accumulators(experts: _Experts, bench: Bench) -> list[Check]:
    """Return one check per projection of sums that a narrow accumulator gets wrong; one weight serves all experts.

    The gate reads the first channel, and the sums the channels behind the first block of four. Those of the up
    projection are copied by the down projection. Those of the down projection are of channels that the up projection
    copies, in whole blocks of four: a kernel may split a sum between blocks.
    """
    _, hidden, width = experts.down.shape
    num_inputs, dtype = hidden - _BLOCK, experts.down.dtype
    terms = min(width, num_inputs) // _BLOCK * _BLOCK
    if terms < LEAST_TERMS:
        return []
    copied = selection(hidden, width)
    product = patterns.accumulating_product(_TOKENS_PER_EXPERT, width, num_inputs, dtype, bench.generator)
    weight = product.weight.weight(torch.zeros(width, num_inputs, dtype=torch.float64))
    answer, free = copied.product(product.weight.product(product.x)), torch.as_tensor(product.allowed)
    checks = [_accumulator_check(experts, bench, product.x, weight, copied.weight(experts.down[0]), answer, free)]
    # Each term has passed the activation, whose last bits in float32 are free: larger terms would hide what is lost.
    kind = torch.bfloat16 if dtype == torch.float32 else dtype
    product = patterns.accumulating_product(_TOKENS_PER_EXPERT, hidden, terms, kind, bench.generator)
    free = 4 * FLOAT32_EPS * product.x.abs().sum(1, keepdim=True)
    if dtype != torch.float32:
        free += torch.as_tensor(product.allowed)
    blocks = torch.arange(terms // _BLOCK) * (width // _BLOCK) // (terms // _BLOCK)
    channels = (blocks.unsqueeze(1) * _BLOCK + torch.arange(_BLOCK)).flatten()
    weight = torch.zeros(width, num_inputs, dtype=torch.float64)
    weight[channels, torch.arange(terms)] = 1.0
    spread = torch.zeros(hidden, width, dtype=torch.float64)
    spread[:, channels] = product.weight.weight(spread[:, :terms])
    x = torch.nn.functional.pad(product.x, (0, num_inputs - terms))
    answer = product.weight.product(product.x)
    return [*checks, _accumulator_check(experts, bench, x, weight, spread.to(experts.down), answer, free)]


def _accumulator_check(
    experts: _Experts, bench: Bench, x: Tensor, weight: Tensor, down: Tensor, answer: Tensor, free: Tensor
) -> Check:
    """Run every expert on tokens `x` with the up projection `weight` and compare with `answer`, of one expert each."""
    count, opening = len(experts.down), patterns.opening_of(experts.down.dtype)
    shown = torch.zeros(experts.gate_up.shape[1:], dtype=torch.float64)
    shown[: len(weight), 0] = opening
    shown[len(weight) :, _BLOCK:] = weight / opening
    token = torch.arange(len(experts.index)) // count
    first = torch.zeros(len(x), _BLOCK, dtype=torch.float64)
    first[:, 0] = 1.0
    weights = [
        (experts.gate_up, shown.to(experts.gate_up).repeat(count, 1, 1)),
        (experts.down, down.repeat(count, 1, 1)),
    ]
    with substituted(weights):
        observed = experts.run(torch.cat([first, x], 1)[token], experts.index, experts.alone)
    wanted = answer[token]
    free = patterns.with_cuts(free[token], x[token], wanted, observed)
    return bench.compare("experts", EXPERT_SITE, wanted, observed, few_roundings(wanted, observed.dtype) + free)


def _sum_check(bench: Bench, terms: Tensor, observed: Tensor) -> Check:
    """Compare the sum over the experts of a token with `terms` [experts of a token, tokens, channels]."""
    magnitudes, dtype = terms.abs().sum(0), observed.dtype
    # Every product and every addition may be rounded to the dtype.
    allowed = few_roundings(magnitudes, dtype) + (1 + len(terms)) * torch.finfo(dtype).eps / 2 * magnitudes
    return bench.compare("experts", EXPERT_SITE, terms.sum(0), observed, allowed)


def _slice_of_selection(out_features: int, in_features: int, turn: int) -> Selection:
    """Return a selection of `out_features` inputs; over all turns every input is selected."""
    every = selection(max(out_features, in_features), in_features)
    rows = (torch.arange(out_features) + turn * out_features) % every.num_outputs
    return Selection(every.chosen[rows], every.factors[rows])


def _turned(selected: Selection, by: int) -> Selection:
    """Return a selection whose choices are moved by some rows, so that no two experts have the same."""
    return replace(selected, chosen=selected.chosen.roll(by))


def router_of(layer: nn.Module) -> nn.Module | None:
    """Return the router of a layer: a module named gate or router whose weight has a row per expert."""
    for path, module in layer.named_modules():
        weight = getattr(module, "weight", None)
        if path.rsplit(".", 1)[-1] in ("gate", "router") and isinstance(weight, nn.Parameter) and weight.ndim == 2:
            return module
    return None


@dataclass(frozen=True)
class _Settings:
    """Treatment of a router's logits. `bias` corrects the scores of the choice but not the shares."""

    bias: Tensor | None
    num_groups: int
    kept_groups: int
    is_normalised: bool
    factor: float


def probe_router(module: nn.Module, bench: Bench) -> list[Check]:
    """Return the checks of a router: its logits, the experts that it chooses for them, their shares, and its sums.

    Row e of the weight copies channel e, so a token has the logits that it carries, distinct and with full mantissas.
    No check where it returns anything but logits, shares and experts of every token, or has more experts than inputs.
    """
    weight = module.get_parameter("weight")
    count, hidden = weight.shape
    if count > hidden:
        return []
    bits = min(patterns.mantissa_bits(weight.dtype), patterns.PRODUCT_BITS)
    logits = _drawn_logits(count, bits, bench.generator)
    settings = _settings(module, count, bench.generator)
    identity = Selection(torch.arange(count), torch.ones(count)).weight(weight)
    checks: list[Check] = []
    for rows in _ROUTER_ROWS:
        x = torch.zeros(rows, hidden, dtype=torch.float64)
        x[:, :count] = own = logits[:rows]
        output = _run_router(module, identity, settings.bias, x)
        if output is None:
            return []
        seen, shares, chosen = output
        checks.append(bench.compare("router", ROUTER_SITE, own, seen))
        checks.append(bench.compare("router", ROUTER_SITE, *_choices(own, chosen, settings)))
        checks.append(bench.compare("router", ROUTER_SITE, *_shares(own, chosen, shares, settings)))
    if hidden < LEAST_TERMS:
        return checks
    # Logits that are sums of many products, which a narrow accumulator gets wrong.
    product = patterns.accumulating_product(_NUM_SUMMED, count, hidden, weight.dtype, bench.generator)
    output = _run_router(module, product.weight.weight(weight), settings.bias, product.x)
    return checks if output is None else [*checks, product.check("router", bench.layer, ROUTER_SITE, output[0])]


def _settings(module: nn.Module, count: int, generator: torch.Generator) -> _Settings:
    """Return the settings of a router, with a test bias: positive, for masked groups may have a score of 0."""
    bias = getattr(module, "e_score_correction_bias", None)
    if isinstance(bias, Tensor):
        drawn = patterns.mantissas((count,), _BIAS_BITS, generator) * 2.0 ** -torch.randint(
            2, 5, (count,), generator=generator
        )
        bias = drawn.to(bias.dtype)
    return _Settings(
        bias=bias,
        num_groups=int(getattr(module, "num_group", 1) or 1),
        kept_groups=int(getattr(module, "topk_group", 1) or 1),
        is_normalised=bool(getattr(module, "norm_topk_prob", True)),  # Mixtral has no such setting and normalises
        factor=float(getattr(module, "routed_scaling_factor", 1.0) or 1.0),
    )


def _run_router(
    module: nn.Module, weight: Tensor, bias: Tensor | None, x: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return on the host the logits, shares and experts of tokens `x`; None if the output is of another form."""
    own: Tensor = module.get_parameter("weight")
    replaced = [(own, weight)]
    for name, shown in (("bias", None), ("e_score_correction_bias", bias)):
        extra = getattr(module, name, None)
        if isinstance(extra, Tensor):
            replaced.append((extra, torch.zeros_like(extra) if shown is None else shown.to(extra)))
    with substituted(replaced):
        output = module(x.to(own.device, own.dtype))
    if not isinstance(output, tuple) or len(output) != 3 or not all(isinstance(part, Tensor) for part in output):
        return None
    logits, shares, chosen = (part.detach().cpu() for part in output)
    if logits.shape != (len(x), len(own)) or shares.shape != chosen.shape or chosen.is_floating_point():
        return None
    return logits, shares, chosen.long()


def _drawn_logits(count: int, bits: int, generator: torch.Generator) -> Tensor:
    """Return logits [tokens, experts]: distinct numbers of `bits` bits, close together or far apart."""
    ranks = torch.rand(max(_ROUTER_ROWS), count, generator=generator).argsort(-1)
    moved = torch.rand(ranks.shape, generator=generator, dtype=torch.float64) - 0.5
    moved *= 0.5 if count <= 2 ** (bits - 4) else 0.0  # with more experts, rounding would make two of them equal
    spans = torch.tensor(_SPANS_OF_LOGITS, dtype=torch.float64)[torch.arange(len(ranks)) % len(_SPANS_OF_LOGITS)]
    logits = (ranks - count / 2 + 0.5 + moved) * (spans / count).unsqueeze(1)
    unit = torch.ldexp(torch.ones_like(logits), torch.frexp(logits).exponent - bits)
    return (logits / unit).round() * unit


def _choices(logits: Tensor, chosen: Tensor, settings: _Settings) -> tuple[Tensor, Tensor]:
    """Return which experts every token has to choose, and has chosen, in any order, where the choice is clear."""
    count = logits.shape[-1]
    scores = _scores(logits, settings)
    is_clear = torch.ones(len(logits), dtype=torch.bool)
    if settings.bias is not None:
        scores = scores + settings.bias.double()
    if settings.num_groups > 1:
        grouped = scores.unflatten(-1, (settings.num_groups, -1))
        kept, is_clear = _largest(grouped.topk(2, -1).values.sum(-1), settings.kept_groups)
        scores = torch.where(kept.unsqueeze(-1), grouped, -torch.inf).flatten(1)
    wanted, is_clear_too = _largest(scores, chosen.shape[-1])
    is_clear = is_clear & is_clear_too
    # An expert that does not exist equals none, and one chosen twice counts once.
    found = (chosen.unsqueeze(-1) == torch.arange(count)).any(1)
    return wanted[is_clear].double(), found[is_clear].double()


def _scores(logits: Tensor, settings: _Settings) -> Tensor:
    return logits.softmax(-1) if settings.bias is None else logits.sigmoid()


def _largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return which `count` scores of each row are the largest, and for which rows this is clear."""
    ordered, order = scores.sort(-1, descending=True)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order[:, :count], True)
    if count >= scores.shape[-1]:
        return chosen, torch.ones(len(scores), dtype=torch.bool)
    last, next_one = ordered[:, count - 1], ordered[:, count]
    return chosen, last - next_one > _CLEAR * last.abs()


def _shares(logits: Tensor, chosen: Tensor, shares: Tensor, settings: _Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Return the shares of the chosen experts by their scores, as they are or with sum 1; as seen; the roundings."""
    number_format = torch.finfo(shares.dtype)
    eps = 0.0 if shares.dtype == torch.float32 else number_format.eps
    wanted = _scores(logits, settings).gather(1, chosen.clamp(0, logits.shape[-1] - 1))
    if settings.is_normalised:
        wanted = wanted / wanted.sum(-1, keepdim=True)
    wanted = wanted * settings.factor
    return wanted, shares, (16 * FLOAT32_EPS + TWO_ROUNDINGS * eps) * wanted + number_format.tiny
