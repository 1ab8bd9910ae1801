"""Stock trainers of TRL with their defaults, on a tiny random model; the first argument names the trainer."""

import copy
import sys
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

torch.manual_seed(0)
kind = sys.argv[1]
words = {str(number): number for number in range(97)}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="0", eos_token="1")
model = AutoModelForCausalLM.from_config(
    LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
)


def text(seed: int) -> str:
    numbers = torch.randint(2, 97, (12,), generator=torch.Generator().manual_seed(seed))
    return " ".join(str(number) for number in numbers.tolist())


common = {"max_steps": 2, "report_to": [], "use_cpu": True, "bf16": False, "save_strategy": "no"}
peft = LoraConfig(task_type="CAUSAL_LM") if "lora" in sys.argv else None
with tempfile.TemporaryDirectory() as folder:
    if kind == "sft":
        data = Dataset.from_dict({"text": [text(seed) for seed in range(16)]})
        trainer = SFTTrainer(
            model, SFTConfig(folder, **common), train_dataset=data, processing_class=tokenizer, peft_config=peft
        )
    elif kind == "dpo":
        columns = {"prompt": 100, "chosen": 200, "rejected": 300}
        data = Dataset.from_dict({name: [text(first + seed) for seed in range(16)] for name, first in columns.items()})
        trainer = DPOTrainer(
            model,
            # TRL would load it again from where the model came from.
            None if peft else copy.deepcopy(model),
            args=DPOConfig(folder, **common),
            train_dataset=data,
            processing_class=tokenizer,
            peft_config=peft,
        )
    else:
        data = Dataset.from_dict({"prompt": [text(seed) for seed in range(16)]})
        trainer = GRPOTrainer(
            model,
            reward_funcs=lambda completions, **_: [float(len(completion) % 7) for completion in completions],
            args=GRPOConfig(folder, max_completion_length=8, **common),
            train_dataset=data,
            processing_class=tokenizer,
            peft_config=peft,
        )
    trainer.train()
