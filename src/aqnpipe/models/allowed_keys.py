"""Which keys a model's config.json may set, and the only way to make a configuration of transformers from it.

transformers sets every key of config.json as an attribute of the configuration, unknown ones too. What a family
declares may be set. Any other key was added by a training tool, or is no longer read by this version: there are many of
them, and no code looks at them. Such a key must not name something that every configuration has for another purpose:
`attribute_map` would rename attributes, `sub_configs` would exchange the classes of parts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aqnpipe.config.model import read_json_object, read_model_config
from aqnpipe.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_INERT = frozenset(
    {
        *("model_type", "_name_or_path", "_attn_implementation_internal", "_experts_implementation_internal"),
        *("base_model_tp_plan", "base_model_ep_plan", "base_model_pp_plan", "keys_to_ignore_at_inference"),
    }
)
"""Names of attributes that versions of transformers wrote into config.json; none is read back here."""


def load_config(folder: Path) -> "PreTrainedConfig":
    """Return the configuration of a model folder; ModelError for keys, families and quantizations not allowed."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, GenerationConfig
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    content, path = read_model_config(folder), folder / "config.json"
    family = content.get("model_type")
    if isinstance(family, str) and family in CONFIG_MAPPING:
        # The configurations of other families (detectors with a backbone) may fetch from the hub.
        if CONFIG_MAPPING[family] not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ModelError(f"{path}: model_type is {family!r}, expected a decoder-only model")
        for key in _taken(CONFIG_MAPPING[family], content):
            raise ModelError(f"{path}: {key} is not a setting of {family}, but a part of transformers' code")
    generation = folder / "generation_config.json"
    for key in read_json_object(generation) if generation.exists() else ():
        if callable(getattr(GenerationConfig, key, None)):
            raise ModelError(f"{generation}: {key} is not a setting, but a part of transformers' code")
    quantization = content.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method is not None and method not in (*AUTO_QUANTIZER_MAPPING, "bitsandbytes"):
        # transformers would load the weights without it. The mapping has bitsandbytes by its number of bits.
        raise ModelError(
            f"{path}: quantization_config.quant_method is {method!r}, expected one that transformers knows"
        )
    config: PreTrainedConfig = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    return config


def _taken(kind: "type[PreTrainedConfig]", content: Mapping[str, Any], prefix: str = "") -> "Iterator[str]":
    """Yield the keys, also of parts of a configuration, that no setting has and that name an attribute of its class."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    settable = {name for name in dir(kind) if getattr(getattr(kind, name, None), "fset", None) is not None}
    declared = settable | {field.name for field in fields(kind)} | {*kind.attribute_map}
    taken = {*dir(kind), *vars(PreTrainedConfig())} - declared - _INERT
    yield from (prefix + key for key in content if key in taken)
    for name, part in kind.sub_configs.items():
        inside = content.get(name)
        if isinstance(inside, Mapping):
            family = inside.get("model_type")
            known = CONFIG_MAPPING[family] if isinstance(family, str) and family in CONFIG_MAPPING else part
            yield from _taken(known if issubclass(known, PreTrainedConfig) else PreTrainedConfig, inside, f"{name}.")


def refuse_code(path: Path, auto_map: Any, family: str | None) -> None:
    """Raise ModelError if `auto_map` names classes that transformers lacks; `family` None: of a tokenizer.

    A model that was published before transformers had its family still names its own files (Phi-3, DeepSeek-V3). They
    are not read: the class of transformers with this name is used.
    """
    if auto_map is None:
        return
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    own = {"AutoConfig": CONFIG_MAPPING_NAMES, "AutoModelForCausalLM": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    for loader, found in (auto_map if isinstance(auto_map, Mapping) else {"AutoTokenizer": auto_map}).items():
        for reference in found if isinstance(found, list) else [found]:
            name = str(reference).rpartition(".")[2]
            if loader in own:
                is_known = name.replace("_", "").lower() == str(own[loader].get(family or "")).replace("_", "").lower()
            else:
                is_known = loader != "AutoTokenizer" or reference is None or bool(tokenizer_class_from_name(name))
            if not is_known:
                raise ModelError(f"{path}: auto_map asks for code from the model, which is never run: {reference}")
