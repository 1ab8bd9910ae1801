"""Proof of what a noisy machine did: results of operators recomputed from their operands, with keys of its own."""
