# SPDX-License-Identifier: Apache-2.0
"""A run saved by some processes goes on in others; test_processes.py starts them.

    python process_restore_program.py RANK PROCESSES DEVICES PORT FILE FOLDER

With an empty FOLDER it trains half-way, saves there, and goes on to the end. Else it
restores what is there and does the second half.
"""

import json
import sys
from pathlib import Path

# First, since it joins the other processes.
from process_program import (
    BATCHES,
    PARAMS,
    SPLIT,
    WHOLE,
    as_hex,
    jitted,
    optimizer_of,
    put,
    replicated,
)

import jax  # isort: skip
import orbax.checkpoint as ocp  # isort: skip

FOLDER = Path(sys.argv[6]) / "saved"
HALF = 3  # the third step is the one that overflows

optimizer = optimizer_of()
step = jitted(optimizer)
params = {"b": put(PARAMS["b"], WHOLE), "w": put(PARAMS["w"], SPLIT)}
run = {"params": params, "state": optimizer.init(params)}


def train(run, batches):
    params, state = run["params"], run["state"]
    for x in batches:
        params, state, _, _ = step(params, state, put(x, SPLIT))
    return {"params": params, "state": state}


with ocp.StandardCheckpointer() as checkpointer:
    if FOLDER.exists():
        run = checkpointer.restore(FOLDER, run)
    else:
        run = train(run, BATCHES[:HALF])
        checkpointer.save(FOLDER, run)
        checkpointer.wait_until_finished()
run = train(run, BATCHES[HALF:])
found = {
    "bits": as_hex(replicated(run)),
    "split": run["state"].inner_state[0].mu["w"].sharding.is_equivalent_to(SPLIT, 2),
}
Path(sys.argv[5]).write_text(json.dumps(found))
jax.distributed.shutdown()
