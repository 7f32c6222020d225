"""What is shown while a run is on is decoration: no run ends for want of somebody who looks."""

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
