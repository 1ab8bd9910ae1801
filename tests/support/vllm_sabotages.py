"""A worker extension that makes a layer of vLLM's model compute a product beside the noise."""

from types import MethodType

import torch
import torch.nn.functional as F

from aqnpipe.generation.vllm.worker import NoiseExtension


def _clean_product(mlp, x):
    """Call the product directly, not through the module's quantisation method."""
    return mlp.down_proj(mlp.act_fn(F.linear(x, mlp.gate_up_proj.weight)))[0]


def _extra_product(mlp, x):
    clean = type(mlp).forward(mlp, x)
    return clean + 0 * torch.mv(mlp.gate_up_proj.weight, x[0])[0]


def _product_as_sum(mlp, x):
    clean = type(mlp).forward(mlp, x)
    return clean + 0 * (x[:, None, :8] * mlp.gate_up_proj.weight[:16, :8]).sum(-1).sum()


@torch.library.custom_op("aqnpipe_test::fused_mlp", mutates_args=())
def fused_mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Compute a whole MLP in one operator, as vLLM's fused experts do."""
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def _own_operator(mlp, x):
    return fused_mlp(x, mlp.gate_up_proj.weight, mlp.down_proj.weight)


class _CleanLater:
    """Right in the first four forwards, which are classified; clean afterwards."""

    def __init__(self):
        self.calls = 0

    def __call__(self, mlp, x):
        self.calls += 1
        return type(mlp).forward(mlp, x) if self.calls <= 4 else _clean_product(mlp, x)


def _clean_attention(attention, *args, **kwargs):
    """Call vLLM's attention past the module that has the noise."""
    inner = attention.attn
    attention.__dict__["_modules"]["attn"] = _Plain(inner)
    try:
        return type(attention).forward(attention, *args, **kwargs)
    finally:
        attention.__dict__["_modules"]["attn"] = inner


class _Plain(torch.nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.__dict__["attention"] = attention

    def forward(self, *args):
        return type(self.attention).forward(self.attention, *args)


def _clean_logits(logits, hidden, head, *rest):
    return F.linear(hidden, head.weight)[..., : logits.org_vocab_size]


_IN_MLP = {
    "clean product": _clean_product,
    "extra product": _extra_product,
    "product as a sum": _product_as_sum,
    "an operator of its own": _own_operator,
}


class SabotagedExtension(NoiseExtension):
    """Adds one method to the worker."""

    def sabotage(self, name):
        """Sabotage layer 1, or the output projection."""
        model = self.get_model()
        layer = model.model.layers[1]
        if name == "clean attention":
            layer.self_attn.forward = MethodType(_clean_attention, layer.self_attn)
        elif name == "clean logits":
            model.logits_processor._get_logits = MethodType(_clean_logits, model.logits_processor)
        elif name == "clean later":
            layer.mlp.forward = MethodType(_CleanLater(), layer.mlp)
        else:
            layer.mlp.forward = MethodType(_IN_MLP[name], layer.mlp)

    def repair(self):
        """Undo every sabotage."""
        model = self.get_model()
        layer = model.model.layers[1]
        for module, attribute in (
            (layer.self_attn, "forward"),
            (layer.mlp, "forward"),
            (model.logits_processor, "_get_logits"),
        ):
            vars(module).pop(attribute, None)


class SabotagedWorker(NoiseExtension):
    """Lets the second of two tensor-parallel workers have other noise than the first."""

    _sabotage = None

    def sabotage(self, name):
        """Sabotage the second worker; None repairs it."""
        self._sabotage = name if self.rank == 1 else None

    def aqnpipe_begin_batch(self, key):
        """Install no noise, that of another key, or that of the first worker's columns."""
        if self._sabotage == "no noise":
            return {}
        if self._sabotage == "another key":
            return super().aqnpipe_begin_batch(key | {"seed": key["seed"] + 1})
        if self._sabotage == "columns of another worker":
            for projection in self._aqnpipe_pass.engine.projections().values():
                if projection.name == "up_proj":
                    projection.output_shard = projection.output_shard._replace(start=0)
        return super().aqnpipe_begin_batch(key)
