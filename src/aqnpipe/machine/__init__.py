"""A noisy machine: errors in the kernels of torch's dispatcher, for any program (decision 30)."""
