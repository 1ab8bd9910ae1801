"""Probes of a device: operands with known answers, run through the modules of a model."""
