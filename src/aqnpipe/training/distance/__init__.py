"""Decomposes the distance between sampler and trained policy, at the first and the last optimiser step of a run."""
