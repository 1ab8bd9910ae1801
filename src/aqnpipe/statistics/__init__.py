"""Statistics: tests, intervals and power of paired comparisons."""
