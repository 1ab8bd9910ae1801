"""First-order estimate of what noise in one layer costs, for all layers from one backward pass.

Operator noise replaces the output y of every matrix product by `y' = y + s*|y|*z`, z ~ N(0, 1), independent for every
element. To second order in s, with L the summed loss of a text,

    L(y') - L(y) ~ sum_i g_i s |y_i| z_i + 0.5 sum_ij H_ij s^2 |y_i| |y_j| z_i z_j,    g = dL/dy, H = d2L/dy2.

In the mean over z the first sum vanishes, and of the second only the diagonal is left: `0.5 s^2 sum_i H_ii y_i^2`.
H is replaced by the empirical Fisher matrix, which for the log-likelihood of a well-fitted model estimates H (its
Gauss-Newton part) without second derivatives: `H_ii ~ g_i^2`. So one backward pass gives, for every layer at once,

    estimate = 0.5 s^2 sum_i (y_i g_i)^2 / scored tokens,    i over all outputs of the layer's matrix products,

the predicted increase of the loss per token. (Kunstner, Balles and Hennig, 2019, arXiv:1905.12558 describe the
empirical Fisher matrix and its limits.)

What it ignores: terms above s^2 (large noise, saturating non-linearities); the difference between the empirical Fisher
matrix and the Hessian, which is large where the model is wrong with confidence or has not been trained, so that the
size of an estimate may be off by a factor even where the order of the layers is right; the interaction of noise in
several layers; everything that is not a matrix product (norms, softmax, activations, residual sums); and what a changed
token does to the rest of a generated answer. Measured loss and accuracy (diagnosis/sensitivity.py) include them.

Texts are token ids with a part that is scored, and their loss is measured in batches.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import polars as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from aqnpipe.artifacts.diagnoses import SENSITIVITY_SCALE
from aqnpipe.config.dataset import PromptFormat
from aqnpipe.config.noise import Fault, OperatorNoise, RelativeGaussian
from aqnpipe.data.prompts import Example, prompt_token_ids
from aqnpipe.diagnosis.capture import hooked
from aqnpipe.errors import DataError, ModelError
from aqnpipe.models.layout import decoder_layers, noised_attention, output_projection
from aqnpipe.noise.injection.faults import simulated_faults

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_TOKENS = 4096
_MAX_LOGITS = 2**26
"""Limits of one batch: tokens with padding, and logits (256 MiB in float32)."""


@dataclass(frozen=True)
class ScoredText:
    """A text as token ids. The loss is that of the tokens after the first `prompt_tokens`.

    `gold_answer`: the answer to the prompt, if it is a question; accuracy is measured on such texts.
    """

    token_ids: tuple[int, ...]
    prompt_tokens: int = 1
    gold_answer: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_tokens < len(self.token_ids):
            raise DataError(
                f"a text has {len(self.token_ids)} tokens, {self.prompt_tokens} of them in its prompt: expected a "
                "prompt of at least one token, and at least one token after it"
            )

    @property
    def num_scored(self) -> int:
        """Number of tokens that the loss is of."""
        return len(self.token_ids) - self.prompt_tokens


def texts_of_problems(
    problems: pl.DataFrame,
    prompt: PromptFormat,
    tokenizer: "PreTrainedTokenizerBase",
    examples: Sequence[Example] = (),
) -> list[ScoredText]:
    """Return prompt, gold solution and end token of every row of a ProblemTable; the solution is scored."""
    prompts = prompt_token_ids(problems["question"], prompt, tokenizer, examples)
    end = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    return [
        ScoredText(
            (*ids, *tokenizer(answer, add_special_tokens=False)["input_ids"], *end), len(ids), gold_answer=gold_answer
        )
        for ids, answer, gold_answer in zip(prompts, problems["answer"], problems["gold_answer"], strict=True)
    ]


@dataclass(frozen=True)
class TextBatch:
    """Texts of similar length: `positions` in the list of all texts, `token_ids` [rows, tokens] and the scored mask.

    Rows are padded on the right, where a causal model cannot see the padding; it is not scored.
    """

    positions: tuple[int, ...]
    token_ids: Tensor
    is_scored: Tensor


def text_batches(texts: Sequence[ScoredText], vocabulary_size: int, device: torch.device) -> list[TextBatch]:
    """Return all texts in batches, longest last; the limits bound the memory of the logits."""
    order = sorted(range(len(texts)), key=lambda position: len(texts[position].token_ids))
    max_tokens = max(1, min(_MAX_TOKENS, _MAX_LOGITS // vocabulary_size))
    groups: list[list[int]] = []
    for position in order:
        length = len(texts[position].token_ids)
        if groups and (len(groups[-1]) + 1) * length <= max_tokens:
            groups[-1].append(position)
        else:
            groups.append([position])
    return [_batch(texts, group, device) for group in groups]


def _batch(texts: Sequence[ScoredText], positions: Sequence[int], device: torch.device) -> TextBatch:
    length = max(len(texts[position].token_ids) for position in positions)
    ids = torch.zeros(len(positions), length, dtype=torch.long)
    scored = torch.zeros(len(positions), length, dtype=torch.bool)
    for row, position in enumerate(positions):
        text = texts[position]
        ids[row, : len(text.token_ids)] = torch.tensor(text.token_ids)
        scored[row, text.prompt_tokens : len(text.token_ids)] = True
    return TextBatch(tuple(positions), ids.to(device), scored.to(device))


def summed_losses(model: Any, batch: TextBatch) -> Tensor:
    """Return the sum of the cross entropy in nats over the scored tokens of every row, float32 [rows]."""
    logits = model(input_ids=batch.token_ids, use_cache=False).logits
    losses = F.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), batch.token_ids[:, 1:].flatten(), reduction="none"
    ).view(batch.token_ids.shape[0], -1)
    return (losses * batch.is_scored[:, 1:]).sum(1)


_TorchFunction = Callable[..., Any]
_PRODUCTS: dict[_TorchFunction, str] = {
    F.linear: "linear",
    torch.matmul: "matmul",
    Tensor.matmul: "matmul",
    Tensor.__matmul__: "matmul",
    Tensor.__rmatmul__: "matmul",
    torch.mm: "matmul",
    Tensor.mm: "matmul",
    torch.einsum: "matmul",
    torch.bmm: "bmm",
    Tensor.bmm: "bmm",
    torch.addmm: "addmm",
    Tensor.addmm: "addmm",
    torch.baddbmm: "baddbmm",
    Tensor.baddbmm: "baddbmm",
    F.grouped_mm: "grouped_mm",
    torch._grouped_mm: "grouped_mm",
}
_ATTENTION: dict[_TorchFunction, str] = {F.scaled_dot_product_attention: "scaled_dot_product_attention"}
_PRODUCT_OF_SUM: dict[str, _TorchFunction] = {"addmm": torch.mm, "baddbmm": torch.bmm}
"""The product inside operators that add a tensor to it. The noise belongs to the product alone."""


def layer_noise(model: nn.Module, layer: int | None, scale: float) -> OperatorNoise:
    """Return relative noise on the matrix products of one decoder layer (None: of the output projection).

    Raises ModelError if the attention kernel of `model` is neither eager nor sdpa, because noise cannot reach others.
    """
    return OperatorNoise(
        error=RelativeGaussian(scale=scale),
        phases=("evaluation",),
        layers=() if layer is None else (layer,),
        include_lm_head=layer is None,
        attention=noised_attention(model),
    )


def first_order_estimates(model: nn.Module, texts: Sequence[ScoredText], scale: float) -> list[float]:
    """Return the estimated increase of the loss, in nats per scored token, by noise of `scale` in each part alone.

    The parts are the decoder layers in order, then the output projection. Weights, their gradients and the mode of
    `model` stay as they are. Raises ModelError if the loss or an estimate is not finite, or a product is out of reach.
    """
    parts: list[nn.Module] = [*decoder_layers(model), output_projection(model)]
    squares = torch.zeros(len(parts), dtype=torch.float64)
    vocabulary_size = len(model.get_input_embeddings().weight)  # type: ignore[operator]
    batches = text_batches(texts, vocabulary_size, next(model.parameters()).device)
    with _differentiable(model):
        watch = _ProductWatch(layer_noise(model, 0, scale), squares)
        for batch in batches:
            handles = [part.register_forward_pre_hook(partial(watch.enter_part, n)) for n, part in enumerate(parts)]
            handles += [part.register_forward_hook(watch.leave_part, always_call=True) for part in parts]
            with hooked(handles):
                loss = summed_losses(model, batch).sum()
            loss.backward()
    estimates = (0.5 * scale**2 * squares / sum(text.num_scored for text in texts)).tolist()
    if not all(map(torch.isfinite, torch.tensor(estimates))):
        raise ModelError(
            f"{type(model).__name__}: the sensitivity of a layer is NaN or infinite, expected finite numbers"
        )
    return [float(estimate) for estimate in estimates]


def with_sensitivity(
    table: pl.DataFrame, model: nn.Module, texts: Sequence[ScoredText], faults: Sequence[Fault] = ()
) -> pl.DataFrame:
    """Return a LayerTable with the estimate of every layer, at noise of 10 % and with `faults` simulated."""
    with simulated_faults(model, faults):
        *layers, _output_projection = first_order_estimates(model, texts, SENSITIVITY_SCALE)
    return table.with_columns(pl.Series("sensitivity", layers))


@contextmanager
def _differentiable(model: nn.Module) -> Iterator[None]:
    """Freeze the weights and make the embedded tokens the leaves of the graph; restore everything on exit."""
    was_training, trainable = model.training, [weight for weight in model.parameters() if weight.requires_grad]
    embeddings: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    with ExitStack() as stack:
        stack.callback(model.train, was_training)
        stack.callback(lambda: [weight.requires_grad_(True) for weight in trainable])
        model.eval()
        model.requires_grad_(False)
        as_leaf = embeddings.register_forward_hook(lambda m, args, output: output.detach().requires_grad_())
        stack.callback(as_leaf.remove)
        stack.enter_context(torch.enable_grad())
        yield


class _ProductWatch(TorchFunctionMode):
    """Adds sum (y*g)^2 of every matrix product to `squares` at the number of the part that computes it.

    The products are those that operator noise reaches, without the bias, which has no noise.
    """

    def __init__(self, noise: OperatorNoise, squares: Tensor) -> None:
        super().__init__()
        is_fused = noise.attention == "fused"
        self._names = {**_PRODUCTS, **(_ATTENTION if is_fused else {})}
        # Functions with a matrix product inside, where the noise cannot be put on the product alone.
        self._escaping = {} if is_fused else _ATTENTION
        self._squares = squares
        self._part = 0

    def enter_part(self, number: int, module: nn.Module, args: Any) -> None:
        """Start watching (forward pre-hook)."""
        self._part = number
        self.__enter__()

    def leave_part(self, module: nn.Module, args: Any, output: Any) -> None:
        """Stop watching (forward hook)."""
        self.__exit__(None, None, None)

    def __torch_function__(self, func: _TorchFunction, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._escaping:
            raise ModelError(
                f"the model calls {self._escaping[func]}, whose products noise cannot reach; use eager attention"
            )
        operator = self._names.get(func)
        if operator is None:
            return func(*args, **kwargs)
        if operator == "linear":
            return self._linear(*args, **kwargs)
        if operator in _PRODUCT_OF_SUM:
            return self._sum(_PRODUCT_OF_SUM[operator], *args, **kwargs)
        return self._observed(func(*args, **kwargs))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        product = self._observed(F.linear(input, weight))
        return product if bias is None else product + bias

    def _sum(
        self,
        product_of: Callable[..., Tensor],
        input: Tensor,
        *factors: Tensor,
        beta: float = 1,
        alpha: float = 1,
        **named: Tensor,
    ) -> Tensor:
        """Compute `beta*input + alpha*(first @ second)`; the factors may be named, in their order."""
        first, second = (*factors, *named.values())
        return torch.add(self._observed(product_of(first, second)) * alpha, input, alpha=beta)

    def _observed(self, output: Tensor) -> Tensor:
        if output.requires_grad:
            # A copy, because the model may change its activations in place.
            output.register_hook(partial(self._add, self._part, output.detach().clone()))
        return output

    def _add(self, part: int, output: Tensor, gradient: Tensor) -> None:
        self._squares[part] += (output.float() * gradient.float()).square().sum().double().cpu()
