"""One config -> Compiled, for any GPU, with no GPU context: what a worker of the fan-out does.

A worker makes the very call that a launch makes (``kernel.warmup`` with the launch's arguments),
under a driver that only names the target. Triton's cache key is then the launch's by construction,
and the launch finds the binary. Each config compiles in a child that the worker forks: a child can
be killed with everything it started when it hangs, can crash alone, and keeps the compiler's dumps
(13,000 lines for a ptxas refusal) to itself.
"""

from __future__ import annotations

import functools
import os
import pickle
import re
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from flashtune.cubin import read_cubin
from flashtune.kernels import Kernel, load_kernel
from flashtune.kernels.launch import absent_arguments, config_arguments
from flashtune.records import Compiled, Config, Problem, Status

DEFAULT_TIMEOUT_S = 120.0
_REHEARSAL = absent_arguments(Problem(1, 1, 1, 16, 16, 16, False, "fp32"))


@dataclass(frozen=True)
class CompileJob:
    """One config to compile for one problem's dtype, D, mask and divisibility."""

    kernel: Kernel
    problem: Problem
    config: Config
    cc: int  # 89 for 8.9
    timeout_s: float = DEFAULT_TIMEOUT_S


How = Callable[[CompileJob], Compiled]


def specialisation(problem: Problem) -> tuple[object, ...]:
    """What Triton's compiled code depends on; problems that agree share their binaries.

    Triton tells integers apart by being 1, a multiple of 16 or neither, and by fitting 32 bits.
    """

    def kind(value: object) -> object:
        if isinstance(value, int) and not isinstance(value, bool):
            return (value == 1, value % 16 == 0, value >= 2**31)
        return value

    values = absent_arguments(problem)
    constants = ("D", "PADDED_D", "is_causal", "scale")
    runtime = {name: kind(v) for name, v in values.items() if name not in (*constants, "H")}
    runtime = {name: v for name, v in runtime.items() if not name.endswith("_ptr")}
    return (problem.dtype, problem.D, problem.causal, *runtime.items())


def compile_one(
    job: CompileJob, scratch: Path, how: How | None = None, cpus: frozenset[int] | None = None
) -> Compiled:
    """Compile in a forked child with a time limit. Runs in a worker, which never holds CUDA.

    The child's own temporary files go into a folder of their own in ``scratch``.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    try:
        prepare_worker(job.kernel, job.cc)
    except Exception as error:  # the kernel's own module may raise anything
        return Compiled(job.config, failure=Status.CRASHED, reason=_one_line(error))
    scratch = Path(tempfile.mkdtemp(dir=scratch))
    reader, writer = os.pipe()
    worker = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            _compile_and_exit(job, how or _compile, scratch, writer, worker)
        finally:
            os._exit(1)  # an error (disk full) must not return into a second copy of the worker
    os.close(writer)
    try:
        return _await_child(job, child, reader, scratch)
    finally:
        os.close(reader)
        shutil.rmtree(scratch, ignore_errors=True)


def kill_what_is_left(scratch: Path) -> None:
    """End the children of killed workers, each with its ptxas, which may outlive it."""
    for path in scratch.glob("*/group"):
        with suppress(ValueError):  # not written yet: that child sees that its worker is gone
            _kill_group(int(path.read_text()))


def prepare_worker(kernel: Kernel, cc: int) -> Any:
    """Make ``cc`` Triton's target in this process; returns the kernel, ready to be compiled."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    # Every time: the job before may have been for another GPU.
    driver.set_active(_TargetOnly(GPUTarget("cuda", cc, 32)))
    return _rehearsed(kernel, cc)


@functools.cache
def _rehearsed(kernel: Kernel, cc: int) -> Any:
    """Import Triton and the kernel once in a worker, so that its forked children have them."""
    import triton
    from triton.runtime.cache import triton_key

    triton_key()  # hashes all of Triton, 2 s: remembered here, not once in every child
    jit_function = load_kernel(kernel).flash_fwd_kernel
    # A call that stops short of compiling makes Triton import what it imports late.
    triton.knobs.runtime.jit_cache_hook = lambda **_: True
    try:
        with _without_torch():
            jit_function.warmup(**_REHEARSAL, **config_arguments(Config(16, 16, 1, 1)), grid=(1,))
    finally:  # a user's kernel may refuse the arguments; the next kernel's jobs must compile
        triton.knobs.runtime.jit_cache_hook = None
    return jit_function


@contextmanager
def _without_torch() -> Iterator[None]:
    """Triton before 3.9 imports torch to ask whether an argument is a tensor, which none is here:
    2 to 4 s in each worker, all at the same time, before the first of them compiles."""
    if "torch" in sys.modules:  # the kernel's own module needs it
        yield
        return
    stand_in = ModuleType("torch")
    stand_in.Tensor = type("Tensor", (), {})  # type: ignore[attr-defined]
    sys.modules["torch"] = stand_in
    try:
        yield
    finally:
        del sys.modules["torch"]


class _TargetOnly:
    """A Triton driver with a target and no GPU behind it."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        # A JIT function asks for the target once for each device and keeps the answer: targets
        # must be devices of their own, or the first one's code would pass for all the others.
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0


def _compile_and_exit(job: CompileJob, how: How, scratch: Path, writer: int, worker: int) -> None:
    """The child: compile, send the result through the pipe, and leave without clean-up."""
    os.setsid()  # a group of its own, so that ptxas can be killed with it
    _die_with_parent()
    if os.getppid() != worker:  # it was killed before that could take effect
        os._exit(1)
    (scratch / "group").write_text(str(os.getpid()))
    output = os.open(scratch / "output", os.O_WRONLY | os.O_CREAT)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["TMPDIR"] = str(scratch)  # a failing ptxas leaves its input there
    tempfile.tempdir = None
    try:
        result = how(job)
    except BaseException as error:
        result = _classified(job.config, error, scratch)
    with os.fdopen(writer, "wb") as pipe:
        pickle.dump(result, pipe)
    os._exit(0)


def _compile(job: CompileJob) -> Compiled:
    import triton

    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda **event: hits.append(bool(event["cache_hit"]))
    kernel = prepare_worker(job.kernel, job.cc)
    values = absent_arguments(job.problem)
    start = time.perf_counter()
    compiled = kernel.warmup(**values, **config_arguments(job.config), grid=(1,))
    seconds = time.perf_counter() - start
    facts = read_cubin(compiled.asm["cubin"])
    shared, warps = compiled.metadata.shared, compiled.metadata.num_warps
    return Compiled(
        job.config,
        shared=shared,
        regs=facts.regs,
        warps=warps,
        spills=facts.frame_bytes // 4,
        seconds=None if hits == [True] else seconds,
        # Equal instructions with other shared bytes, warps or registers (maxnreg, where warps deal
        # them out anew) are launched differently.
        code_hash=f"{facts.code_hash}-{shared}-{warps}-{facts.regs}",
    )


def _await_child(job: CompileJob, child: int, reader: int, scratch: Path) -> Compiled:
    deadline = time.monotonic() + job.timeout_s
    run = os.getppid()
    received = b""
    while True:
        left = deadline - time.monotonic()
        ready, _, _ = select.select([reader], [], [], min(1.0, max(0.0, left)))
        if not ready and os.getppid() != run:  # the whole run was killed: nobody waits for this
            _kill_group(child)
            os._exit(1)
        if not ready and left > 0:
            continue
        if not ready:
            _kill_group(child)
            os.waitpid(child, 0)
            reason = f"compiling took over {job.timeout_s:g} s and was stopped"
            return Compiled(job.config, failure=Status.TIMEOUT, reason=reason)
        chunk = os.read(reader, 1 << 16)
        if not chunk:
            break
        received += chunk
    _, wait_status = os.waitpid(child, 0)
    if wait_status == 0 and received:
        result = pickle.loads(received)
        assert isinstance(result, Compiled)
        return result
    code = os.waitstatus_to_exitcode(wait_status)
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    said = _telling_line(_output(scratch))
    reason = f"the compiler died ({how})" + (f": {said}" if said else "")
    return Compiled(job.config, failure=Status.COMPILE_FAILED, reason=reason)


def _kill_group(child: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


def _output(scratch: Path) -> str:
    """What the child wrote; nothing when it did not get as far as opening the file."""
    with suppress(FileNotFoundError):
        return (scratch / "output").read_text(errors="replace")
    return ""


def _classified(config: Config, error: BaseException, scratch: Path) -> Compiled:
    """A compiler's refusal is COMPILE_FAILED with its one line; anything else is CRASHED."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import PTXASError

    if isinstance(error, PTXASError):
        reason = _telling_line(str(error)) or _one_line(error)
        return Compiled(config, failure=Status.COMPILE_FAILED, reason=reason)
    if isinstance(error, CompilationError):
        reason = f"triton: {_front_end_line(error)}"
        return Compiled(config, failure=Status.COMPILE_FAILED, reason=reason)
    if isinstance(error, RuntimeError) and "PassManager" in str(error):
        said = _telling_line(_output(scratch))
        reason = f"triton: {said or _one_line(error)}"
        return Compiled(config, failure=Status.COMPILE_FAILED, reason=reason)
    return Compiled(config, failure=Status.CRASHED, reason=f"unknown failure: {_one_line(error)}")


def _front_end_line(error: BaseException) -> str:
    """What Triton's front end refused, without the excerpts of source it wraps that in."""
    from triton.compiler.errors import CompilationError

    while error.__cause__ is not None:  # one level for each call of a device function
        error = error.__cause__
    if not isinstance(error, CompilationError):
        return _one_line(error)
    lines = [line.strip() for line in str(error).splitlines()]
    return next((line for line in reversed(lines) if line.strip("^")), "refused")[:300]


def _telling_line(text: str) -> str | None:
    """The line of a compiler's output that says what is wrong."""
    for pattern in (r"ptxas\S*\s*(fatal|error)", r"\berror:", r"^LLVM ERROR", r"Assertion"):
        for line in text.splitlines():
            if re.search(pattern, line):
                return re.sub(r"\s+", " ", line.strip())[:300]
    return None


def _one_line(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:300]


def _die_with_parent() -> None:
    """Linux: when the worker dies, even by kill -9, end with all that this child started.

    A signal that kills outright would leave ptxas running, so this one is caught.
    """
    import ctypes

    PR_SET_PDEATHSIG = 1
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
