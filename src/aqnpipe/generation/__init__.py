"""Generation backends, shared by training rollouts and evaluation."""
