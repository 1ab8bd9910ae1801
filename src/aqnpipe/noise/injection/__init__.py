"""Injects noise and simulated faults into a running model, for one phase."""
