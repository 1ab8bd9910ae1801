"""The order of the prompts: equal for all arms with the same seed, and independent of restarts."""

from collections.abc import Callable, Iterator, Sized

from trl.trainer.utils import RepeatSampler

from aqnpipe.seeding import derive_seed


class PromptSampler(RepeatSampler):
    """TRL's sampler, reshuffled in each epoch by a generator that is seeded with (seed, epoch) only.

    The epoch follows from `steps_done`, the optimiser steps of the whole run, at the start of an iteration.
    """

    def __init__(
        self,
        prompts: Sized,
        *,
        prompts_per_rollout: int,
        rollouts_per_prompt: int,
        micro_batches_per_rollout: int,
        steps_per_rollout: int,
        seed: int,
        steps_done: Callable[[], int],
    ) -> None:
        super().__init__(
            prompts,
            mini_repeat_count=rollouts_per_prompt,
            batch_size=prompts_per_rollout,
            repeat_count=micro_batches_per_rollout,
            seed=seed,
        )
        self._steps_per_epoch = len(prompts) // prompts_per_rollout * steps_per_rollout
        self._steps_done = steps_done

    def __iter__(self) -> Iterator[int]:
        """Yield the prompt indices of one epoch."""
        epoch = self._steps_done() // self._steps_per_epoch
        self.generator.manual_seed(derive_seed(self.seed, "prompts", epoch))
        yield from super().__iter__()
