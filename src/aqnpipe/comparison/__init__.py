"""The compare stage: test the declared claims on the evaluations."""
