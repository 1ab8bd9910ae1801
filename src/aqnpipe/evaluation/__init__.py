"""Evaluation of checkpoints at several noise levels and noise seeds."""
