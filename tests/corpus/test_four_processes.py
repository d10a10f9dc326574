"""The tests of tests/processes, with four processes."""

import pytest
from test_processes import (  # noqa: F401
    test_a_run_saved_by_two_processes_goes_on_in_others,
    test_processes_agree_with_each_other_and_with_a_single_one,
    test_processes_hand_out_the_same_batches_again,
    test_processes_say_what_was_wrong,
    test_processes_take_one_decision,
    test_processes_take_one_decision_on_a_spike,
)


@pytest.fixture(params=[4])
def processes(request):
    return request.param


one_or_more = others = processes
