"""The metrics table of a run, from the trainer's log."""

from collections.abc import Iterable, Mapping

import polars as pl

from aqnpipe.noise.receipts.rows import WeightSync

_COLUMNS = {
    "epoch": "epoch",
    "reward_mean": "reward",
    "reward_std": "reward_std",
    "entropy": "entropy",
    "loss": "loss",
    "grad_norm": "grad_norm",
    "clip_fraction": "clip_ratio/region_mean",
    "response_tokens_mean": "completions/mean_length",
    "truncated_fraction": "completions/clipped_ratio",
    "logp_difference_mean": "sampler/logp_difference_mean",
    "logp_difference_max": "sampler/logp_difference_max",
    "sampler_kl": "sampler/kl",
}

_IMPORTANCE_RATIO = "sampling/importance_sampling_ratio/mean"

_ROLLOUT_KEYS = (
    *("reward", "reward_std", "completions/mean_length", "completions/clipped_ratio"),
    *("sampler/logp_difference_mean", "sampler/logp_difference_max", "sampler/kl"),
)
"""Quantities that the trainer logs once per batch of rollouts."""


def metrics_table(
    log_history: Iterable[Mapping[str, float]],
    weight_syncs: Iterable[WeightSync],
    validation_accuracy: Mapping[int, float],
) -> pl.DataFrame:
    """Return one row per optimiser step, with the columns of `artifacts.TrainingMetrics`.

    Rewards, lengths, sigmas and the distance between sampler and actor of step N belong to the rollout that step N
    learned from; several steps may share a rollout. Wall times are left out on purpose: the table must be reproducible.
    """
    syncs = {sync.step + 1: sync for sync in weight_syncs}
    rows = []
    sync: WeightSync | None = None
    rollout: dict[str, float] = {}
    for logged in log_history:
        if "loss" not in logged:
            continue
        step = int(logged["step"])
        sync = syncs.get(step, sync)
        if "reward" in logged:
            rollout = {key: logged[key] for key in (*_ROLLOUT_KEYS, _IMPORTANCE_RATIO) if key in logged}
        entry = {**rollout, **logged}
        rows.append(
            {
                "step": step,
                **{column: float(entry[key]) for column, key in _COLUMNS.items()},
                "kl": float(entry["kl"]) if "kl" in entry else None,
                "importance_ratio_mean": entry.get(_IMPORTANCE_RATIO),
                "sigma_requested": sync.sigma_requested if sync else 0.0,
                "sigma_measured": sync.sigma_measured if sync else 0.0,
                "validation_accuracy": validation_accuracy.get(step),
            }
        )
    order = [
        "step", "epoch", "reward_mean", "reward_std", "kl", "entropy", "loss", "grad_norm", "clip_fraction",
        "response_tokens_mean", "truncated_fraction", "logp_difference_mean", "logp_difference_max", "sampler_kl",
        "importance_ratio_mean", "sigma_requested", "sigma_measured", "validation_accuracy",
    ]  # fmt: skip
    schema_overrides = dict.fromkeys(("kl", "importance_ratio_mean", "validation_accuracy"), pl.Float64)
    return pl.DataFrame(rows, schema_overrides=schema_overrides).select(order)
