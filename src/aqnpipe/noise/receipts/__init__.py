"""Records measurements of the running model and checks them against the requested noise."""
