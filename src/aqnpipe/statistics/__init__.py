"""Statistics: paired comparisons and what they support."""
