"""The trainer's log as the metrics table of a run."""

from collections.abc import Iterable, Mapping

import polars as pl

from aqnpipe.noise.receipt import WeightSync

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
}

_OF_THE_ROLLOUT = ("reward", "reward_std", "completions/mean_length", "completions/clipped_ratio")
"""What the trainer logs once per batch of rollouts."""


def metrics_table(
    log_history: Iterable[Mapping[str, float]],
    weight_syncs: Iterable[WeightSync],
    validation_accuracy: Mapping[int, float],
) -> pl.DataFrame:
    """Return one row per optimiser step, as `artifacts.TrainingMetrics` wants it.

    Rewards, lengths and sigmas of step N are those of the rollout that step N learned from, which several steps may
    share. Wall times are left out on purpose.
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
            rollout = {key: logged[key] for key in _OF_THE_ROLLOUT}
        entry = {**rollout, **logged}
        rows.append(
            {
                "step": step,
                **{column: float(entry[key]) for column, key in _COLUMNS.items()},
                "kl": float(entry["kl"]) if "kl" in entry else None,
                "sigma_asked": sync.sigma_asked if sync else 0.0,
                "sigma_measured": sync.sigma_measured if sync else 0.0,
                "validation_accuracy": validation_accuracy.get(step),
            }
        )
    order = [
        "step", "epoch", "reward_mean", "reward_std", "kl", "entropy", "loss", "grad_norm", "clip_fraction",
        "response_tokens_mean", "truncated_fraction", "sigma_asked", "sigma_measured", "validation_accuracy",
    ]  # fmt: skip
    schema_overrides = {"kl": pl.Float64, "validation_accuracy": pl.Float64}
    return pl.DataFrame(rows, schema_overrides=schema_overrides).select(order)
