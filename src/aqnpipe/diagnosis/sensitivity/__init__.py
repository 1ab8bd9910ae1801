"""Sensitivity of layers to noise: the damage that noise in one layer does to scored texts."""
