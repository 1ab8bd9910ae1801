# %% [markdown]
# # My model under noise, and trained with AQN
# How many answers does noise cost a model, and what changes after training with AQN in a stock `GRPOTrainer` of TRL?
# AQN is Gaussian noise on the RMSNorm weights of the policy while it draws rollouts, weaker from step to step. The
# model is `tiny`, which comes with the package, on generated word problems; yours is loaded in the same way.
# %%
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

import aqnpipe
from aqnpipe.config.dataset import GeneratedDataset
from aqnpipe.config.model import builtin_folder
from aqnpipe.config.noise import LinearDecay
from aqnpipe.data.loader import load_problems

model = AutoModelForCausalLM.from_pretrained(builtin_folder("tiny"))
tokenizer = AutoTokenizer.from_pretrained(builtin_folder("tiny"))
problems = GeneratedDataset(num_train=96, num_test=100, max_steps=2, distractor_probability=0)
tables = [load_problems(problems, split) for split in ("train", "test")]
train, test = ({"prompt": [f"{q}\n" for q in t["question"]], "gold": t["gold_answer"].to_list()} for t in tables)

# %% [markdown]
# Within `aqnpipe.noisy` every matrix product returns its value with an error, here of 5 % or 10 % of each element.
# `check` proves it: it raises an error if a product had any other noise. The answers are those of greedy decoding.


# %% tags=["numbers-vary"]
def reward(completions, gold, **_):
    return [float(text.partition("####")[2].strip() == right) for text, right in zip(completions, gold, strict=True)]


def answers(scale):
    asked = tokenizer(test["prompt"], padding=True, return_tensors="pt")
    with aqnpipe.noisy(model.eval(), scale=scale) as receipt:
        ids = model.generate(**asked, max_new_tokens=24)
    right = reward(tokenizer.batch_decode(ids[:, asked.input_ids.shape[1] :], skip_special_tokens=True), **test)
    print(f"measured noise {receipt.check().measured_scale:.3f}: {sum(right):.0f} of {len(right)} answers are right")
    return right


before = {scale: answers(scale) for scale in (0.05, 0.1)}
# %% [markdown]
# The trainer is TRL's own. The callback measures the noise of every rollout; training fails if it was not as requested.
# %% tags=["numbers-vary"]
callback = aqnpipe.AQNCallback(LinearDecay(sigma_start=0.02, sigma_end=0.002))
args = {"per_device_train_batch_size": 128, "max_completion_length": 24, "learning_rate": 2e-4, "max_steps": 6}
args |= {"use_cpu": True, "bf16": False, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
data, args = Dataset.from_dict(train), GRPOConfig("out", **args)
trainer = GRPOTrainer(model, reward, args, data, processing_class=tokenizer, callbacks=[callback])
trainer.remove_callback(PrinterCallback)
trainer.train()
print(callback.summary())
# %% [markdown]
# Is the difference real? The answers after training are compared with those before, question by question. The interval
# is about these weights. Whether AQN makes a difference takes [several runs with and without it](../decide.md).
# %% tags=["numbers-vary"]
for scale in before:
    found = aqnpipe.compare(answers(scale), before[scale], test["prompt"])
    print(f"{found.difference:+.2f} (95 % interval {found.ci_low:+.2f} to {found.ci_high:+.2f})")
