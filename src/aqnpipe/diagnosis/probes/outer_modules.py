"""Probes of the modules before and after the decoder layers: embedding, norms outside the layers, and lm_head."""

import torch
from torch import Tensor, nn

from aqnpipe.diagnosis.checks import OUTSIDE_LAYERS, Check, compare
from aqnpipe.diagnosis.probes.linears import run_product
from aqnpipe.diagnosis.probes.norms import norm_gradient, norm_sweep
from aqnpipe.diagnosis.probes.patterns import accumulating_product, integer_product, selecting_product, signs
from aqnpipe.diagnosis.probes.reference import FLOAT32_EPS, full_mantissas, gradients_of, mantissa_bits
from aqnpipe.error_bounds import TWO_ROUNDINGS
from aqnpipe.models.layout import decoder_layers, is_norm, output_projection
from aqnpipe.seeding import keyed_generator

EMBEDDING_GRADIENT = "embedding.weight_gradient"
_NUM_TOKENS = 32
_ROWS_AT_ONCE = 8192

_ROWS = (1, 4, 8, 97, 512)
"""Rows of one sequence with which lm_head runs: a token, few, and as many as in a prefill."""
_LAST_OF = (4, 1, 3)
"""Sequences of three tokens of which lm_head reads the last token alone, as in generation: rows with gaps."""
_ROWS_OF_GRADIENT = 64
_TOKENS_OF_GRADIENT = 512
"""Rows of the embedding whose gradients are compared, and the tokens that they occur in."""
_LEAST_SWEEPS = 6
"""Calls of a norm: a fault that strikes some calls is missed as seldom as at the sites of layers."""


def probe_outer_modules(model: nn.Module, seed: int, *, is_known: bool = True, num_elements: int = 1) -> list[Check]:
    """Return the checks of embedding, norms outside the decoder layers, and lm_head; all rows of both tables.

    Every channel of a norm and of lm_head has `num_elements` values or more.

    Of a model that is not `is_known`, embeddings and norms of classes of their own are left out.
    lm_head takes a test weight of its own size for the duration of a call.
    """
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    like = embedding.weight
    generator = keyed_generator("cpu", seed, "diagnosis.ends")
    checks: list[Check] = []
    if is_known or type(embedding) is nn.Embedding:
        checks = [*_embedding(embedding), *embedding_gradients(embedding, generator)]
    for site, module in outer_norms(model).items():
        if is_known or type(module) is nn.LayerNorm:
            checks += _sweeps(module, site, like, generator, num_elements)
            checks += norm_gradient(module, OUTSIDE_LAYERS, site, like.dtype, like.device, generator)
    head = output_projection(model)
    if isinstance(head, nn.Linear):
        checks += _head(head, generator, num_elements)
    return checks


def _sweeps(module: nn.Module, site: str, like: Tensor, generator: torch.Generator, num_elements: int) -> list[Check]:
    """Sweep a norm until it had all its values; none of one without a known epsilon."""
    checks: list[Check] = []
    while len(checks) < _LEAST_SWEEPS or sum(check.elements_per_channel for check in checks) < num_elements:
        found = norm_sweep(module, OUTSIDE_LAYERS, site, like.dtype, like.device, generator)
        if not found:
            break
        checks += found
    return checks


def outer_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Return the norms outside the decoder layers by site: `final_norm` if there is one, else their own names."""
    inside = set(decoder_layers(model).modules())
    found = {path: module for path, module in model.named_modules() if module not in inside and is_norm(module)}
    return {"final_norm" if len(found) == 1 else path: module for path, module in found.items()}


def changed_logits(raw: Tensor, setting: str, number: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return float64 logits behind a cap or a factor, and the roundings that are allowed for each value.

    A product is rounded once. A capped logit is rounded three times: the quotient, its tanh, and the product; tanh is
    off by some units of float32.
    """
    rounding, format = torch.finfo(dtype).eps / 2, torch.finfo(dtype)
    if setting == "logit_scale":
        answer = raw * number
        return answer, (rounding + FLOAT32_EPS) * answer.abs() + format.tiny
    quotient = raw / number
    capped = torch.tanh(quotient)
    of_tanh = (1 - capped**2) * quotient.abs() * rounding + capped.abs() * (rounding + 4 * FLOAT32_EPS)
    answer = number * capped
    return answer, TWO_ROUNDINGS * (number * of_tanh + rounding * answer.abs()) + format.tiny


def looked_up(module: nn.Module, ids: Tensor) -> Tensor:
    """Return on the host what an embedding has to output for `ids`: rows of its weight, times its scale."""
    weight: Tensor = module.weight.detach()  # type: ignore[operator]
    wanted, places = ids.cpu().unique(return_inverse=True)
    rows = torch.stack([weight[row].cpu() for row in wanted.tolist()])
    return _scaled(module, rows)[places]


def _scaled(module: nn.Module, rows: Tensor) -> Tensor:
    scale = getattr(module, "embed_scale", None)
    return rows if scale is None else rows * torch.as_tensor(scale).cpu().to(rows.dtype)


def _embedding(module: nn.Module) -> list[Check]:
    """Look up every row and compare it with the weight in memory, copied to the host."""
    weight = module.weight
    if not isinstance(weight, Tensor):
        return []
    checks = []
    for rows in torch.arange(weight.shape[0]).split(_ROWS_AT_ONCE):
        expected = _scaled(module, weight.detach()[rows[0] : rows[-1] + 1].cpu())
        observed = module(rows.to(weight.device).unsqueeze(1)).squeeze(1)
        checks.append(compare("embedding", OUTSIDE_LAYERS, "embedding", expected.double(), observed))
    return checks


def embedding_gradients(module: nn.Module, generator: torch.Generator) -> list[Check]:
    """Return the checks of the gradient of the weight of an embedding; none where the module cuts the graph.

    Tokens that occur many times add integers, whose sums are exact in any order, and others copy all mantissa bits.
    """
    weight: Tensor = module.weight  # type: ignore[assignment]
    rows = torch.randperm(len(weight), generator=generator)[:_ROWS_OF_GRADIENT]
    rows = rows[rows != (-1 if module.padding_idx is None else module.padding_idx)]
    often = rows[torch.randint(0, len(rows), (_TOKENS_OF_GRADIENT,), generator=generator)]
    summed = signs((_TOKENS_OF_GRADIENT, weight.shape[1]), generator)
    plain = full_mantissas((len(rows), weight.shape[1]), mantissa_bits(weight.dtype), generator)
    found = (_embedding_gradient(module, *operands) for operands in ((often, summed), (rows, plain)))
    return [check for check in found if check is not None]


def _embedding_gradient(module: nn.Module, ids: Tensor, given: Tensor) -> Check | None:
    """Compare the gradient for `given` [tokens, channels]: the rows of `ids`, and others that are not zero."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    required = weight.requires_grad
    weight.requires_grad_(True)
    try:
        (seen,) = gradients_of(lambda: module(ids.unsqueeze(0).to(weight.device)), [weight], given.unsqueeze(0))
    finally:
        weight.requires_grad_(required)
    if seen is None:
        return None
    seen = seen.to_dense()
    rows, places, counts = ids.unique(return_inverse=True, return_counts=True)
    terms = _scaled(module, given.to(weight.dtype)).double()
    expected, magnitudes = (
        torch.zeros(len(rows), given.shape[1], dtype=torch.float64).index_add_(0, places, own)
        for own in (terms, terms.abs())
    )
    observed, others = seen[rows.to(seen.device)], seen.any(1)
    others[rows.to(seen.device)] = False
    stray = seen[others]
    # Multiples of a scale are no integers: devices may round their sum to the dtype after every term.
    roundings = (counts - 1).unsqueeze(1) if hasattr(module, "embed_scale") else 0.0
    allowed = TWO_ROUNDINGS * torch.finfo(weight.dtype).eps / 2 * magnitudes * roundings
    expected, allowed = (torch.cat([own, torch.zeros(stray.shape, dtype=own.dtype)]) for own in (expected, allowed))
    found = torch.cat([observed, stray])
    return compare("backward", OUTSIDE_LAYERS, EMBEDDING_GRADIENT, expected, found, allowed=allowed)


def _head(head: nn.Linear, generator: torch.Generator, num_elements: int) -> list[Check]:
    """Run lm_head with outputs that each copy one input, until every channel had `num_elements` values, and on sums.

    It runs with single tokens, sequences, and the last tokens of sequences.
    """
    size = (head.out_features, head.in_features, head.weight.dtype, generator)
    single = [(_NUM_TOKENS, 1)]
    missing = num_elements - 2 * _NUM_TOKENS - sum(_ROWS)
    calls = [*single, *((1, rows) for rows in _ROWS), *[(1, _ROWS[-1])] * -(-max(missing, 0) // _ROWS[-1]), _LAST_OF]
    num_rows = sum(sequences * tokens for sequences, tokens, *_ in calls)
    checks = []
    for product, of_product in (
        (selecting_product(num_rows, *size), calls),
        (integer_product(_NUM_TOKENS, *size), single),
        (accumulating_product(_NUM_TOKENS, *size), single),
    ):
        checks += run_product("head", OUTSIDE_LAYERS, "lm_head", head, product, of_product)
    return checks
