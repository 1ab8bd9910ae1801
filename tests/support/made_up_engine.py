"""A small model with modules like vLLM's, and the parts of it that noise acts on. It needs no vLLM."""

import torch
import torch.nn.functional as F
from torch import nn

from aqnpipe.generation.vllm.modules import EngineLayer, EngineModel, Linear, Projection, Tap

WIDTH, HEADS, TOKENS = 16, 2, 20


class _Method:
    def apply(self, layer, x, bias=None):
        return F.linear(x, layer.weight, bias)


class _Linear(nn.Module):
    skip_bias_add, bias = False, None

    def __init__(self, *widths):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(sum(widths), WIDTH) / WIDTH**0.5)
        self.quant_method = _Method()

    def forward(self, x):
        return self.quant_method.apply(self, x, None), None


class RMSNorm(nn.Module):
    """Adds a residual sum first, if there is one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, residual=None):
        total = x if residual is None else x + residual
        normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * self.weight
        return normed if residual is None else (normed, total)


class SiluAndMul(nn.Module):
    """A gated activation."""

    def forward(self, x):
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


class Attention(nn.Module):
    """Attention of every token to all: one operator of vLLM."""

    num_kv_heads = HEADS

    def forward(self, q, k, v):
        q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(0, 1) for x in (q, k, v))
        return (torch.bmm(q, k.transpose(1, 2)).softmax(-1) @ v).transpose(0, 1).reshape(-1, WIDTH)


class SelfAttention(nn.Module):
    """Projections and attention."""

    def __init__(self):
        super().__init__()
        self.qkv_proj, self.attn, self.o_proj = _Linear(WIDTH, WIDTH, WIDTH), Attention(), _Linear(WIDTH)

    def forward(self, x):
        return self.o_proj(self.attn(*self.qkv_proj(x)[0].chunk(3, dim=-1)))[0]


class Mlp(nn.Module):
    """A gated MLP."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.act_fn, self.down_proj = _Linear(WIDTH, WIDTH), SiluAndMul(), _Linear(WIDTH)

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))[0]


class Layer(nn.Module):
    """A decoder layer: returns what is to be added, and the residual sum."""

    def __init__(self):
        super().__init__()
        self.input_layernorm, self.self_attn = RMSNorm(), SelfAttention()
        self.post_attention_layernorm, self.mlp = RMSNorm(), Mlp()

    def forward(self, hidden, residual):
        normed, residual = self.input_layernorm(hidden, residual)
        normed, residual = self.post_attention_layernorm(self.self_attn(normed), residual)
        return self.mlp(normed), residual


class Logits(nn.Module):
    """vLLM's logits processor: called when the forward of the model has returned."""

    scale, soft_cap = 1.0, None

    def forward(self, head, hidden):
        return head.quant_method.apply(head, hidden)[..., :TOKENS]


class Model(nn.Module):
    """A decoder with a vocabulary of 20, padded to 24."""

    def __init__(self, num_layers=3):
        super().__init__()
        self.embed_tokens, self.norm = nn.Embedding(TOKENS, WIDTH), RMSNorm()
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.lm_head, self.logits_processor = _Linear(TOKENS + 4), Logits()

    def forward(self, ids):
        hidden = self.embed_tokens(ids)
        residual = torch.zeros_like(hidden)
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
        return self.norm(hidden, residual)[0]


def generate(engine, num_forwards):
    """Read a prompt of 12 tokens, then one token after the other; return all logits."""
    model, logits = engine.model, []
    with torch.inference_mode():
        for number in range(num_forwards):
            hidden = model(torch.arange(12) if number == 0 else torch.tensor([number % TOKENS]))
            logits.append(model.logits_processor(model.lm_head, hidden))
    return torch.cat(logits)


def made_up_engine():
    """Return the parts of a new model with fixed random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Model()
    engine = EngineModel.__new__(EngineModel)
    engine.model, engine.out_of_reach, engine.shards, engine.head_is_plain = model, [], {}, True
    engine.layers = [_layer(f"layers.{index}", layer) for index, layer in enumerate(model.layers)]
    engine.head, engine.logits = Linear(model.lm_head, [Projection("lm_head", TOKENS)]), [model.logits_processor]
    engine.norm_inputs = {name: Tap() for name, module in model.named_modules() if isinstance(module, RMSNorm)}
    return engine


def _layer(name, layer):
    attention, mlp = layer.self_attn, layer.mlp
    projections = {
        attention.qkv_proj: ("q_proj", "k_proj", "v_proj"),
        attention.o_proj: ("o_proj",),
        mlp.gate_up_proj: ("gate_proj", "up_proj"),
        mlp.down_proj: ("down_proj",),
    }
    linears = [Linear(module, [Projection(each, WIDTH) for each in names]) for module, names in projections.items()]
    norms = {path: getattr(layer, path) for path in ("input_layernorm", "post_attention_layernorm")}
    return EngineLayer(layer, name, linears, norms, attentions=[attention.attn], activations=[mlp.act_fn])
