"""The compare stage: from evaluations to verdicts on the declared claims."""
