"""Many configs -> Compiled: the fan-out over worker processes, which may die."""

from __future__ import annotations

import heapq
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flashtune.children import children_without_ctrl_c
from flashtune.compiler import CompileJob, How, compile_one, kill_what_is_left
from flashtune.records import Compiled, Status

_POOL_RESTARTS = 3
_AHEAD = 4  # jobs under way beyond the workers: enough while the caller looks at a result
_ASK_AGAIN_S = 0.05  # until a caller that was not ready is asked again

_Placed = tuple[int, CompileJob]  # a job and its place in the order given
_Finished = tuple[int, CompileJob, Compiled]


def default_jobs() -> int:
    """As many workers as this process may use CPUs: affinity and container quotas count."""
    from joblib import cpu_count

    return int(cpu_count())


def cpus_beside_launches() -> frozenset[int] | None:
    """The CPUs that compiling may use while another process launches: all but one of ours."""
    allowed = os.sched_getaffinity(0)
    return frozenset(allowed - {max(allowed)}) or None


def compile_all(
    jobs: Sequence[CompileJob],
    n_jobs: int,
    how: How | None = None,
    wanted: Callable[[CompileJob], bool] = lambda job: True,
    ready: Callable[[], bool] = lambda: True,
    cpus: frozenset[int] | None = None,
) -> Iterator[tuple[CompileJob, Compiled]]:
    """Compile in ``n_jobs`` worker processes, in about the order given; results come as they
    finish, and of those that have finished the first in that order.

    Every job ends in a Compiled, whatever becomes of its compiler, but for those that are not
    ``wanted``: these are asked about again until nothing is under way and no result waits. While
    the caller is not ``ready`` results wait, unless nothing else is under way, and the workers go
    on. Workers that die are replaced; what is left when that happens for the fourth time is given
    up with that as its reason. ``how`` does one job in its child, instead of compiling it to the
    end. The workers run on ``cpus``, by default on all that this process may use.
    """
    if not jobs:
        return
    from joblib.externals.loky import get_reusable_executor

    executor = None
    waiting = list(enumerate(jobs))
    finished: list[_Finished] = []  # a heap; no two have one place
    scratch = Path(tempfile.mkdtemp(prefix="flashtune-"))
    try:
        for attempt in range(_POOL_RESTARTS + 1):
            with children_without_ctrl_c():
                executor = get_reusable_executor(
                    max_workers=n_jobs, timeout=60, kill_workers=attempt > 0
                )

            def submit(job: CompileJob, pool: Any = executor) -> Any:
                with children_without_ctrl_c():  # the pool starts its workers when it needs them
                    return pool.submit(compile_one, job, scratch, how, cpus)

            lost: list[_Placed] = []
            yield from _until_it_breaks(
                submit, waiting, n_jobs + _AHEAD, wanted, ready, finished, lost
            )
            if not lost:
                return
            # Behind those that never ran: one of the lost ones broke the pool.
            waiting.extend(lost)
        for _, job, compiled in sorted(finished, key=lambda done: done[0]):
            yield job, compiled
        reason = "the compile worker was killed each time (out of memory?)"
        for _, job in waiting:
            if wanted(job):
                yield job, Compiled(job.config, failure=Status.CRASHED, reason=reason)
    except BaseException:
        # Ctrl-C, or the caller gave up: nothing may go on compiling behind its back.
        if executor is not None:
            executor.shutdown(wait=True, kill_workers=True)
        kill_what_is_left(scratch)
        raise
    finally:  # here and not in the workers, which may be killed at any moment
        shutil.rmtree(scratch, ignore_errors=True)


def _until_it_breaks(
    submit: Callable[[CompileJob], Any],
    waiting: list[_Placed],
    most: int,
    wanted: Callable[[CompileJob], bool],
    ready: Callable[[], bool],
    finished: list[_Finished],
    lost: list[_Placed],
) -> Iterator[tuple[CompileJob, Compiled]]:
    """Results of ``waiting``, which empties but for what is not ``wanted``, with at most ``most``
    jobs under way; what a broken pool took with it goes to ``lost``, and what nobody was ready for
    stays in ``finished``."""
    from joblib.externals.loky import FIRST_COMPLETED, wait
    from joblib.externals.loky.process_executor import BrokenProcessPool

    running: dict[Any, _Placed] = {}
    broken = False
    while True:
        while not broken and len(running) < most:
            placed = next((placed for placed in waiting if wanted(placed[1])), None)
            if placed is None:
                break
            waiting.remove(placed)
            try:
                running[submit(placed[1])] = placed
            except BrokenProcessPool:
                lost.append(placed)
                broken = True
        if not running and (broken or not finished):
            return
        hand_over = bool(finished) and ready()
        pause = 0 if hand_over else _ASK_AGAIN_S if finished else None
        for future in wait(running, pause, FIRST_COMPLETED).done if running else ():
            place, job = running.pop(future)
            try:
                heapq.heappush(finished, (place, job, future.result()))
            except BrokenProcessPool:
                lost.append((place, job))
                broken = True
        if finished and (hand_over or not running):
            _, job, compiled = heapq.heappop(finished)
            yield job, compiled
