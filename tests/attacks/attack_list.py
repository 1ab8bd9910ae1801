"""All sabotages, and what each of the ten ways in which the original experiments fooled their authors was."""

import file_sabotages
import noise_sabotages
import worker_sabotages

TEN_WAYS = {
    1: "a sigma was logged and nothing added",
    2: "a class check matched no module, and the run went on without noise",
    3: "a setting stood under a key that nothing read",
    4: "a step counter was not advanced",
    5: "noise stayed on in validation, or was absent in the evaluation",
    6: "the last step was never validated",
    7: "the weights or the number format evaluated were not the ones trained",
    8: "runs were overwritten, checkpoints not saved, responses not stored",
    9: "arms differed in more than the named factor, single runs were unseeded",
    10: "a patch was left on",
}
SABOTAGES = noise_sabotages.SABOTAGES + worker_sabotages.SABOTAGES + file_sabotages.SABOTAGES
ACCEPTED = {
    "answers rewritten and vouched for": "who rewrites responses, answers, grades and every digest alike leaves a "
    "study that is sound in itself; only evaluating the checkpoint again, which gives the same bytes, shows it",
}
"""What is not caught, and why."""

ONLY_IN_THE_TABLE = {"noise not installed in one trainer"}
"""What the tests leave to `make attacks`: Ray Train takes a minute of processor time to launch trainers."""
