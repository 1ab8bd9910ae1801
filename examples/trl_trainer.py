"""Noise in a stock trainer of TRL, with its defaults: one step of the trainer is one context."""

import tempfile

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

import aqnpipe
from aqnpipe.config.model import builtin_folder
from aqnpipe.models.loading import load_model, load_tokenizer

NOISE = {"scale": 0.05, "seed": 0, "backward": True}


class NoisySFTTrainer(SFTTrainer):
    """Trains under 5 % noise on every matrix product, forward and backward."""

    receipt = None

    def training_step(self, *args, **kwargs):
        """Compute one step under noise."""
        with aqnpipe.noisy(self.model, receipt=self.receipt, **NOISE) as self.receipt:
            return super().training_step(*args, **kwargs)


folder = builtin_folder("tiny")
model = load_model(folder, dtype="float32", attention="eager")
texts = Dataset.from_dict(
    {"text": ["Tom has 5 apples .", "Ann has 12 pens .", "What is 1 plus 1 ?", "Ben has 4 boxes ."]}
)

with tempfile.TemporaryDirectory() as output:
    settings = SFTConfig(
        output_dir=output,
        max_steps=3,
        per_device_train_batch_size=2,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        bf16=False,
    )
    trainer = NoisySFTTrainer(model, settings, train_dataset=texts, processing_class=load_tokenizer(folder))
    trainer.train()

trainer.receipt.check()
print(f"{trainer.receipt.recomputed_numbers} numbers of the noise were recomputed")
