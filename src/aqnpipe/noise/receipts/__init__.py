"""Records what was measured on the running model, and checks it against what was requested."""
