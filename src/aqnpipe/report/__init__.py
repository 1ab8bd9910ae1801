"""The report stage: one self-contained HTML page, a summary, and tables."""
