# SPDX-License-Identifier: Apache-2.0
"""How the records of a run are read."""

import jax.numpy as jnp
import numpy as np

from jls._program.records import First, Records, WhileRecords, key_of


def test_the_numbers_of_a_loop_in_a_loop_are_those_of_its_bad_iteration():
    def kept(record):
        never = np.array([0xFFFF_FFFF, 0], np.uint32)
        return WhileRecords(First(record, never), First(record, never))

    ends = np.asarray(key_of(jnp.array([[3.0, -2.0]])))
    records = Records({0: {1: kept(kept(ends))}})
    (found,) = records.numbers((0, 1))
    assert found.tolist() == [[3.0, -2.0]]
    assert records.numbers((0, 2)) == records.numbers((0,)) == []
