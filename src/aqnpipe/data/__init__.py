"""Data: generated and real questions, prompts, and scorers of answers."""
