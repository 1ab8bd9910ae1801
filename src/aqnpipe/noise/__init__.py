"""Noise: operators, adaptive weight noise, faults, and the receipts that prove them."""
