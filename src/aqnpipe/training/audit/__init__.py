"""Audit of a training run: recomputes what the trainer did from observations at the point of use.

Nothing here is used by the trainer, and nothing here uses the trainer's formulas. The audit observes the run through
hooks on the network, its weights and the optimiser, and through the requests to the rollout engine:

- `rollouts`: the prompts are those of the seed's order; every completion is graded again; its tokens are those that the
  network's logits choose (`aqnpipe.reference.decoder`), its experts those that ran.
- `scoring`: the gradient that reaches the logits is that of the study's loss (`aqnpipe.reference.grpo`).
- `updates`: the optimiser is AdamW with the study's settings; it used the sum of those gradients, clipped, and nothing
  else changed weights or moments.
- `settings`: the trainer's resolved arguments, trainable weights and dropout are those of the study.
- `measure`: the ledger of differences; weights before training, of the reference and on the disk are those in memory.
- `auditor`: holds the parts together, keeps their facts in resume points, and refuses the run.
"""
