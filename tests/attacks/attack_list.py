"""All sabotages, and the ten faults of the original experiments that some of them repeat."""

import aqn_sabotages
import checkpoint_sabotages
import distribution_sabotages
import evaluation_sabotages
import fault_sabotages
import file_sabotages
import key_sabotages
import loss_sabotages
import noise_sabotages
import optimiser_sabotages
import place_sabotages
import rollout_sabotages
import worker_sabotages

TEN_WAYS = {
    1: "a sigma was logged and nothing added",
    2: "a class check matched no module, and the run continued without noise",
    3: "a setting was under a key that nothing read",
    4: "a step counter was not advanced",
    5: "noise stayed on in validation, or was absent in the evaluation",
    6: "the last step was never validated",
    7: "other weights or another number format were evaluated than were trained",
    8: "runs were overwritten, checkpoints not saved, responses not stored",
    9: "arms differed in more than the named factor, single runs were unseeded",
    10: "a patch was left behind",
}
SABOTAGES = (
    *noise_sabotages.SABOTAGES,
    *key_sabotages.SABOTAGES,
    *distribution_sabotages.SABOTAGES,
    *place_sabotages.SABOTAGES,
    *aqn_sabotages.SABOTAGES,
    *fault_sabotages.SABOTAGES,
    *optimiser_sabotages.SABOTAGES,
    *loss_sabotages.SABOTAGES,
    *rollout_sabotages.SABOTAGES,
    *checkpoint_sabotages.SABOTAGES,
    *evaluation_sabotages.SABOTAGES,
    *worker_sabotages.SABOTAGES,
    *file_sabotages.SABOTAGES,
)

ONLY_IN_THE_TABLE = {"noise not installed in one trainer"}
"""What the tests leave to `make attacks`: Ray Train takes a minute of processor time to launch trainers."""
