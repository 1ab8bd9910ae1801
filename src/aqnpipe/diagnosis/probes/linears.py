"""Probes of single linear modules: selections, full mantissas, sums of integers, and a permutation of its own rows.

Every answer but those of the monomial probe and of the running sums in 16 bits is exact in any order of summation, so
every bit must agree.

Linears also run with other numbers of rows: one (decode), few, as many as a prefill, and enough to fill a large device.
Libraries choose a kernel by the shape of the operands, and a fault of one shows in no other. Every linear runs with 1,
4, 8 and 97 rows, the last an odd number beyond whole tiles, and within the model with those of a long sequence. The
largest batch runs in one layer that the seed sets: repeated runs with other seeds cover the rest.

The backward products of a linear have known answers, too: gradients of its input and of its weight. Operands are
integers whose sums are exact in any order, selections with full mantissas, and sums that need wide accumulators, as in
the forward probes. The backward pass has kernels of its own: the operands of its products are transposed differently.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from aqnpipe.diagnosis.checks import Check, compare
from aqnpipe.diagnosis.probes.patterns import (
    ProbeInputs,
    accumulating_operands,
    cancelling_operands,
    integer_operands,
    mantissas,
    running_operands,
    selection,
    selection_weight,
    with_cuts,
)
from aqnpipe.diagnosis.probes.reference import (
    PRODUCT_BITS,
    full_mantissas,
    mantissa_bits,
    on_host,
    operand_bits,
    substituted,
    zero_bias,
)
from aqnpipe.error_bounds import linear_bound, sum_bound
from aqnpipe.models.sites import LayerSites
from aqnpipe.seeding import keyed_generator

Replacement = tuple[Tensor, Tensor]

_LEAST_INPUTS = 8
"""Fewer cancel in no way that an accumulator could get wrong."""

_NUM_BIASED = 8
_NUM_RUNNING = 16
"""Tokens of the probes of the bias and of running sums, whose answer no position in the batch changes."""

SMALL = (1, 4, 8, 97)
LARGE = 4096
"""Rows with which the linears of every layer run, and those of one layer."""

_NUM_TOKENS = 32
SMALL_OF_GRADIENTS = (1, _NUM_TOKENS)
LARGE_OF_GRADIENTS = 513
"""Tokens of the selections: kernels are chosen by their number. The large one runs in one layer."""
_LEAST_TERMS = 8


def selecting(layer: int, name: str, module: nn.Linear, inputs: ProbeInputs) -> list[Check]:
    """Run the linear with outputs that each copy one input with a sign, and then times a weight of all mantissa bits.

    The first half of the tokens has full mantissas in the input, the second in the weight.
    """
    half = inputs.num_tokens // 2
    chosen, signs = selection(module.out_features, module.in_features)
    x = inputs.square(module.in_features)[:half]
    powers = inputs.powers(module.in_features)[half:]
    factors = signs * mantissas((module.out_features,), inputs.bits, torch.Generator().manual_seed(inputs.seed + layer))
    checks = []
    for probe, fed, weights in (("linear", x, signs), ("mantissa", powers, factors)):
        with substituted(selecting_weights(module, chosen, weights)):
            checks.append(compare(probe, layer, name, selected(fed, chosen, weights), module(fed)))
    return checks


def summing(layer: int, name: str, module: nn.Linear, inputs: ProbeInputs) -> list[Check]:
    """Run the linear in its real shape on small integers, and on sums that cancel but need wide accumulators."""
    size = (module.out_features, module.in_features, inputs.dtype)
    key = ("diagnosis.integer", layer, *name.encode())
    integers = integer_operands(inputs.num_tokens // 2, *size, keyed_generator("cpu", inputs.seed, *key))
    checks = [_product("integer", layer, name, module, integers)]
    if module.in_features >= _LEAST_INPUTS:
        tokens = min(inputs.num_tokens, len(inputs.ladder))
        key = ("diagnosis.cancelling", layer, *name.encode())
        operands = cancelling_operands(tokens, *size, keyed_generator("cpu", inputs.seed, *key))
        checks.append(_product("accumulator", layer, name, module, operands, 0.0))
        key = ("diagnosis.running", layer, *name.encode())
        operands = running_operands(_NUM_RUNNING, *size, keyed_generator("cpu", inputs.seed, *key))
        x, weight, _ = operands
        free = torch.zeros(())
        if inputs.dtype != torch.float32:  # kernels that split a sum may round its parts to 16 bits
            free = sum_bound(x.abs() @ weight.abs().T, module.in_features, inputs.dtype)
        checks.append(_product("accumulator", layer, name, module, operands, free))
    return checks


def biased(layer: int, name: str, module: nn.Linear, inputs: ProbeInputs) -> list[Check]:
    """Run a linear with a bias of full mantissas on products of -1, 0 and 1; all sums are exact.

    The bias has one bit less than the dtype, for the carry.
    """
    if module.bias is None:
        return []
    key = ("diagnosis.bias", layer, *name.encode())
    generator = keyed_generator("cpu", inputs.seed, *key)
    chosen, signs = selection(module.out_features, module.in_features)
    x = torch.randint(-1, 2, (_NUM_BIASED, module.in_features), generator=generator).double()
    x[0] = 0
    own = 1.0 - 2 * torch.randint(0, 2, (module.out_features,), generator=generator).double()
    own *= mantissas((module.out_features,), mantissa_bits(inputs.dtype) - 1, generator)
    shown = [(module.weight, selection_weight(chosen, signs, module.weight)), (module.bias, own.to(module.bias))]
    with substituted(shown):
        output = module(x.unsqueeze(1).to(module.weight.device, inputs.dtype))
    return [compare("bias", layer, name, x[:, chosen] * signs + own, output)]


def monomial(layer: int, name: str, module: nn.Linear, fed: Tensor, own: Tensor) -> Check:
    """Run a linear on half of `fed` with rows shifted by a third and scaled by +-1, +-2 or +-1/2; `own` is its output.

    A device that adds in another order at another place rounds differently: both results may be off by the forward
    error bound of their sum.
    """
    num_rows, half = module.out_features, -(-len(fed) // 2)
    fed, own = fed[:half], own[:half]
    moved = torch.arange(num_rows).roll(num_rows // 3)
    scale = 1.0 - 2 * (torch.arange(num_rows) % 2)
    if module.weight.dtype != torch.float16:  # halving would lose bits of small float16 numbers
        scale = scale * 2.0 ** (torch.arange(num_rows) % 3 - 1)
    weight, bias = module.weight, module.bias
    factors = scale.to(weight.device, weight.dtype)
    rows = moved.to(weight.device)
    shown: list[Replacement] = [(weight, weight.data[rows] * factors.unsqueeze(1))]
    if bias is not None:
        shown.append((bias, bias.data[rows] * factors))
    with substituted(shown):
        output = module(fed)
        expected = own[..., rows] * factors
        allowed = None if torch.equal(expected, output) else 2 * linear_bound(fed, weight, bias)
    return compare("monomial", layer, name, expected, output, allowed=allowed)


def product_bits(module: nn.Linear) -> int:
    """Return how many significant bits of a float32 operand the products of the linear keep."""
    weight = module.weight
    x = torch.zeros(24, 1, module.in_features, device=weight.device, dtype=weight.dtype)
    x[:, 0, 0] = 1 + 2.0 ** -torch.arange(24).to(weight)  # row k needs k + 1 bits, row 0 holds 2
    chosen = torch.zeros(module.out_features, dtype=torch.long)
    with substituted(selecting_weights(module, chosen, torch.ones(module.out_features, dtype=torch.float64))):
        kept = module(x)[:, 0, 0] == x[:, 0, 0]
    return int(kept.cpu().long().cumprod(0).sum())


def selecting_weights(module: nn.Linear, chosen: Tensor, factors: Tensor) -> Iterator[Replacement]:
    """Replace the weight by `factors` at the chosen inputs, and the bias by 0."""
    yield module.weight, selection_weight(chosen, factors, module.weight)
    yield from zero_bias(module)


def zeroed(*modules: nn.Linear) -> Iterator[Replacement]:
    """Replace weights and biases by 0."""
    for module in modules:
        yield module.weight, torch.zeros_like(module.weight)
        yield from zero_bias(module)


def selected(x: Tensor, chosen: Tensor, factors: Tensor) -> Tensor:
    """Return what a selecting linear must output."""
    return x[..., chosen.to(x.device)] * factors.to(x.device, x.dtype)


def _product(
    probe: str,
    layer: int,
    name: str,
    module: nn.Linear,
    operands: tuple[Tensor, Tensor, Tensor],
    allowed: Tensor | float | None = None,
) -> Check:
    """Compare a product; with `allowed`, of sums that need a wide accumulator."""
    x, weight, product = operands
    own = module.weight
    with substituted([(own, weight.to(own.device, own.dtype)), *zero_bias(module)]):
        output = module(x.unsqueeze(1).to(own.device, own.dtype))
    free = None if allowed is None else with_cuts(allowed, x, product, output)
    return compare(probe, layer, name, product, output, allowed=free)


def rows_of_layer(layer: int, num_layers: int, seed: int) -> tuple[int, ...]:
    """Return the numbers of rows with which the linears of a layer run."""
    return (*SMALL, LARGE) if layer == seed % num_layers else SMALL


@contextmanager
def selecting_in_model(layers: Sequence[LayerSites], record: Callable[[Check], None]) -> Iterator[None]:
    """Give every linear of the layers a weight whose outputs each copy one input, for the time of each of its calls."""
    shown = ExitStack()

    def enter(module: nn.Linear, args: tuple[Tensor, ...]) -> None:
        with on_host():
            weights = selecting_weights(module, *selection(module.out_features, module.in_features))
        shown.enter_context(substituted(weights))

    def leave(layer: int, name: str, module: nn.Linear, args: tuple[Tensor, ...], output: Tensor) -> None:
        shown.close()
        record(copied("shapes", layer, name, module, args[0], output))

    handles = []
    for index, sites in enumerate(layers):
        for name, module in sites.linears.items():
            if type(module).forward is nn.Linear.forward:
                handles.append(module.register_forward_pre_hook(enter))
                handles.append(module.register_forward_hook(partial(leave, index, name)))
    with shown:
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def copied(probe: str, layer: int, site: str, module: nn.Linear, fed: Tensor, output: Tensor) -> Check:
    """Compare the output of a selecting linear with its input; NaN times the zeros of the weight has no answer.

    Products may keep fewer bits than float32 has, if torch allows it, and a device may flush numbers that are not
    normal.
    """
    with on_host():
        chosen, signs = selection(module.out_features, module.in_features)
        rows, observed = (tensor.detach().cpu().flatten(0, -2) for tensor in (fed, output))
        finite = rows.isfinite().all(-1)
        if not finite.all():
            rows, observed = rows[finite], observed[finite]
        expected = rows[:, chosen] * signs.to(rows.dtype)
        bits, allowed = operand_bits(rows.dtype), torch.finfo(rows.dtype).tiny
        share = 0.0 if bits >= mantissa_bits(rows.dtype) else 2.0 ** (1 - bits)
        return compare(probe, layer, site, expected, observed, allowed=expected.abs() * share + allowed)


def probe_shape(name: str, module: nn.Linear, layer: int, rows: int, generator: torch.Generator) -> Check:
    """Run a linear on `rows` rows: every output copies one input, times a factor, both with full mantissas.

    The rows are one sequence, as in a prefill; one row is one token, as in decoding.
    """
    weight = module.weight
    bits = min(mantissa_bits(weight.dtype), PRODUCT_BITS)
    x = full_mantissas((rows, module.in_features), bits, generator)
    chosen, _ = selection(module.out_features, module.in_features)
    shift = int(torch.randint(0, module.in_features, (1,), generator=generator))
    chosen = (chosen + shift) % module.in_features  # another seed reads other columns where rows are few
    factors = full_mantissas((module.out_features,), bits, generator)
    with substituted([(weight, selection_weight(chosen, factors, weight)), *zero_bias(module)]):
        output = module(x.unsqueeze(0).to(weight.device, weight.dtype))
    expected = x[:, chosen].float() * factors.float()  # exact: the product has twice PRODUCT_BITS at most
    return compare("shapes", layer, name, expected, output)


def probe_gradients(
    name: str, module: nn.Linear, layer: int, generator: torch.Generator, *, large: bool = False
) -> list[Check]:
    """Return the checks of both gradients of a linear, of many tokens too if `large`; those that the model has
    accumulated are left alone.
    """
    checks = _summing(name, module, layer, generator)
    for tokens in (*SMALL_OF_GRADIENTS, LARGE_OF_GRADIENTS) if large else SMALL_OF_GRADIENTS:
        checks += _selecting(name, module, layer, tokens, generator)
    if min(module.weight.shape) >= _LEAST_TERMS:
        checks += _accumulating(name, module, layer, generator)
    return checks


def _selecting(name: str, module: nn.Linear, layer: int, tokens: int, generator: torch.Generator) -> list[Check]:
    """Give every value of both gradients one product, of operands with full mantissas.

    The products have 24 bits, or as many as exact products of the dtype have.
    """
    outputs, inputs = module.weight.shape
    dtype = module.weight.dtype
    gradient = full_mantissas((tokens, outputs), min(operand_bits(dtype), 24 - PRODUCT_BITS), generator)
    bits = min(operand_bits(dtype), PRODUCT_BITS)
    of_outputs, factors = selection(inputs, outputs)[0], full_mantissas((inputs,), bits, generator)
    weight = selection_weight(of_outputs, factors, torch.zeros(inputs, outputs, dtype=torch.float64)).T
    of_tokens, values = selection(inputs, tokens)[0], full_mantissas((inputs,), bits, generator)
    x = selection_weight(of_tokens, values, torch.zeros(inputs, tokens, dtype=torch.float64)).T
    seen = _gradients(module, x, weight, gradient)
    wanted = (gradient[:, of_outputs] * factors, gradient[of_tokens].T * values)
    return [
        compare("backward", layer, f"{name}.{operand}_gradient", answer, found)
        for operand, answer, found in zip(("input", "weight"), wanted, seen, strict=True)
        if found is not None
    ]


def _summing(name: str, module: nn.Linear, layer: int, generator: torch.Generator) -> list[Check]:
    """Run both gradients on integers in their real shape."""
    dtype, (outputs, inputs) = module.weight.dtype, module.weight.shape
    gradient, weight, of_input = integer_operands(_NUM_TOKENS, inputs, outputs, dtype, generator)
    seen, _ = _gradients(module, torch.zeros(_NUM_TOKENS, inputs), weight.T, gradient)
    checks = [] if seen is None else [compare("backward", layer, f"{name}.input_gradient", of_input, seen)]
    x, gradient, of_weight = integer_operands(inputs, outputs, _NUM_TOKENS, dtype, generator)
    _, seen = _gradients(module, x.T, torch.zeros(outputs, inputs), gradient.T)
    if seen is not None:
        checks.append(compare("backward", layer, f"{name}.weight_gradient", of_weight, seen.T))
    return checks


def _accumulating(name: str, module: nn.Linear, layer: int, generator: torch.Generator) -> list[Check]:
    """Run both gradients on sums that a narrow accumulator gets wrong."""
    dtype, (outputs, inputs) = module.weight.dtype, module.weight.shape
    gradient, weight, of_input, allowed = accumulating_operands(_NUM_TOKENS, inputs, outputs, dtype, generator)
    seen, _ = _gradients(module, torch.zeros(_NUM_TOKENS, inputs), weight.T, gradient)
    site = f"{name}.input_gradient"
    checks = []
    if seen is not None:
        free = with_cuts(allowed, gradient, of_input, seen)
        checks.append(compare("backward", layer, site, of_input, seen, allowed=free))
    x, gradient, of_weight, allowed = accumulating_operands(inputs, outputs, _NUM_TOKENS, dtype, generator)
    _, seen = _gradients(module, x.T, torch.zeros(outputs, inputs), gradient.T)
    if seen is not None:
        site, free = f"{name}.weight_gradient", with_cuts(allowed, x, of_weight, seen.T)
        checks.append(compare("backward", layer, site, of_weight, seen.T, allowed=free))
    return checks


def _gradients(
    module: nn.Linear, x: Tensor, test_weight: Tensor, gradient: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of input [tokens, in] and weight [out, in] for `gradient` [tokens, out] of the output.

    None where the module (a hook of it) cuts the graph, so that there is no gradient.
    """
    weight = module.weight
    required = weight.requires_grad
    x, test_weight, gradient = (
        tensor.contiguous().to(weight.device, weight.dtype) for tensor in (x, test_weight, gradient)
    )
    with torch.enable_grad(), substituted([(weight, test_weight)]):
        weight.requires_grad_(True)
        try:
            leaf = x.unsqueeze(1).requires_grad_(True)
            output = module(leaf)
            if not output.requires_grad:
                return None, None
            # The graph is kept, because a hook that keeps earlier outputs may have made it a part of a later one.
            found = torch.autograd.grad(
                output, (leaf, weight), gradient.unsqueeze(1), allow_unused=True, retain_graph=True
            )
        finally:
            weight.requires_grad_(required)
    return None if found[0] is None else found[0].squeeze(1), found[1]
