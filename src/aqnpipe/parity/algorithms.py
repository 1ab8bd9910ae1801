"""Ways to compute one operator in 16 bits that differ in what they round, and which of them a machine uses.

Each is computed here on the operator's own inputs. Arithmetic in float32 that is rounded once gives nearly the same
bits in any order of summation: the right candidate agrees in almost all elements, the others in about three quarters.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Candidates = Mapping[str, Callable[[], Tensor]]

CAST_BEFORE = "cast before the weight"
CAST_AFTER = "cast after the weight"
EACH_STEP = "every step rounded"
ONE_ROUNDING = "one rounding"
COS_SIN_ROUNDED = "cos and sin rounded, products in float32"
ACTIVATION_ROUNDED = "activation rounded, then multiplied"
SCORES_ROUNDED = "scores and probabilities rounded"
PROBABILITIES_ROUNDED = "scores in float32, probabilities rounded"
ALL_FLOAT32 = "scores and probabilities in float32"


def rms_norms(x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Candidates:
    """Return the ways to compute an RMSNorm of `x` with this weight."""
    normalised = _normalised(x.float(), epsilon)

    def each_step() -> Tensor:
        low = x.to(dtype)
        return low * torch.rsqrt(low.pow(2).mean(-1, keepdim=True) + epsilon) * weight.to(dtype)

    return {
        CAST_BEFORE: lambda: weight.to(dtype) * normalised.to(dtype),
        CAST_AFTER: lambda: (normalised * weight.float()).to(dtype),
        EACH_STEP: each_step,
    }


def _normalised(x: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)


def rotations(
    x: Tensor, positions: Tensor, inverse_frequencies: Tensor, scaling: float, head_dim: int, dtype: torch.dtype
) -> Candidates:
    """Return the ways to rotate `x` [rows, heads * head_dim], with pairs in the two halves of a head."""
    angles = positions.float()[:, None] * inverse_frequencies.float()
    cos, sin = (torch.cat((part, part), -1)[:, None] for part in (angles.cos() * scaling, angles.sin() * scaling))
    num_rotated = cos.shape[-1]

    def rotated(cos: Tensor, sin: Tensor, working: torch.dtype) -> Tensor:
        heads = x.reshape(len(x), -1, head_dim)
        part, kept = heads[..., :num_rotated].to(working), heads[..., num_rotated:].to(dtype)
        first, second = part.chunk(2, -1)
        turned = part * cos + torch.cat((-second, first), -1) * sin
        return torch.cat((turned.to(dtype), kept), -1).flatten(1)

    return {
        EACH_STEP: lambda: rotated(cos.to(dtype), sin.to(dtype), dtype),
        COS_SIN_ROUNDED: lambda: rotated(cos.to(dtype).float(), sin.to(dtype).float(), torch.float32),
        ONE_ROUNDING: lambda: rotated(cos, sin, torch.float32),
    }


def activations(act: Callable[[Tensor], Tensor], values: Tensor, factor: Tensor, dtype: torch.dtype) -> Candidates:
    """Return the ways to compute act(values) * factor."""
    return {
        ACTIVATION_ROUNDED: lambda: act(values.float()).to(dtype) * factor.to(dtype),
        ONE_ROUNDING: lambda: (act(values.float()) * factor.float()).to(dtype),
    }


def attentions(query: Tensor, key: Tensor, value: Tensor, scaling: float, dtype: torch.dtype) -> Candidates:
    """Return the ways to compute causal attention of one sequence, [tokens, heads or groups, dim]."""
    tokens, heads, _ = query.shape
    key, value = (t.repeat_interleave(heads // key.shape[1], 1).transpose(0, 1).float() for t in (key, value))
    query = query.transpose(0, 1).float()
    hidden = torch.arange(tokens)[:, None] < torch.arange(tokens)

    def attended(rounds_scores: bool, rounds_probabilities: bool) -> Tensor:
        scores = query @ key.transpose(1, 2)
        scores = (scores.to(dtype) * scaling).float() if rounds_scores else scores * scaling
        scores = scores.masked_fill(hidden, -torch.inf)
        if rounds_scores:
            probabilities = scores.softmax(-1).to(dtype).float()
            result = probabilities @ value
        elif rounds_probabilities:
            # Fused kernels divide by the sum of the exponentials last.
            exponentials = torch.exp(scores - scores.amax(-1, keepdim=True))
            result = exponentials.to(dtype).float() @ value / exponentials.sum(-1, keepdim=True)
        else:
            result = scores.softmax(-1) @ value
        return result.to(dtype).transpose(0, 1).flatten(1)

    return {
        SCORES_ROUNDED: lambda: attended(True, True),
        PROBABILITIES_ROUNDED: lambda: attended(False, True),
        ALL_FLOAT32: lambda: attended(False, False),
    }


def equal_shares(output: Tensor, candidates: Candidates) -> dict[str, int]:
    """Return the number of elements of `output` that each candidate gives bit for bit."""
    return {name: int((compute().to(output.dtype) == output).sum()) for name, compute in candidates.items()}
