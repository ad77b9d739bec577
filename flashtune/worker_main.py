"""Where a GPU process begins. A module of its own, so that starting one loads nothing else."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection

from flashtune.kernels import Kernel


def run(
    connection: Connection, kernel: Kernel, serve: Callable[[Connection, Kernel], None] | None
) -> None:
    """Serve calls on ``connection``; by default those of :func:`flashtune.worker.serve`."""
    if serve is None:
        from flashtune import worker

        worker.serve(connection, kernel)
    else:
        serve(connection, kernel)
