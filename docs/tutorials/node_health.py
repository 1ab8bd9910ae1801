# %% [markdown]
# # Is this node healthy?
# A diagnosis gives a model weights for which the right answer is known, runs it on the device, and compares bit for
# bit. It needs no second device and no earlier result. Here it tests the CPU with `tiny`, which comes with the package.
# A GPU or NPU is tested with a model of the size and number format that it will compute with.
# %%
from transformers import AutoModelForCausalLM

import aqnpipe
from aqnpipe.config.model import builtin_folder

model = AutoModelForCausalLM.from_pretrained(builtin_folder("tiny"))
result = aqnpipe.diagnose(model, method="exact", seed=1)
print(result.verdict, f"at the cost of {result.cost:.0f} forward passes")
# %% [markdown]
# "Healthy" covers what was tested, and nothing else. The rest is listed, with the reason.
# %%
for part in result.untested:
    print(f"not tested: {part.part} ({part.reason})")
# %% [markdown]
# What does a fault look like? Here one channel in ten of the output of layer 3 saturates: values above 70 % of the
# largest one are cut. The fault is simulated, and the diagnosis is not told.
# %%
broken = aqnpipe.diagnose(model, method="exact", seed=2, faults=["type=saturation,layer=3,magnitude=0.3,sparsity=0.1"])
print(broken.verdict)
for fault in broken.faults:
    print(f"layer {fault.layer}, {fault.site}: {fault.type} of magnitude {fault.magnitude:.2f}")
    print(f"channels {', '.join(map(str, fault.channels))} of {fault.num_channels}")
    print(fault.evidence)
# %% [markdown]
# On a node with GPUs or NPUs one command tests all devices at once, each in a process of its own, and ends with exit
# code 0 (healthy), 3 (a fault), 4 (no verdict) or 2 (not diagnosed):
#
# ```
# aqnpipe diagnose Qwen/Qwen2.5-1.5B-Instruct --devices all --dtype bfloat16 --method exact --json node.json
# ```
#
# For hours, every night and with a history: [diagnosing a node](../how-to/diagnosing-a-node.md). How often a fault is
# missed: [benchmarks](../../benchmarks/detection.md). GPUs and NPUs were not tried.
