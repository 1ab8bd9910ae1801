"""Data: generated and real grade-school word problems."""
