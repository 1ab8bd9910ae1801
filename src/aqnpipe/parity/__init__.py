"""Parity: what two machines or engines compute from the same weights and tokens, operator by operator."""
