# SPDX-License-Identifier: Apache-2.0
"""Processes that train together over loopback take the steps that one would take."""

import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

PROGRAM = Path(__file__).with_name("process_program.py")
DEVICES = 4  # in all, however many processes they belong to
SECONDS = 240
# Each process has less than a core: see the conftest.py of the repository.
ONE_THREAD = "--xla_cpu_parallel_codegen_split_count=1"
WAYS = ["data", "fsdp", "shard_map"]
APPLIED = [True, True, False, True, True]
SCALES = [2.0**14, 2.0**15, 2.0**14, 2.0**14, 2.0**15]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment():
    """Without proxies, which gRPC would ask for the way to this very machine."""
    kept = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    return kept | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ONE_THREAD}


def start(program, numbers, folder, *more):
    rank = numbers[0]
    arguments = [*map(str, numbers), str(folder / f"{rank}.json"), *more]
    with (folder / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, str(program), *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(),
        )


def wait(children):
    """Waits for all, but not for those that wait for one that has failed."""
    deadline = time.monotonic() + SECONDS
    while any(child.poll() is None for child in children):
        if any(child.poll() for child in children) or time.monotonic() > deadline:
            time.sleep(1)  # for the others to say what they have seen
            break
        time.sleep(0.05)


@functools.cache
def outcome(processes, program=PROGRAM, *more):
    """What each process has seen; a report instead, if one has failed."""
    with tempfile.TemporaryDirectory() as name:
        folder, port, children = Path(name), free_port(), []
        try:
            for rank in range(processes):
                numbers = rank, processes, DEVICES // processes, port
                children.append(start(program, numbers, folder, *more))
            wait(children)
            codes = [child.poll() for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
        if any(codes) or None in codes:
            logs = [path.read_text(errors="replace") for path in folder.glob("*.log")]
            return "\n".join([f"exit codes {codes} (None: it still ran)", *logs])
        files = [folder / f"{rank}.json" for rank in range(processes)]
        return [json.loads(file.read_text()) for file in files]


def run(processes):
    found = outcome(processes)
    assert isinstance(found, list), found
    return found


# How many processes: tests/corpus has other numbers.
@pytest.fixture(params=[2])
def processes(request):
    return request.param


@pytest.fixture(params=[1, 2])
def one_or_more(request):
    return request.param


@pytest.fixture(params=[1])
def others(request):
    return request.param


@pytest.mark.parametrize("way", WAYS)
def test_processes_take_one_decision(processes, way):
    for found in (seen[way] for seen in run(processes)):
        steps = found["steps"]
        assert [step["applied"] for step in steps] == APPLIED
        assert [step["moved"] for step in steps] == APPLIED
        assert [step["loss_scale"] for step in steps] == SCALES
        assert [step["skips"] for step in steps] == [0, 0, 1, 1, 1]
        assert all(np.isfinite(step["loss"]) for step in steps)
        assert found["placed"] == [way == "data", True]
        assert found["compiled"] == 1


@pytest.mark.parametrize("way", WAYS)
def test_processes_agree_with_each_other_and_with_a_single_one(processes, way):
    """Bit for bit: gloo adds up four devices in the order in which one process does."""
    (single,) = run(1)
    for seen in run(processes):
        ours, one = dict(seen[way]), dict(single[way])
        if seen is not run(processes)[0]:
            assert ours.pop("health of rank 0") is None
            one.pop("health of rank 0")
        assert ours == one


def test_processes_say_what_was_wrong(one_or_more):
    for rank, seen in enumerate(run(one_or_more)):
        for way in WAYS:
            found = seen[way]
            assert found["bad"] == ["w"]
            assert found["health"].startswith("1 of 5 steps")
            unseen = f"{found['health'][:-1]}; the parameters were not looked at."
            assert found["health of rank 0"] == (unseen if rank == 0 else None)
        assert "axis_name 'rows' is not bound here" in seen["unbound"]


def test_processes_take_one_decision_on_a_spike(one_or_more):
    (single,) = run(1)
    assert single["spiking"][0] == [True, True, True, False, True]
    assert all(seen["spiking"] == single["spiking"] for seen in run(one_or_more))


def test_processes_hand_out_the_same_batches_again(one_or_more):
    (single,) = run(1)
    assert single["requeued"]["tries"].count(1) > 1
    assert single["requeued"]["bad"] == [[3, "LOSS"]]
    assert sorted(single["requeued"]["used"]) == [0, 1, 2, 4, 5]
    assert single["requeued"]["by device"] == [[0, "comes again"]]
    assert all(seen["requeued"] == single["requeued"] for seen in run(one_or_more))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_state_that_differs_is_named(processes):
    rule = "must be the same on all devices, got"
    scales = f"loss_scale {rule} 2^3 on process 0, 2^4 on process 1."
    steps = f"steps {rule} 0 and 5 on devices of process 0"
    for seen in run(processes):
        *differ, drifted = seen["out of sync"]
        assert len(differ) == processes - 1
        assert all(message.startswith(scales) for message in differ)
        assert drifted.startswith(steps)
        assert ("0 on process 1" in drifted) == (processes == 2)


def test_check_step_asks_for_arrays_of_one_process(processes):
    for seen in run(processes):
        assert "params/b must be held by this process, got a global" in seen["check"]
        assert "jls.check_step with process-local arrays" in seen["check"]


def test_a_run_saved_by_two_processes_goes_on_in_others(others, tmp_path):
    program = PROGRAM.with_name("process_restore_program.py")
    uninterrupted = outcome(2, program, str(tmp_path))
    assert isinstance(uninterrupted, list), uninterrupted
    resumed = outcome(others, program, str(tmp_path))
    assert isinstance(resumed, list), resumed
    for found in resumed:
        assert found == uninterrupted[0]
        assert found["split"]


def test_a_process_that_fails_is_quoted_and_keeps_nobody_waiting(tmp_path):
    """Of this harness: what if one of two dies, and the other waits for it?"""
    program = tmp_path / "fails.py"
    program.write_text(
        "import sys, time\n"
        "time.sleep(120) if sys.argv[1] == '0' else sys.exit('no more memory')\n"
    )
    report = outcome(2, program)  # None: one still slept when the other had failed
    assert "exit codes [None, 1]" in report
    assert "no more memory" in report
