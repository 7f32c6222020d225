"""What is shown while a run is on is decoration: no run ends for want of somebody who looks."""

import io
import os
import pty
import select
import termios

import pytest

from promptmill.progress import Progress
from tests.rows import make_summary


class GoneStream:
    """A terminal or pipe whose reader has gone away."""

    encoding = "utf-8"

    def __init__(self, is_terminal):
        self.is_terminal = is_terminal
        self.attempts = 0

    def isatty(self):
        return self.is_terminal

    def write(self, text):
        self.attempts += 1
        raise BrokenPipeError

    def flush(self):
        raise BrokenPipeError

    def fileno(self):
        raise OSError


def show_a_run(stream):
    progress = Progress(stream)
    progress.note("it starts")
    progress.start(2, 0)
    progress.sample_finished(make_summary())
    progress.tick()
    progress.finish()


def test_a_reader_that_goes_away_ends_nothing():
    for is_terminal in (False, True):
        stream = GoneStream(is_terminal)
        show_a_run(stream)
        assert stream.attempts == 1


def test_a_run_that_is_stopping_says_for_how_long_at_most():
    now_s = 0.0
    shown = io.StringIO()
    progress = Progress(shown, clock=lambda: now_s)
    progress.start(9, 0)
    now_s = 20.0
    progress.sample_finished(make_summary())
    assert "s left" in shown.getvalue().splitlines()[-1]
    progress.stopping(20.0)
    now_s = 32.5
    progress.tick()
    last = shown.getvalue().splitlines()[-1]
    assert "1/9 prompts (done 1, stopping in 8 s at the latest, " in last
    assert "s left" not in last


@pytest.mark.parametrize(("size", "has_bar"), [((24, 80), True), ((24, 0), False), ((0, 80), False)])
def test_a_terminal_without_a_size_gets_plain_lines(size, has_bar):
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, size)
    now_s = 0.0
    shown = ""
    with os.fdopen(theirs, "w", encoding="utf-8") as stream:
        progress = Progress(stream, clock=lambda: now_s)
        progress.start(2, 0)
        now_s = 20.0
        progress.sample_finished(make_summary())
        progress.finish()
        while select.select([ours], [], [], 0.2)[0]:
            shown += os.read(ours, 10_000).decode()
    os.close(ours)
    assert ("1/2 prompts [" in shown) == has_bar
    assert ("1/2 prompts (done 1" in shown) == (not has_bar)
