"""The checkpoint's documented content, and how often it is worth saving."""

import orjson

from promptmill.checkpoint import MAX_COST_SHARE, Checkpoint
from promptmill.errors import Outcome


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


def test_the_content_is_the_documented_one():
    checkpoint = Checkpoint("my_run", bytearray([1, 0, 1]))
    for outcome in Outcome:
        checkpoint.count(10, outcome)
    checkpoint.count(2, Outcome.COMPLETED)
    content = checkpoint.content("2026-01-30T10:00:00.123456")
    assert content == {
        "run_name": "my_run",
        "completed_prompts": [0, 2],
        "batch_stats": {
            "2": {"processed": 1, "discarded": 0, "failed": 0},
            "10": {"processed": 2, "discarded": 1, "failed": 3},
        },
        "last_updated": "2026-01-30T10:00:00.123456",
    }
    assert list(content["batch_stats"]) == ["2", "10"]
    assert orjson.loads(orjson.dumps(content)) == content


def test_a_checkpoint_that_was_never_saved_is_due():
    assert Checkpoint("my_run", bytearray()).is_due


def test_the_next_save_waits_until_the_last_one_is_a_small_share_of_the_time():
    clock = Clock()
    checkpoint = Checkpoint("my_run", bytearray(), clock=clock)
    checkpoint.saved(cost_s=0.5)
    clock.now_s += 0.5 / MAX_COST_SHARE - 0.1
    assert not checkpoint.is_due
    clock.now_s += 0.2
    assert checkpoint.is_due
    checkpoint.saved(cost_s=0.0)
    assert checkpoint.is_due
