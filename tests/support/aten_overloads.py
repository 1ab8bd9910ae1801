"""Every overload of `torch.ops.aten`, calls of them with made-up arguments, and a test of whether a call contracts.

A call contracts two of its operands if an output is a sum of products of their elements: some output element y changes
with a_i and b_j together (its mixed difference is not 0), and with a_k and b_l, with i != k and j != l. An element-wise
product has one such pair per output, a norm with a weight one weight per output, a matrix product has many.
"""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

SIZE = 3
_ATTEMPTS = 64
_STEP = 0.125


def overloads() -> list[torch._ops.OpOverload]:
    """Return all overloads of all operators of `torch.ops.aten` that this torch has registered."""
    names = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::")}
    found = []
    for name in sorted(names):
        packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
        found += [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    return found


def tensor_inputs(overload: torch._ops.OpOverload) -> int:
    """Return the number of tensors that an overload reads; a list of tensors counts as two."""
    kinds = [str(argument.type) for argument in overload._schema.arguments if not argument.is_out]
    return sum(2 if "List[Tensor]" in kind or "List[Optional" in kind else "Tensor" in kind for kind in kinds)


def _values(argument, shape: tuple[int, ...], generator: torch.Generator) -> list[object]:
    """Return values to try for one argument; tensors are in (0.2, 0.8), where every function is smooth."""
    kind, name = str(argument.type), argument.name

    def floats(*sizes: int) -> Tensor:
        return torch.rand(sizes or shape, generator=generator, dtype=torch.float64) * 0.6 + 0.2

    integers = torch.arange(SIZE).flip(0).expand(shape).contiguous() if shape else torch.tensor(1)
    flat = torch.arange(SIZE).flip(0)
    if argument.is_out:
        return [torch.empty(0, dtype=torch.float64)]
    if kind == "Optional[Tensor]" and name not in ("weight", "bias", "min", "max", "values"):
        return [None]
    if kind in ("Tensor", "Optional[Tensor]"):
        if name in ("index", "indices", "mask", "condition", "repeats", "mask2"):
            return [flat, integers, integers > 1, flat > 1]
        return [floats(), integers, integers > 1, floats(SIZE)]
    if "List[Optional[Tensor]]" in kind:
        return [[flat]]
    if "List[Tensor]" in kind:
        return [[floats(), floats()]]
    if argument.has_default_value():
        return [argument.default_value]
    return {
        "int": [1, 0, 2],
        "float": [0.5],
        "number": [2],
        "bool": [False],
        "str": ["sum", "mean", "none", "tanh"],
        "List[int]": [[1], [SIZE], list(shape), []],
    }.get(kind, [None])


def _random(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 0.6 + 0.2


_SPECIAL: dict[str, Callable[[], list]] = {
    "aten.native_group_norm.default": lambda: [_random(1, 2, SIZE), _random(2), _random(2), 1, 2, SIZE, 1, 1e-5],
    "aten.select_scatter.default": lambda: [_random(SIZE, SIZE), _random(SIZE), 0, 1],
    "aten.scatter.reduce": lambda: [_random(SIZE), 0, torch.tensor([2, 1, 0]), _random(SIZE), "multiply"],
    "aten.scatter_.reduce": lambda: [_random(SIZE), 0, torch.tensor([2, 1, 0]), _random(SIZE), "multiply"],
    "aten.scatter.value_reduce": lambda: [_random(SIZE), 0, torch.tensor([2, 1, 0]), 2, "multiply"],
    "aten.scatter_.value_reduce": lambda: [_random(SIZE), 0, torch.tensor([2, 1, 0]), 2, "multiply"],
    "aten.scatter_reduce.two": lambda: [_random(SIZE), 0, torch.tensor([2, 1, 0]), _random(SIZE), "prod"],
}
"""Arguments that have to fit together."""


def calls(overload: torch._ops.OpOverload) -> Iterator[tuple[list, dict]]:
    """Yield arguments with which `overload` runs, of several shapes; none if no call was found."""
    arguments = overload._schema.arguments
    if str(overload) in _SPECIAL:
        values = _SPECIAL[str(overload)]()
        taken = [value for value, argument in zip(values, arguments, strict=False) if not argument.kwarg_only]
        yield taken, {a.name: value for value, a in zip(values, arguments, strict=False) if a.kwarg_only}
        return
    for shape in ((SIZE, SIZE), (SIZE,), (2, SIZE, SIZE), (1, 2, SIZE, SIZE), ()):
        generator = torch.Generator().manual_seed(0)
        tried = itertools.product(*(_values(argument, shape, generator) for argument in arguments))
        for values in itertools.islice(tried, _ATTEMPTS):
            positional = [value for value, argument in zip(values, arguments, strict=True) if not argument.kwarg_only]
            keywords = {a.name: value for value, a in zip(values, arguments, strict=True) if a.kwarg_only}
            try:
                _run(overload, positional, keywords)
            except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
                continue
            yield positional, keywords
            break


def _run(overload: torch._ops.OpOverload, positional: list, keywords: dict) -> Tensor:
    """Return all floating-point outputs of a call on copies of its arguments, as one vector."""
    copies = torch.utils._pytree.tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, (positional, keywords))
    torch.manual_seed(0)
    leaves = [leaf for leaf in tree_leaves(overload(*copies[0], **copies[1])) if isinstance(leaf, Tensor)]
    outputs = [leaf for leaf in leaves if leaf.dtype.is_floating_point and leaf.layout == torch.strided]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(leaf.double().flatten() for leaf in outputs)])


def contracts(overload: torch._ops.OpOverload, positional: list, keywords: dict) -> bool:
    """Return whether an output of this call is a sum of products of elements of two operands."""
    arguments = (positional, keywords)
    operands = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.dtype == torch.float64]
    return any(_are_contracted(overload, arguments, *pair) for pair in itertools.combinations(operands, 2))


def _are_contracted(overload: torch._ops.OpOverload, arguments: tuple, left: Tensor, right: Tensor) -> bool:
    places = [range(min(operand.numel(), SIZE + 1)) for operand in (left, right)]
    plain = _run(overload, *arguments)
    alone = [
        [_changed(overload, arguments, (operand, i)) for i in places[n]] for n, operand in enumerate((left, right))
    ]
    seen: dict[int, set[tuple[int, int]]] = {}
    for i, j in itertools.product(*places):
        together = _changed(overload, arguments, (left, i), (right, j))
        if not plain.shape == together.shape == alone[0][i].shape == alone[1][j].shape:
            continue
        mixed = together - alone[0][i] - alone[1][j] + plain
        for output in mixed.nan_to_num().abs().gt(1e-6).nonzero().flatten().tolist():
            pairs = seen.setdefault(output, set())
            if any(i != other_i and j != other_j for other_i, other_j in pairs):
                return True
            pairs.add((i, j))
    return False


def _changed(overload: torch._ops.OpOverload, arguments: tuple, *places: tuple[Tensor, int]) -> Tensor:
    """Return the outputs after a small step of some elements of the operands."""
    for operand, place in places:
        operand.view(-1)[place] += _STEP
    try:
        return _run(overload, *arguments)
    finally:
        for operand, place in places:
            operand.view(-1)[place] -= _STEP
