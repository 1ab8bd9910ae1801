"""Generation backends, the same for rollouts and evaluation."""
