"""The shape of a decoder-only model, and its number of parameters and floating-point operations per token."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import Field

from aqnpipe.config.base import FrozenModel
from aqnpipe.config.model import ModelConfig, known_config
from aqnpipe.errors import ModelError


class ModelShape(FrozenModel):
    """Sizes of a model like Qwen2 or Llama: grouped-query attention, gated MLP, two norms per layer, one at the end.

    Of a mixture, `intermediate_size` is that of one of the `num_experts`, of which a token uses `experts_per_token`.
    """

    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_layers: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    tied_embeddings: bool
    qkv_bias: bool
    head_norms: bool = False
    num_experts: int = Field(default=1, ge=1)
    experts_per_token: int = Field(default=1, ge=1)

    @property
    def body_matmul_parameters(self) -> int:
        """Number of weights of the linears in all layers that a token uses, each in one multiplication and addition."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        router = self.hidden_size * self.num_experts if self.num_experts > 1 else 0
        return self.num_layers * (attention + router + self.experts_per_token * self._expert_parameters)

    @property
    def _expert_parameters(self) -> int:
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def head_matmul_parameters(self) -> int:
        """Number of weights of the output projection, tied to the embedding or not."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Number of stored values; tied ones count once."""
        biases = self.head_dim * (self.num_heads + 2 * self.num_kv_heads) if self.qkv_bias else 0
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.head_norms else 0)
        norms_and_biases = self.num_layers * (norms + biases) + self.hidden_size
        others = self.num_layers * (self.num_experts - self.experts_per_token) * self._expert_parameters
        embeddings = self.head_matmul_parameters * (1 if self.tied_embeddings else 2)
        return self.body_matmul_parameters + others + norms_and_biases + embeddings

    def adapter_parameters(self, rank: int, target_modules: Iterable[str]) -> int:
        """Return the number of weights of low-rank adapters on the linears with these names in all layers."""
        attention, keys = self.head_dim * self.num_heads, self.head_dim * self.num_kv_heads
        sides = {
            "q_proj": self.hidden_size + attention,
            "k_proj": self.hidden_size + keys,
            "v_proj": self.hidden_size + keys,
            "o_proj": self.hidden_size + attention,
            **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), self.hidden_size + self.intermediate_size),
        }
        return self.num_layers * rank * sum(sides.get(name, 0) for name in target_modules)

    def forward_flops(self, num_tokens: float, num_logits: float, context: float) -> float:
        """Return the operations of a forward pass over `num_tokens`, of which `num_logits` reach the output projection.

        `context` is the mean number of positions that a token attends to; attention has two products of this length.
        """
        attention = 4 * self.num_layers * self.num_heads * self.head_dim * context
        return num_tokens * (2 * self.body_matmul_parameters + attention) + num_logits * 2 * self.head_matmul_parameters


class ParameterCount(FrozenModel):
    """A model of known size and unknown shape. The products of attention are not counted, because they need a shape.

    `num_layers` is assumed, for the time of decode steps: as many as Qwen2.5-1.5B and 7B have.
    """

    num_parameters: float = Field(gt=0)
    num_layers: int = Field(default=28, ge=1)

    def forward_flops(self, num_tokens: float, num_logits: float, context: float) -> float:
        """Return the operations of a forward pass, with every parameter used for every token."""
        return 2 * self.num_parameters * num_tokens


def shape_of(model: ModelConfig) -> ModelShape | None:
    """Return the shape of a built-in, local or well-known model.

    None for a hub model that must be downloaded first, and for a family whose config.json has not all sizes.
    """
    config = known_config(model.source)
    return None if config is None else shape_from_config(config)


def shape_from_config(config: Mapping[str, Any]) -> ModelShape | None:
    """Return the shape that a config.json describes; None if a size is missing, or differs from layer to layer.

    Mixtures are those in which every layer has the same experts and no shared one.

    Raises ModelError for sizes that no model has.
    """
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    sizes = {key: config.get(key) for key in needed}
    sizes |= {key: config[key] for key in ("num_key_value_heads", "head_dim") if config.get(key)}
    if not all(isinstance(size, int) for size in sizes.values()):
        return None
    if wrong := [f"{key} is {size}" for key, size in sizes.items() if size is not None and size < 1]:
        raise ModelError(f"config.json: {', '.join(wrong)}, expected positive numbers")
    experts = _experts(config)
    if experts is None:
        return None
    num_heads = config["num_attention_heads"]
    return ModelShape(
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
        vocab_size=config["vocab_size"],
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=config.get("model_type") == "qwen2",
        head_norms=config.get("model_type") in ("qwen3", "qwen3_moe"),
        **experts,
    )


def _experts(config: Mapping[str, Any]) -> dict[str, int] | None:
    """Return the sizes of the experts, one for a dense model; None for a mixture of another structure."""
    number = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0
    if not number:
        return {"intermediate_size": config["intermediate_size"], "num_experts": 1, "experts_per_token": 1}
    is_plain = config.get("model_type") in ("mixtral", "qwen3_moe") and config.get("decoder_sparse_step", 1) == 1
    per_token = config.get("num_experts_per_tok")
    if not is_plain or config.get("mlp_only_layers") or not isinstance(per_token, int):
        return None
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    return {"intermediate_size": int(width), "num_experts": int(number), "experts_per_token": per_token}
