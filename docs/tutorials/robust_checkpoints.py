# %% [markdown]
# # How robust are my checkpoints?
# One command asks every checkpoint the same questions at every noise level, and compares the answers. A checkpoint is a
# folder in the format of Hugging Face, a hub id, or a model that comes with the package, as `tiny` and `tiny-large`
# here; `large=tiny-large` gives it a name. `--data` names the questions; without it they are generated word problems.
# %% tags=["numbers-vary"]
import subprocess

command = "aqnpipe robustness tiny large=tiny-large --questions 80 --levels 0,0.05,0.1 --max-tokens 32 --batch-size 80"
done = subprocess.run(command.split(), capture_output=True, text=True, check=True)
print(done.stdout)
# %% [markdown]
# Read the last sentence first: it answers the question, or says how many questions would. Then the table.
# - *costs ... accuracy*: answers of a checkpoint with noise against its own without.
# - *differ in accuracy*: which checkpoint is better at that noise. A better model may still lose more.
# - *differ in what noise costs them*: which checkpoint is more robust. Above 0 the first loses less.
#
# "Not shown" is no proof that there is no difference: look at the interval. More questions make it narrower.
#
# The folder `robustness` has a report, the same numbers as CSV, every answer, and the receipt of every pass. What did
# noise of 10 % do to the answers of `tiny`?
# %% tags=["numbers-vary"]
import polars as pl

answers = pl.read_parquet("robustness/eval/checkpoints/tiny/seed0/step0.parquet")
right = answers.pivot("noise_level", index="question_id", values="correct_strict")
print(right.group_by("0.0", "0.1").len("questions").sort("0.0", "0.1"))
