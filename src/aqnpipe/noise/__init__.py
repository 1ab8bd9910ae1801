"""Noise on operators, modules and weights, simulated faults, and the receipts that verify them."""
