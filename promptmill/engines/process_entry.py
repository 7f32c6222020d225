"""The first thing that runs in a worker process; all that the runner itself must import of it."""

import socket

from promptmill.config import WorkerSettings


def process_entry(settings: WorkerSettings, end: socket.socket) -> None:
    """Entry point of the process."""
    # Imported here, since the runner refers to this function but must not pay for the model client's imports.
    from promptmill.engines.process_worker import process_main

    process_main(settings, end)
