"""Parities made up for tests: identities, operators, and whole files."""

from collections.abc import Sequence
from typing import Any

from aqnpipe.artifacts.parities import CaptureIdentity, LogProbabilities, OperatorParity, ParityFile


def identity(**changed: Any) -> CaptureIdentity:
    """The identity of a capture of a model with one layer; `changed` replaces keys."""
    return CaptureIdentity(
        **{
            "aqnpipe": "1",
            "created": "2026-01-01T00:00:00Z",
            "model": "tiny",
            "model_class": "Qwen2ForCausalLM",
            "weights_sha256": "a" * 64,
            "tokenizer_sha256": None,
            "config": {"model_type": "qwen2", "num_hidden_layers": 1, "hidden_size": 8},
            "tokens_sha256": "b" * 64,
            "num_sequences": 1,
            "num_tokens": 4,
            "lengths": (4,),
            "backend": "transformers",
            "dtype": "float32",
            "attention": "eager",
            "device": "cpu",
            "driver": None,
            "toolkit": None,
            "threads": 1,
            "batch_size": 1,
            "padding": "left",
            "num_decoded": 0,
            "numerics": {},
            "versions": {},
            "num_compared_parameters": 1,
            "stale_parameters": (),
            "replay_of": None,
            "seconds": 1.0,
            "members": {},
            **changed,
        }
    )


def operator(kind: str, layer: int | None = None, **changed: Any) -> OperatorParity:
    """An operator with a relative error of 0.2; `changed` replaces keys."""
    return OperatorParity(
        **{
            **{"name": kind if layer is None else f"layers.{layer}.{kind}", "kind": kind, "layer": layer},
            **{"verdict": "rounding", "reason": "why", "relative_rms": 0.2, "bias": 0.1, "gain": 0, "ulps_p99": 1},
            **{"ulps_largest": 1, "input_correlation": None, "equal_share": 0.5, "bound_share": 0.5},
            **{"first_algorithm": None, "second_algorithm": None, "accumulated_relative_rms": 0.2},
            **{"accumulated_correlation": None, **changed},
        }
    )


def parity(operators: Sequence[OperatorParity], **changed: Any) -> ParityFile:
    """A parity of `operators` with bfloat16; `changed` replaces keys."""
    return ParityFile(
        **{
            "verdict": "rounding",
            "summary": "all differ by rounding.",
            "first": identity(),
            "second": identity(dtype="bfloat16"),
            "same_inputs": True,
            "num_rows": 4,
            "first_beyond_rounding": None,
            "operators": tuple(operators),
            "log_probabilities": LogProbabilities(
                **{"num_tokens": 4, "mean": 0.0, "rms": 0.05, "p99": 0.1, "largest": 0.1, "argmax_changes": 0.01},
                **{"prefill_rms": None, "decode_rms": None},
            ),
            "substitution": None,
            "settings": (),
            "notes": (),
            **changed,
        }
    )
