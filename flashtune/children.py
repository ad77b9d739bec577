"""Starting processes that Ctrl-C must not reach: it is this process's to answer."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def children_without_ctrl_c() -> Iterator[None]:
    """Processes started here never see Ctrl-C; one that comes meanwhile is raised afterwards.

    A worker can ignore it by itself only once it has booted; until then it would die with a
    traceback. So it inherits that the signal is blocked. Here it may still arrive, through a thread
    that does not block it, and must not tear the pool while that is being built.
    """
    from multiprocessing import resource_tracker

    if threading.current_thread() is not threading.main_thread():  # no signals for it to handle
        yield
        return
    # These unblock Ctrl-C as they start, and so must have started.
    resource_tracker.ensure_running()
    if "joblib.externals.loky" in sys.modules:  # a pool starts one of its own; slow to load
        from joblib.externals.loky.backend import resource_tracker as loky_resource_tracker

        loky_resource_tracker.ensure_running()
    arrived: list[int] = []
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    before = signal.signal(signal.SIGINT, lambda number, _: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    if arrived:
        signal.raise_signal(signal.SIGINT)
