"""The model of a diagnosis and the prompts of its scans, from a name on the command line."""

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from aqnpipe.config.base import FrozenModel, describe_validation_error
from aqnpipe.config.dataset import GeneratedDataset, PromptFormat
from aqnpipe.config.model import Attention, Dtype, ModelConfig
from aqnpipe.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class ModelSource(FrozenModel):
    """Where the weights of a model come from, and how it computes. `name` is what the user called it."""

    name: str
    folder: Path
    random_weights: bool
    dtype: Dtype
    attention: Attention


def find_model(name: str, dtype: Dtype, attention: Attention, *, random_weights: bool) -> ModelSource:
    """Return the source of a model, after a download if it has to be; ModelError if it cannot be diagnosed.

    The shape of the model is created without weights, so that a model of another family is refused before they are
    read.
    """
    source = ModelSource(
        name=name,
        folder=Path(name) if random_weights else _folder_of(name),
        random_weights=random_weights,
        dtype=dtype,
        attention=attention,
    )
    _refuse_other_families(source)
    return source


def load(source: ModelSource, device: "torch.device", seed: int) -> "nn.Module":
    """Return the model on `device`, with the weights in its folder or with random ones drawn by `seed`."""
    from aqnpipe.models.loading import create_model, load_model
    from aqnpipe.seeding import derive_seed

    if source.random_weights:
        weights_seed = derive_seed(seed, "diagnosis.weights")
        return create_model(source.folder, device, dtype=source.dtype, attention=source.attention, seed=weights_seed)
    return load_model(source.folder, dtype=source.dtype, attention=source.attention, device=device)


def word_problems(source: ModelSource, num_prompts: int, device: "torch.device") -> "list[Tensor] | None":
    """Return word problems as prompts [tokens]; None if the model has no tokenizer of its own or random weights."""
    import torch

    from aqnpipe.data.loader import load_problems
    from aqnpipe.data.prompts import prompt_token_ids
    from aqnpipe.models.loading import load_tokenizer

    if source.random_weights or not (source.folder / "tokenizer.json").is_file():
        return None
    questions = load_problems(GeneratedDataset(num_train=num_prompts), "train")["question"].to_list()
    rows = prompt_token_ids(questions, PromptFormat(), load_tokenizer(source.folder))
    return [torch.tensor(ids).to(device) for ids in rows]


def _folder_of(name: str) -> Path:
    from aqnpipe.models.adapted import find_base, has_only_adapters
    from aqnpipe.models.loading import source_folder

    try:
        folder = source_folder(ModelConfig.model_validate({"source": name}))
    except ValidationError as error:
        raise ModelError(describe_validation_error(error).split("Value error, ")[-1]) from error
    if has_only_adapters(folder):
        raise ModelError(
            f"model {str(folder)!r}: a checkpoint of adapters; a diagnosis is of the machine and needs whole "
            f"weights, expected its base {str(find_base(folder))!r}"
        )
    return folder


def _refuse_other_families(source: ModelSource) -> None:
    """Raise ModelError if the model has no decoder layers of attention and an MLP."""
    from aqnpipe.models.layout import decoder_layers
    from aqnpipe.models.loading import create_model
    from aqnpipe.models.sites import layer_sites

    for layer in decoder_layers(create_model(source.folder, "meta", attention=source.attention)):
        layer_sites(layer)
