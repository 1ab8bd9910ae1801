"""What the modules of a model read and write in whole sequences: each is compared with what was written before it.

- Between modules: what a layer, the final norm and lm_head read is what the module before them wrote. What attention
  and MLP read has to be one tensor that the layer has read or written before: its input, the output of a norm, or the
  sum of its input and a branch. Which of them it is depends on the architecture, so the one that fits best is compared.
- Sums: the output of a layer, of a mixture of experts, and the sum of the embeddings of tokens and positions.
- Modules by themselves: embedding, norms, and lm_head, which has a test weight whose rows each copy one input, so that
  the logits of every call are known bit for bit.
- A number that is not finite, although everything before it was, is a fault of the place where it first occurs.

The modules before and after the decoder layers (embedding, norms outside the layers, lm_head) have probes of their own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aqnpipe.diagnosis.capture import first_input, first_tensor, gradients_of, on_host, substituted
from aqnpipe.diagnosis.checks import OUTSIDE_LAYERS, Bench, Check, compare, differs
from aqnpipe.diagnosis.probes import patterns
from aqnpipe.diagnosis.probes.attention import SITE, Observation
from aqnpipe.diagnosis.probes.elementwise import Norm
from aqnpipe.diagnosis.probes.experts import experts_of
from aqnpipe.diagnosis.probes.linears import copied, run_product
from aqnpipe.diagnosis.probes.patterns import FLOAT32_EPS, full_mantissas, mantissa_bits, selecting_weights
from aqnpipe.error_bounds import TWO_ROUNDINGS, few_roundings
from aqnpipe.models.layout import LayerSites, decoder_layers, is_norm, matrices_outside, output_projection
from aqnpipe.seeding import keyed_generator

FINITE = "finite_in_sequence"
FINAL_NORM = "final_norm"
HANDOFFS = "inputs of the first layer, of the final norm and of lm_head"

_ENDS = {
    "attention_output": ("o_proj", "dense", "c_proj", "out_proj"),
    "mlp_output": ("down_proj", "dense_4h_to_h", "c_proj", "fc2"),
}
"""Linears whose output is that of the attention or the MLP that they belong to."""
_SHARED = ("shared_expert", "shared_experts")
_GATE_OF_SHARED = "shared_expert_gate"
_LOGITS_AT_ONCE = 64
"""Rows of logits that are compared at once, which are large."""
_LARGEST_SQUARE = 2.0**48
"""Healthy devices may overflow on the squares of larger numbers."""

# fmt: off
FAMILIES = frozenset({
    "cohere", "deepseek_v3", "dots1", "flex_olmo", "gemma", "gemma2",
    "gemma3_text", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "llama",
    "ministral", "mistral", "mixtral", "olmo", "olmo2", "olmo3",
    "olmoe", "opt", "phi", "phi3", "qwen2", "qwen2_moe",
    "qwen3", "qwen3_moe", "seed_oss", "stablelm", "starcoder2",
})
# fmt: on
"""Model types on which the probes of structure were tried: residual sums, rotation, cache, norms and experts."""


def model_type(model: nn.Module) -> str:
    """Return the name that transformers gives to the family of a model."""
    return str(getattr(model.config, "model_type", None))


def is_known(model: nn.Module) -> bool:
    """Return whether the answers that depend on the structure of a model type hold for this one."""
    norms_after = model_type(model) == "opt" and not getattr(model.config, "do_layer_norm_before", True)
    return model_type(model) in FAMILIES and not norms_after


@contextmanager
def observed(
    model: nn.Module, layers: Sequence[LayerSites], observation: Observation, untested: dict[str, str]
) -> Iterator["Flow"]:
    """Compare what the modules of a model read and write while the body runs; `untested` collects the gaps."""
    flow = Flow(model, [sites.layer for sites in layers], observation, untested)
    with flow.hooks, flow.shown:
        for index, sites in enumerate(layers):
            flow.watch_layer(index, sites)
        flow.watch_outer()
        yield flow


class Flow:
    """Hooks on a model. `read` and `written`: what each module read and wrote last in this call of the model.

    `clean`: sequences of which all numbers so far were finite, and small enough to be squared. `raw`: the output of
    lm_head. Of a model of another type than those tried, tables, embedding, final norm and lm_head are observed alone.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[nn.Module], observation: Observation, untested: dict[str, str]
    ) -> None:
        self.model, self.layers, self.observation, self.untested = model, layers, observation, untested
        self.known = is_known(model)
        self.clean = torch.ones(len(observation.padding), dtype=torch.bool)
        self.read: dict[nn.Module, Tensor] = {}
        self.written: dict[nn.Module, Tensor] = {}
        self.positions: list[Tensor] = []
        self.raw: Tensor | None = None
        self.hooks, self.shown = ExitStack(), ExitStack()
        self.norm = outer_norms(model).get(FINAL_NORM)
        self.has_handoffs = self.known and not matrices_outside(model)
        if not self.known:
            untested["residual sums and KV cache"] = f"not tried on model type {model_type(model)}"
        if not self.has_handoffs:
            untested[HANDOFFS] = "other matrices stand between them" if self.known else "not tried on this model type"
        elif self.norm is None:
            untested["inputs of the final norm and of lm_head"] = "the final norm has no weight"

    def finish(self, logits: Tensor) -> None:
        """Compare the logits with finite numbers, once a call of the model is over."""
        self._watch(OUTSIDE_LAYERS, "lm_head", logits)
        self.read.clear()
        self.written.clear()
        self.positions.clear()
        self.raw = None

    def watch_layer(self, index: int, sites: LayerSites) -> None:
        """Register the hooks of a layer, its norms and blocks."""
        layer = sites.layer
        known = sites.norms.items() if self.known else ()
        norms = {module: (name, norm) for name, module in known if (norm := Norm.of(module)).epsilon is not None}
        self._on(layer, read=partial(self.read.__setitem__, layer), write=partial(self._watch, index, "layer_output"))
        if index and self.known:
            self._chain(index - 1, "layer_output", self.layers[index - 1], layer)
        table = layer.register_forward_pre_hook(lambda m, a, kw: self._keep_table(index, kw), with_kwargs=True)
        self.hooks.callback(table.remove)
        if not self.known:
            return
        blocks = [
            (site, block, end)
            for site, block in (("attention_output", sites.attention), ("mlp_output", sites.mlp))
            for name, end in block.named_children()
            if name in _ENDS[site]
        ]
        parts = _parts_of_mixture(sites.mlp)
        for module in dict.fromkeys([*layer.children(), *sites.branch_ends, *norms, *(end for *_, end in blocks)]):
            self._keep(module)
        for module in parts.values():
            # Some versions of transformers add the shared experts to the output of the routed ones in place.
            self._on(module, write=lambda out, own=module: self.written.__setitem__(own, out.clone()))  # type: ignore[misc]
        for module, (name, norm) in norms.items():
            self._on(module, write=partial(self._compare_norm, index, name, norm))
        fusable = [norms[module][1] for module in layer.children() if module in norms]
        for site, block in (("attention_input", sites.attention), ("mlp_input", sites.mlp)):
            if not isinstance(block, nn.Linear):  # the layers of OPT have no module around their MLP
                self._on(block, read=partial(self._compare_input, index, site, layer, fusable))
        for site, block, end in blocks:
            self._on(block, write=partial(self._compare_end, index, site, end))
            if site == "attention_output":
                self._on(end, read=partial(self._compare_feed, index))
        if parts:
            self._on(sites.mlp, write=partial(self._compare_mixture, index, parts))
        self._on(layer, write=partial(self._compare_sum, index, sites))

    def watch_outer(self) -> None:
        """Register the hooks of the modules before and after the layers; lm_head has its test weight within calls."""
        embedding: nn.Module = self.model.get_input_embeddings()  # type: ignore[operator]
        self.hooks.callback(embedding.register_forward_hook(self._embed).remove)
        inside = set(decoder_layers(self.model).modules())
        for module in self.model.modules():
            if isinstance(module, nn.Embedding) and module is not embedding and module not in inside:
                self._on(module, write=self.positions.append)
        self._on(self.layers[0], read=partial(self._begin, embedding))
        head = output_projection(self.model)
        self._on(head, read=partial(self._watch, OUTSIDE_LAYERS, FINAL_NORM))
        if self.norm is not None:
            norm = Norm.of(self.norm)
            self._keep(self.norm)
            if self.has_handoffs:
                self._chain(OUTSIDE_LAYERS, "final_norm_input", self.layers[-1], self.norm)
                self._chain(OUTSIDE_LAYERS, "lm_head_input", self.norm, head)
            if norm.epsilon is not None and (self.known or type(self.norm) is nn.LayerNorm):
                self._on(self.norm, write=partial(self._compare_norm, OUTSIDE_LAYERS, FINAL_NORM, norm))
        weights = list(selecting_weights(head)) if isinstance(head, nn.Linear) else []
        self._on(head, read=partial(self._enter_head, head, weights), write=partial(self._leave_head, head, weights))

    def _on(
        self,
        module: nn.Module,
        *,
        read: Callable[[Tensor], None] | None = None,
        write: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Call `read` with what a module is called with, and `write` with what it returns."""
        if read is not None:
            hook = module.register_forward_pre_hook(lambda m, a, kw: read(first_input(a, kw)), with_kwargs=True)
            self.hooks.callback(hook.remove)
        if write is not None:
            self.hooks.callback(module.register_forward_hook(lambda m, a, out: write(first_tensor(out))).remove)

    def _keep(self, module: nn.Module) -> None:
        self._on(module, read=partial(self.read.__setitem__, module), write=partial(self.written.__setitem__, module))

    def _chain(self, layer: int, site: str, source: nn.Module, reader: nn.Module) -> None:
        """Compare what a module reads with what the one before it wrote."""
        self._on(reader, read=lambda seen: self._compare("chain", layer, site, self.written.get(source), seen))

    def _compare(self, probe: str, layer: int, site: str, wanted: Tensor | None, seen: Tensor) -> None:
        """Compare with what was seen before, if it was."""
        if wanted is not None:
            self.observation.checks.append(compare(probe, layer, site, wanted.cpu(), seen))

    def _keep_table(self, index: int, kwargs: Mapping[str, Any]) -> None:
        table = kwargs.get("position_embeddings")
        if isinstance(table, tuple) and len(table) == 2:
            self.observation.tables[index, self.observation.seen] = (table[0][0].cpu(), table[1][0].cpu())

    def _compare_sum(self, index: int, sites: LayerSites, output: Tensor) -> None:
        self.written[sites.layer] = output
        branches = [self.written[end] for end in sites.branch_ends if end in self.written]
        if len(branches) == 2:
            self.observation.checks.append(residual_check(index, (self.read[sites.layer], *branches), output))
        else:
            self.untested["residual sums"] = "the branches of a layer were not seen"

    def _compare_norm(self, index: int, site: str, norm: Norm, output: Tensor) -> None:
        """Compare every call of a norm: a norm of heads has rows of its own for each."""
        with on_host():
            self.observation.checks.append(norm.in_model(index, site, self.read[norm.module], output))

    def _compare_feed(self, index: int, fed: Tensor) -> None:
        result = self.observation.results.pop(index, None)
        self._compare("attention_feed", index, SITE, None if result is None else result.reshape(fed.shape), fed)

    def _compare_end(self, index: int, site: str, end: nn.Module, result: Tensor) -> None:
        self._compare("output", index, site, self.written.get(end), result)

    def _compare_mixture(self, index: int, parts: dict[str, nn.Module], output: Tensor) -> None:
        terms = {name: self.written[module].cpu() for name, module in parts.items() if module in self.written}
        if "routed" in terms:
            with on_host():
                self.observation.checks.append(mixture_check(index, terms, output.detach().cpu()))

    def _compare_input(self, index: int, site: str, layer: nn.Module, norms: Sequence[Norm], seen: Tensor) -> None:
        """Compare what a block of a layer reads; `norms` are those that a kernel may have fused with a sum."""
        written = [self.written[module] for module in layer.children() if module in self.written]
        with on_host():
            seen = seen.detach().cpu()
            same = [tensor for tensor in (self.read[layer], *written) if tensor.numel() == seen.numel()]
            hidden, *outputs = (tensor.detach().cpu().reshape(seen.shape).to(seen.dtype) for tensor in same)
            candidates = (hidden, *outputs, *(hidden + output for output in outputs))
            best = min(candidates, key=lambda tensor: int(differs(tensor, seen).sum()))
            found = compare("handoff", index, site, best, seen)
            if found.mismatch:
                sums = (hidden, *(hidden + own for own in outputs), *(hidden.double() + own for own in outputs))
                missing = [norm for norm in norms if norm.module not in self.written]
                fused = (norm.in_model(index, site, x, seen) for norm in missing for x in sums)
                found = next((check for check in fused if not check.mismatch), found)
            self.observation.checks.append(found)

    def _embed(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.written[module] = output
        plain = self.known or type(module) is nn.Embedding
        if plain and isinstance(module.weight, Tensor) and args:
            with on_host():
                expected = looked_up(module, args[0])
            self._compare("embedding", OUTSIDE_LAYERS, "embedding", expected, output)

    def _begin(self, embedding: nn.Module, hidden: Tensor) -> None:
        """Compare the input of the first layer with the embedding of tokens, plus that of positions if there is one."""
        self._watch(OUTSIDE_LAYERS, "embedding", hidden)
        if self.has_handoffs and embedding in self.written:
            with on_host():
                wanted = self.written[embedding].detach().cpu()
                for term in self.positions:
                    wanted = wanted + term.detach().cpu()
            self._compare("chain", OUTSIDE_LAYERS, "first_layer_input", wanted, hidden)

    def _enter_head(self, head: nn.Module, weights: list[tuple[Tensor, Tensor]], fed: Tensor) -> None:
        self.read[head] = fed
        self.shown.enter_context(substituted(weights))

    def _leave_head(self, head: Any, weights: list[tuple[Tensor, Tensor]], output: Tensor) -> None:
        self.shown.close()
        self.raw = output
        if weights:
            parts = (tensor.flatten(0, -2).split(_LOGITS_AT_ONCE) for tensor in (self.read[head], output))
            for fed, logits in zip(*parts, strict=True):
                self.observation.checks.append(copied("head", OUTSIDE_LAYERS, "lm_head", head, fed, logits))

    def _watch(self, layer: int, site: str, tensor: Tensor) -> None:
        """Record a mismatch if sequences that were clean have a number that is not finite; padding has no answer."""
        with on_host():
            host = tensor.detach().cpu()
            tokens = torch.arange(self.observation.seen, self.observation.seen + host.shape[1])
            real = tokens >= self.observation.padding.unsqueeze(1)
            largest = torch.maximum(host.amax(-1), -host.amin(-1))  # NaN where a number of the token is
            broken = self.clean & ~(largest.isfinite() | ~real).all(1)
            self.clean = self.clean & ((largest < _LARGEST_SQUARE) | ~real).all(1)
            if not broken.any():
                return
            if host.dtype == torch.float16 and layer != OUTSIDE_LAYERS:
                self.untested["layers behind the first number that is not finite"] = "float16 may overflow there"
                return
            own = host[broken]
            wanted = torch.where(own.isfinite() | ~real[broken].unsqueeze(-1), own, 0)
            self.observation.checks.append(compare(FINITE, layer, site, wanted, own))


def _parts_of_mixture(block: nn.Module) -> dict[str, nn.Module]:
    """Return the routed and shared experts of a mixture, and the gate of the shared ones; nothing of other blocks."""
    routed, children = experts_of(block), dict(block.named_children())
    if routed is None or routed not in children.values():
        return {}
    shared = next((children[name] for name in _SHARED if name in children), None)
    parts = {"routed": routed, "shared": shared, "gate": children.get(_GATE_OF_SHARED)}
    return {name: module for name, module in parts.items() if module is not None}


def residual_check(index: int, terms: Sequence[Tensor], output: Tensor) -> Check:
    """Compare the output of a layer with the sum of its input and its two branches, in the order that fits best."""
    with on_host():
        host = output.detach().cpu()
        h, a, m = (tensor.detach().cpu().reshape(host.shape) for tensor in terms)
        # A fused kernel does not round the sum in between.
        fused = ((h.float() + a.float()) + m.float()).to(host.dtype)
        sums = ((h + a) + m, (a + m) + h, (h + m) + a, fused)
        best = min(sums, key=lambda total: int((total != host).sum()))
        return compare("residual", index, "layer_output", best, host)


def mixture_check(layer: int, terms: dict[str, Tensor], output: Tensor) -> Check:
    """Compare with the sum of the terms, which is rounded once; a gate and its product are rounded before it."""
    flat = output.reshape(-1, output.shape[-1])
    expected = terms["routed"].reshape(flat.shape)
    shared = terms["shared"].reshape(flat.shape) if "shared" in terms else torch.zeros_like(flat)
    if "shared" not in terms or "gate" not in terms:
        return compare("output", layer, "mlp_output", expected + shared, flat)
    product = terms["gate"].reshape(-1, 1).double().sigmoid() * shared.double()
    one_rounding = torch.finfo(output.dtype).eps / 2 * (expected.double().abs() + product.abs())
    allowed = few_roundings(product, output.dtype) + 1.1 * one_rounding
    return compare("output", layer, "mlp_output", expected.double() + product, flat, allowed=allowed)


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
    bench = Bench(OUTSIDE_LAYERS, like.dtype, like.device, generator)
    checks: list[Check] = []
    if is_known or type(embedding) is nn.Embedding:
        checks = [*_embedding(embedding), *embedding_gradients(embedding, generator)]
    for site, module in outer_norms(model).items():
        if is_known or type(module) is nn.LayerNorm:
            norm = Norm.of(module)
            checks += _sweeps(norm, site, bench, num_elements) + norm.gradient(site, bench)
    head = output_projection(model)
    if isinstance(head, nn.Linear):
        checks += _head(head, generator, num_elements)
    return checks


def _sweeps(norm: Norm, site: str, bench: Bench, num_elements: int) -> list[Check]:
    """Sweep a norm until it had all its values; none of one without a known epsilon."""
    checks: list[Check] = []
    while len(checks) < _LEAST_SWEEPS or sum(check.elements_per_channel for check in checks) < num_elements:
        if not (found := norm.sweep(site, bench)):
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
    summed = patterns.signs((_TOKENS_OF_GRADIENT, weight.shape[1]), generator)
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
        (patterns.selecting_product(num_rows, *size), calls),
        (patterns.integer_product(_NUM_TOKENS, *size), single),
        (patterns.accumulating_product(_NUM_TOKENS, *size), single),
    ):
        checks += run_product("head", OUTSIDE_LAYERS, "lm_head", head, product, of_product)
    return checks
