"""Training: GRPO with separate noise phases, each recorded in the run's receipt."""
