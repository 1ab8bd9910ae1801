"""Training: GRPO with separate, receipted noise phases."""
