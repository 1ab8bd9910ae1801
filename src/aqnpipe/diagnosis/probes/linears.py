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
from dataclasses import replace
from functools import partial
from math import prod

import torch
from torch import Tensor, nn

from aqnpipe.diagnosis.capture import gradients_of, hooked, on_host, substituted
from aqnpipe.diagnosis.checks import Bench, Check, compare
from aqnpipe.diagnosis.probes import patterns
from aqnpipe.diagnosis.probes.patterns import Product, selecting_weights, selection_of
from aqnpipe.error_bounds import linear_bound
from aqnpipe.models.layout import LayerSites
from aqnpipe.seeding import keyed_generator

LEAST_TERMS = 8
"""Fewer cancel in no way that an accumulator could get wrong."""

_NUM_BIASED = 8
"""Tokens of the probe of the bias, whose answer no position in the batch changes."""

SMALL = (1, 4, 8, 97)
LARGE = 4096
"""Rows with which the linears of every layer run, and those of one layer."""

_NUM_TOKENS = 32
SMALL_OF_GRADIENTS = (1, _NUM_TOKENS)
LARGE_OF_GRADIENTS = 513
"""Tokens of the selections: kernels are chosen by their number. The large one runs in one layer."""


def selecting(layer: int, name: str, module: nn.Linear, inputs: patterns.ProbeInputs) -> list[Check]:
    """Run the linear with outputs that each copy one input with a sign, and then times a weight of all mantissa bits.

    The first half of the batch has full mantissas in its inputs, the second half in its weight.
    """
    half, plain = inputs.num_tokens // 2, selection_of(module)
    generator = torch.Generator().manual_seed(inputs.seed + layer)
    factors = patterns.mantissas((module.out_features,), inputs.bits, generator)
    full = Product(inputs.square(module.in_features)[:half, 0], plain)
    powers = Product(inputs.powers(module.in_features)[half:, 0], plain.times(factors))
    return _single_tokens("linear", layer, name, module, full) + _single_tokens("mantissa", layer, name, module, powers)


def summing(layer: int, name: str, module: nn.Linear, inputs: patterns.ProbeInputs) -> list[Check]:
    """Run the linear in its real shape on small integers, and on sums that cancel but need wide accumulators."""
    checks = []
    for probe, pattern, rows in (
        ("integer", patterns.integer_product, inputs.num_tokens // 2),
        ("accumulator", patterns.accumulating_product, min(inputs.num_tokens, len(inputs.ladder))),
    ):
        if probe == "integer" or module.in_features >= LEAST_TERMS:
            generator = keyed_generator("cpu", inputs.seed, f"diagnosis.{probe}", layer, *name.encode())
            product = pattern(rows, module.out_features, module.in_features, inputs.dtype, generator)
            checks += _single_tokens(probe, layer, name, module, product)
    return checks


def biased(layer: int, name: str, module: nn.Linear, inputs: patterns.ProbeInputs) -> list[Check]:
    """Run a linear with a bias of full mantissas on products of -1, 0 and 1; all sums are exact.

    The bias has one bit less than the dtype, for the carry.
    """
    if module.bias is None:
        return []
    generator = keyed_generator("cpu", inputs.seed, "diagnosis.bias", layer, *name.encode())
    x = torch.randint(-1, 2, (_NUM_BIASED, module.in_features), generator=generator).double()
    x[0] = 0
    bias = -patterns.signs((module.out_features,), generator)
    bias *= patterns.mantissas((module.out_features,), patterns.mantissa_bits(inputs.dtype) - 1, generator)
    return _single_tokens("bias", layer, name, module, Product(x, selection_of(module), bias=bias))


def _single_tokens(probe: str, layer: int, name: str, module: nn.Linear, product: Product) -> list[Check]:
    return run_product(probe, layer, name, module, product, [(len(product.x), 1)])


def run_product(
    probe: str, layer: int, site: str, module: nn.Linear, product: Product, calls: Sequence[tuple[int, ...]]
) -> list[Check]:
    """Run the linear on the rows of a product, in calls of (sequences, tokens), and compare.

    A third number of a call is a spacing: the tokens then are every so manieth row of a longer sequence in memory.
    """
    weight, start, checks = module.weight, 0, []
    shown = [(weight, product.weight.weight(weight))]
    if module.bias is not None:
        shown.append((module.bias, torch.zeros_like(module.bias) + torch.as_tensor(product.bias).to(module.bias)))
    with substituted(shown):
        for sequences, tokens, *spacing in calls:
            step, rows = prod(spacing), slice(start, start + sequences * tokens)
            fed = weight.new_zeros(sequences, tokens * step, module.in_features)[:, step - 1 :: step]
            fed.copy_(product.x[rows].reshape(fed.shape))
            checks.append(product.check(probe, layer, site, module(fed), rows))
            start = rows.stop
    return checks


def monomial(layer: int, name: str, module: nn.Linear, fed: Tensor, own: Tensor) -> Check:
    """Run a linear on half of `fed` with rows shifted by a third and scaled by +-1, +-2 or +-1/2; `own` is its output.

    A device that adds in another order at another place rounds differently: both results may be off by the forward
    error bound of their sum.
    """
    num_rows, half = module.out_features, -(-len(fed) // 2)
    fed, own = fed[:half], own[:half]
    number = torch.arange(num_rows)
    scale = 1.0 - 2 * (number % 2)
    if module.weight.dtype != torch.float16:  # halving would lose bits of small float16 numbers
        scale = scale * 2.0 ** (number % 3 - 1)
    weight, bias = module.weight, module.bias
    factors, rows = scale.to(weight), number.roll(num_rows // 3).to(weight.device)
    shown: list[tuple[Tensor, Tensor]] = [(weight, weight.data[rows] * factors.unsqueeze(1))]
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
    first = patterns.Selection(torch.zeros(module.out_features, dtype=torch.long), torch.ones(module.out_features))
    with substituted(selecting_weights(module, first)):
        kept = module(x)[:, 0, 0] == x[:, 0, 0]
    return int(kept.cpu().long().cumprod(0).sum())


def zeroed(*modules: nn.Linear) -> Iterator[tuple[Tensor, Tensor]]:
    """Replace weights and biases by 0."""
    for module in modules:
        yield module.weight, torch.zeros_like(module.weight)
        yield from patterns.zero_bias(module)


def rows_of_layer(layer: int, num_layers: int, seed: int) -> tuple[int, ...]:
    """Return the numbers of rows with which the linears of a layer run."""
    return (*SMALL, LARGE) if layer == seed % num_layers else SMALL


@contextmanager
def selecting_in_model(layers: Sequence[LayerSites], record: Callable[[Check], None]) -> Iterator[None]:
    """Give every linear of the layers a weight whose outputs each copy one input, for the time of each of its calls."""
    shown = ExitStack()

    def enter(module: nn.Linear, args: tuple[Tensor, ...]) -> None:
        with on_host():
            weights = list(selecting_weights(module))
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
    with shown, hooked(handles):
        yield


def copied(probe: str, layer: int, site: str, module: nn.Linear, fed: Tensor, output: Tensor) -> Check:
    """Compare the output of a selecting linear with its input; NaN times the zeros of the weight has no answer.

    Products may keep fewer bits than float32 has, if torch allows it, and a device may flush numbers that are not
    normal.
    """
    with on_host():
        rows, observed = (tensor.detach().cpu().flatten(0, -2) for tensor in (fed, output))
        finite = rows.isfinite().all(-1)
        if not finite.all():
            rows, observed = rows[finite], observed[finite]
        expected = selection_of(module).product(rows)
        bits, allowed = patterns.operand_bits(rows.dtype), torch.finfo(rows.dtype).tiny
        share = 0.0 if bits >= patterns.mantissa_bits(rows.dtype) else 2.0 ** (1 - bits)
        return compare(probe, layer, site, expected, observed, allowed=lambda: expected.abs() * share + allowed)


def probe_shapes(name: str, module: nn.Linear, rows: Sequence[int], bench: Bench) -> list[Check]:
    """Run a linear with each of these numbers of rows, which are one sequence, as in a prefill; one is one token."""
    size = (module.out_features, module.in_features, module.weight.dtype)
    product = patterns.selecting_product(sum(rows), *size, bench.generator)
    return run_product("shapes", bench.layer, name, module, product, [(1, count) for count in rows])


def probe_gradients(name: str, module: nn.Linear, bench: Bench, *, large: bool = False) -> list[Check]:
    """Return the checks of both gradients of a linear, of many tokens too if `large`; those that the model has
    accumulated are left alone.
    """
    (outputs, inputs), like = module.weight.shape, (module.weight.dtype, bench.generator)
    wide = (patterns.accumulating_product,) if min(outputs, inputs) >= LEAST_TERMS else ()
    checks = []
    for pattern in (patterns.integer_product, *wide):
        of_input = pattern(_NUM_TOKENS, inputs, outputs, *like)
        of_weight = pattern(outputs, inputs, _NUM_TOKENS, *like)
        seen, _ = _gradients(module, torch.zeros(_NUM_TOKENS, inputs), _weight_of(of_input, like[0]), of_input.x)
        _, other = _gradients(module, _weight_of(of_weight, like[0]), torch.zeros(outputs, inputs), of_weight.x.T)
        checks += _of_gradients(name, bench, (of_input, seen), (of_weight, other))
    for tokens in (*SMALL_OF_GRADIENTS, LARGE_OF_GRADIENTS) if large else SMALL_OF_GRADIENTS:
        of_input = patterns.selecting_product(tokens, inputs, outputs, *like)
        of_weight = replace(patterns.selecting_product(outputs, inputs, tokens, *like), x=of_input.x.T)
        seen, other = _gradients(module, _weight_of(of_weight, like[0]), _weight_of(of_input, like[0]), of_input.x)
        checks += _of_gradients(name, bench, (of_input, seen), (of_weight, other))
    return checks


def _weight_of(product: Product, dtype: torch.dtype) -> Tensor:
    """Return the transposed weight of a product, which stands in the backward pass for another operand."""
    shape = (product.weight.num_outputs, product.x.shape[-1])
    return product.weight.weight(torch.zeros(shape, dtype=dtype)).T


def _of_gradients(
    name: str, bench: Bench, of_input: tuple[Product, Tensor | None], of_weight: tuple[Product, Tensor | None]
) -> list[Check]:
    return [
        product.check("backward", bench.layer, f"{name}.{operand}_gradient", seen)
        for operand, (product, seen) in (("input", of_input), ("weight", of_weight))
        if seen is not None
    ]


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
    leaf = x.unsqueeze(1).requires_grad_(True)
    with substituted([(weight, test_weight)]):
        weight.requires_grad_(True)
        try:
            of_input, of_weight = gradients_of(lambda: module(leaf), (leaf, weight), gradient.unsqueeze(1))
        finally:
            weight.requires_grad_(required)
    return None if of_input is None else of_input.squeeze(1), of_weight
