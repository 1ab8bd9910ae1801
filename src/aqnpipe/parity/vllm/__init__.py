"""Captures of vLLM: its workers record the operators, by their names in transformers."""
