"""What a dry run says of the whole: sums that hold, and intervals that hold them."""

import random

import pytest

from promptmill.budget import Spent
from promptmill.estimate import estimate_lines, estimate_sum
from tests.rows import make_summary


def test_equal_prompts_leave_no_doubt():
    estimate = estimate_sum([2.0, 2.0, 2.0], left=7, before=1.0)
    assert (estimate.expected, estimate.low, estimate.high) == (21.0, 21.0, 21.0)


def test_one_prompt_tells_no_interval():
    assert "no interval" in estimate_sum([2.0], left=7).shown(str)


@pytest.mark.parametrize("sampled", [3, 10, 40])
def test_the_interval_holds_the_true_sum_nearly_always(sampled):
    rng = random.Random(sampled)
    held = 0
    for _ in range(400):
        values = [rng.gauss(10, 3) for _ in range(200)]
        estimate = estimate_sum(values[:sampled], left=len(values) - sampled)
        held += estimate.low <= sum(values) <= estimate.high
    assert 0.92 <= held / 400 <= 0.98


def test_what_is_unknown_is_said_to_be():
    lines = estimate_lines([make_summary(), make_summary("b")], 8, Spent(), 2)
    assert "  cost    unknown" in lines
    assert "  tokens  unknown" in lines


def test_prompts_that_never_called_the_model_tell_nothing():
    (line,) = estimate_lines([make_summary(api_calls=0)], 8, Spent(), 2)
    assert "nothing to estimate from" in line


def test_time_is_for_what_is_left_by_how_many_are_in_flight():
    lines = estimate_lines([make_summary(duration_s=60.0), make_summary("b", duration_s=60.0)], 8, Spent(), 2)
    assert "  time    4 min 00 s (4 min 00 s to 4 min 00 s) for those left, 2 in flight at once" in lines
