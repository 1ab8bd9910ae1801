"""Evaluation: robustness of checkpoints over noise levels and noise seeds."""
