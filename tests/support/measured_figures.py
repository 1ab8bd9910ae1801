"""Made-up figures of measured errors: every operator of the small random model has figures of its own."""

from aqnpipe.config.measured_noise import ErrorFigures, MeasuredError
from aqnpipe.models.layout import decoder_layers

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PRODUCTS = (*LINEARS, "attention")
NORMS = ("input_layernorm", "post_attention_layernorm")
OPERATORS = (*PRODUCTS, *NORMS)
OUTSIDE = ("lm_head", "norm")


def figures_of(model):
    """Every operator of every layer has figures of its own, a hundredth of what its results are at most."""
    found = {
        "lm_head": ErrorFigures(bias=1e-4, per_input=0.002, per_result=0.02),
        "norm": ErrorFigures(bias=2e-4, gain=0.001, absolute=0.001, per_result=0.03),
    }
    for layer in range(len(decoder_layers(model))):
        for number, name in enumerate(OPERATORS):
            size = 0.002 * (1 + number + len(OPERATORS) * layer)
            per_input = size / 10 if name in LINEARS else 0.0
            found[f"layers.{layer}.{name}"] = ErrorFigures(
                bias=size / 100, gain=-size / 10, absolute=size / 20, per_input=per_input, per_result=size
            )
    return found


def measured(model, multiple=1.0, **changed):
    return MeasuredError(source="machine.json", multiple=multiple, figures=figures_of(model) | changed)
