"""Tasks and an actor of Ray, whose processes are killed at the end."""

from typing import Any

import ray
import torch
from torch import nn

ray.init(num_cpus=2, include_dashboard=False, logging_level="error", _node_ip_address="127.0.0.1")


def step(model: nn.Module) -> float:
    """Forward and backward pass."""
    loss = model(torch.ones(8, 16)).square().mean()
    loss.backward()
    return loss.item()


@ray.remote
def task(number: int) -> float:
    """Return the loss of a model of this task's own."""
    torch.manual_seed(number)
    return step(nn.Linear(16, 4))


@ray.remote
class Actor:
    """A model that stays in a process."""

    def __init__(self) -> None:
        self.model = nn.Linear(16, 4)

    def step(self) -> float:
        """Return the loss."""
        return step(self.model)


actor: Any = Actor.remote()
print(ray.get([task.remote(number) for number in range(4)]), ray.get([actor.step.remote() for _ in range(3)]))
ray.kill(actor)
ray.shutdown()
