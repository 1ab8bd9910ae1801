"""The sensitivity of a model's layers to noise: what `aqnpipe sensitivity` writes."""

from pydantic import Field

from aqnpipe.artifacts.base import Artifact


class LayerSensitivity(Artifact):
    """Cost of noise in one layer alone. Standard errors are over texts, each averaged over the noise seeds.

    A standard error is null with a single text; the accuracy is null without gold answers.
    """

    layer: int | None = Field(ge=0, description="decoder layer; null for the output projection")
    estimate: float = Field(ge=0, description="first-order estimate of loss_increase, from one backward pass")
    loss_increase: float = Field(description="measured increase of the loss, in nats per scored token")
    loss_standard_error: float | None = Field(ge=0)
    accuracy_change: float | None = Field(description="measured change of the accuracy, as a fraction")
    accuracy_standard_error: float | None = Field(ge=0)


class Sensitivity(Artifact):
    """Result of a sensitivity measurement: loss and accuracy without noise, and every layer with noise in it alone.

    `fragile_layers` are the decoder layer with the largest measured increase of the loss and those that cannot be told
    from it (paired t-tests over texts, 5 % in all, Bonferroni); empty if no increase is significant.
    """

    scale: float = Field(gt=0, lt=1, description="relative scale of the noise on the outputs of matrix products")
    noise_seeds: tuple[int, ...]
    num_texts: int
    num_scored_tokens: int
    num_questions: int = Field(description="number of texts with a gold answer, on which accuracy was measured")
    loss: float = Field(description="loss without noise, in nats per scored token")
    accuracy: float | None = Field(description="accuracy without noise, as a fraction; greedy decoding, strict scorer")
    fragile_layers: tuple[int, ...]
    rank_correlation: float | None = Field(
        description="Spearman's, of estimate and loss_increase over decoder layers; null below 3 layers"
    )
    layers: tuple[LayerSensitivity, ...]
    untested: tuple[str, ...] = Field(description="matrices outside the layers and output projection, never noised")


class SensitivityFile(Sensitivity):
    """Output of `aqnpipe sensitivity --json`: the result, and the model, data and device that it is of."""

    model: str
    data: str
    simulated_faults: tuple[str, ...] = ()
    device: str
    dtype: str
    seconds: float = Field(ge=0)
