"""Checks what the printed figures of a publication support."""
