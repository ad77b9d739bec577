"""The measuring half of a bench, in the process that calls it: compile, check, tune, time in turns.

Everything is compiled first, in processes of its own. Then each kernel's answer is checked once on
each problem, between rows of NaN, and an entry with several configs keeps its fastest. Then come
the runs: in each, on every problem anew, fresh inputs, warm clocks, and rounds in which everybody
has launches in turns with a cold L2, in an order that is drawn anew for each round.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from math import ceil
from typing import Any

import torch

from flashtune.bench import BackendRuns, Bench, Ceilings, KernelRuns, ShapeRuns
from flashtune.ceilings import ClockLog, ceilings
from flashtune.check import (
    Inputs,
    check,
    checksum,
    guarded_inputs,
    guarded_outputs,
    random_inputs,
    references,
)
from flashtune.compiler import CompileJob, specialisation
from flashtune.driver import clock_reader, other_processes
from flashtune.entries import Entry
from flashtune.errors import FlashtuneError
from flashtune.fan_out import compile_all, default_jobs
from flashtune.gpu import GpuSpec
from flashtune.kernels import Kernel, kernel_hash, load_kernel
from flashtune.kernels.launch import forward
from flashtune.provenance import provenance
from flashtune.records import Compiled, Config, Problem, Status
from flashtune.results import Checked
from flashtune.stats import median
from flashtune.timing import SDPA_BACKENDS, Timer, forced, refusal, sdpa_launch
from flashtune.worker import failure

Launch = Callable[[], None]
Stage = Callable[[str, int], AbstractContextManager[Callable[[], None]]]
"""Told what begins and how many steps it has; gives what to call after each step."""

TUNING_SAMPLES = 5
ROUND_SAMPLES = 10  # of each in a round
RUN_MS = 500.0  # a run aims for this much time inside kernels on a problem
MOST_ROUNDS = 6


@dataclass
class KernelUnderTest:
    """One entry on one problem, on its way to a KernelRuns."""

    entry: Entry
    config: Config | None = None
    ms: list[float] = field(default_factory=list)
    checked: dict[Config, Checked] = field(default_factory=dict)

    def finished(self) -> KernelRuns:
        status, reason = self._why_not() if self.config is None else (None, None)
        shown = self.config or next(iter(self.checked), None)
        check = None if shown is None else self.checked[shown].check
        return KernelRuns(
            entry=self.entry,
            config=self.config,
            ms=tuple(self.ms),
            failure=status,
            reason=reason,
            left_out=tuple(
                f"{config}: {seen.reason}"
                for config, seen in self.checked.items()
                if seen.failure is not None
            ),
            max_abs_err=None if check is None else check.max_abs_err,
        )

    def _why_not(self) -> tuple[Status, str]:
        """Nothing ran: the first config's failure, or why there is no config."""
        if not self.checked:
            return Status.PRUNED, self.entry.source
        config, seen = next(iter(self.checked.items()))
        return seen.failure or Status.CRASHED, f"{config}: {seen.reason}"


@dataclass
class ShapeUnderTest:
    """One problem, on its way to a ShapeRuns."""

    problem: Problem
    kernels: list[KernelUnderTest]
    refusals: dict[str, str | None]  # by SDPA backend; None: it takes the problem
    backend_ms: dict[str, list[float]]
    clocks: ClockLog

    def finished(self) -> ShapeRuns:
        return ShapeRuns(
            self.problem,
            tuple(kernel.finished() for kernel in self.kernels),
            tuple(
                BackendRuns(backend, tuple(self.backend_ms[backend]), reason)
                for backend, reason in self.refusals.items()
            ),
            self.clocks.sm_clock_mhz(),
            self.clocks.throttle(),
        )


Plan = Sequence[tuple[Problem, Sequence[Entry]]]


def run(plan: Plan, gpu: GpuSpec, runs: int, command: str, stage: Stage) -> Bench:
    """Bench ``plan``, whose problems have one dtype, on the card ``gpu``, which is present.

    ``command`` is kept for the reader. A kernel that fails or answers wrong is not timed and says
    so. Raises FlashtuneError when torch cannot use the GPU, when a problem does not fit its
    memory, and when a launch ends the CUDA context.
    """
    _require_cuda()
    started, others = datetime.now(UTC), other_processes()
    kernels = {e.kernel.name: e.kernel for _, entries in plan for e in entries}
    dtype = plan[0][0].dtype
    shapes, reached = _measure(plan, gpu.cc_number, dtype, runs, stage)
    return Bench(
        provenance=provenance(
            gpu, ", ".join(kernels), ", ".join(kernel_hash(k) for k in kernels.values())
        ),
        title=gpu.title,
        cudnn=_cudnn_version(),
        started=started,
        command=command,
        runs=runs,
        dtype=dtype,
        shapes=shapes,
        ceilings=reached,
        notes=tuple(_notes(shapes, others)),
    )


def _notes(shapes: Sequence[ShapeRuns], others: tuple[int, ...] | None) -> Iterator[str]:
    """What keeps the figures from being the whole truth."""
    if others:
        yield f"{len(others)} other processes were on this GPU at the start: times may vary."
    held = [shape for shape in shapes if shape.throttle]
    if held:
        why = ", ".join(sorted({reason for shape in held for reason in shape.throttle}))
        yield f"The clock was held down ({why}) on {len(held)} of {len(shapes)} shapes."


def _measure(
    plan: Plan, cc: int, dtype: str, runs: int, stage: Stage
) -> tuple[tuple[ShapeRuns, ...], Ceilings]:
    refused = _compile(plan, cc, stage)
    with clock_reader() as read:
        log = ClockLog(read)
        timer = Timer(log)
        shapes = []
        with stage("checking", len(plan)) as step:
            for problem, entries in plan:
                with _in_memory(problem):
                    shapes.append(_prepare(timer, problem, entries, refused, ClockLog(read)))
                step()
        with stage("timing", runs * len(shapes)) as step:
            for number in range(runs):
                for shape in shapes:
                    with _in_memory(shape.problem):
                        _time_run(timer, log, shape, random.Random(f"{number} {shape.problem}"))
                    step()
        reached = ceilings(timer, log, dtype, runs)
    return tuple(shape.finished() for shape in shapes), reached


def _cudnn_version() -> str | None:
    """The version of torch's cuDNN, such as 9.10.2; None where it has none."""
    number = torch.backends.cudnn.version()
    return None if number is None else f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _require_cuda() -> None:
    if not torch.cuda.is_available():
        raise FlashtuneError(
            f"torch {torch.__version__} cannot use the GPU, so nothing can be timed.",
            "Install a CUDA build of torch that this driver supports.",
        )


Refused = Mapping[tuple[Kernel, tuple[object, ...], Config], Compiled]


def _compile(plan: Plan, cc: int, stage: Stage) -> Refused:
    """Compile every binary into Triton's cache, where the launches find it; what was refused.

    Not by launching: a refusal by ptxas would print the whole program here.
    """
    jobs = {
        (entry.kernel, specialisation(problem), config): CompileJob(
            entry.kernel, problem, config, cc
        )
        for problem, entries in plan
        for entry in entries
        for config in entry.configs
    }
    refused = {}
    with stage("compiling", len(jobs)) as step:
        for job, compiled in compile_all(list(jobs.values()), default_jobs()):
            if compiled.failure is not None:
                refused[job.kernel, specialisation(job.problem), job.config] = compiled
            step()
    return refused


@contextmanager
def _in_memory(problem: Problem) -> Iterator[None]:
    """Raise FlashtuneError where ``problem`` does not fit; give back what it took when it did."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise FlashtuneError(
            f"{problem}: the card's memory is too small ({str(error).splitlines()[0]})",
            "Choose a smaller --B, --H or --N.",
        ) from error
    torch.cuda.empty_cache()  # not after an error: it would raise another in a lost context


def _prepare(
    timer: Timer, problem: Problem, entries: Sequence[Entry], refused: Refused, clocks: ClockLog
) -> ShapeUnderTest:
    """Check every config of every entry, choose where there are several, ask SDPA's backends."""
    inputs = random_inputs(problem, "cuda")
    kernels = [KernelUnderTest(entry) for entry in entries]
    _check_all(problem, inputs, kernels, refused)
    for kernel in kernels:
        right = [config for config, seen in kernel.checked.items() if seen.failure is None]
        if len(right) > 1:
            right = [_fastest(timer, problem, inputs, kernel.entry.kernel, right)]
        kernel.config = right[0] if right else None
    launch = sdpa_launch(problem, inputs)
    refusals = {backend: refusal(backend, launch) for backend in SDPA_BACKENDS}
    return ShapeUnderTest(problem, kernels, refusals, {name: [] for name in refusals}, clocks)


def _check_all(
    problem: Problem, inputs: Inputs, kernels: Sequence[KernelUnderTest], refused: Refused
) -> None:
    """One launch of each config that compiled; the references are let go before any is timed."""
    guard = _Guard(problem, inputs)
    for kernel in kernels:
        for config in kernel.entry.configs:
            compiled = refused.get((kernel.entry.kernel, specialisation(problem), config))
            kernel.checked[config] = (
                guard.check(kernel.entry, config)
                if compiled is None
                else Checked(compiled.failure, compiled.reason, None)
            )


class _Guard:
    """A problem's references and guarded tensors, to check launches against."""

    def __init__(self, problem: Problem, inputs: Inputs) -> None:
        self._problem = problem
        self._inputs = inputs
        self._references = references(problem, inputs)
        self._guarded = guarded_inputs(inputs)
        self._outputs = guarded_outputs(problem, "cuda")

    def check(self, entry: Entry, config: Config) -> Checked:
        """One launch: its answers, and that it left its inputs alone."""
        inputs, outputs = self._guarded, self._outputs
        outputs.poison()
        try:
            launcher(self._problem, entry.kernel, config, inputs, outputs.o, outputs.lse)()
            torch.cuda.synchronize()
        except Exception as error:  # whatever a launch can raise
            return _failed(error, entry, config, self._problem)
        if checksum(*_tensors(inputs)) != checksum(*_tensors(self._inputs)):
            self._guarded = guarded_inputs(self._inputs)
            return Checked(Status.WRONG, "its launch changed the inputs Q, K or V", None)
        checked = check(self._references, outputs)
        return Checked(None if checked.ok else Status.WRONG, checked.reason, checked)


def _tensors(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return inputs.q, inputs.k, inputs.v


def _failed(error: Exception, entry: Entry, config: Config, problem: Problem) -> Checked:
    """The failure as the kernel's own; raises where it is the end of the CUDA context."""
    seen = failure(error)
    if isinstance(seen, FlashtuneError):
        raise seen from error
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        raise FlashtuneError(
            f"{entry.name} with {config} on {problem} ended the CUDA context: {seen.reason}",
            "Nothing more can be launched in this process: run again with --kernels, without it.",
        ) from error
    return seen


@cache
def _jit_function(kernel: Kernel) -> Any:
    """A user's file would be run again, and its launches looked up anew, each time it is loaded."""
    return load_kernel(kernel).flash_fwd_kernel


def launcher(
    problem: Problem,
    kernel: Kernel,
    config: Config,
    inputs: Inputs,
    o: torch.Tensor,
    lse: torch.Tensor,
) -> Launch:
    """A call that launches ``kernel`` once: fills ``o`` (like Q) and ``lse`` (B, H, N; fp32)."""
    function = _jit_function(kernel)
    q, k, v = _tensors(inputs)
    return lambda: forward(kernel, function, q, k, v, o, lse, problem.causal, config)


def _outputs(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """O like Q, and L (B, H, N) in fp32."""
    q = inputs.q
    return torch.empty_like(q), torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)


def _fastest(
    timer: Timer, problem: Problem, inputs: Inputs, kernel: Kernel, configs: Sequence[Config]
) -> Config:
    """The config with the smallest median of a few samples, taken in turns."""
    o, lse = _outputs(inputs)
    launches = [launcher(problem, kernel, config, inputs, o, lse) for config in configs]
    timer.warm_clocks(sdpa_launch(problem, inputs))
    samples = timer.in_turns(launches, TUNING_SAMPLES)
    return min(zip(configs, samples, strict=True), key=lambda pair: median(pair[1]))[0]


def _time_run(timer: Timer, log: ClockLog, shape: ShapeUnderTest, rng: random.Random) -> None:
    """One run on one problem: a median for each kernel that is right and each willing backend."""
    problem, inputs = shape.problem, random_inputs(shape.problem, "cuda")
    o, lse = _outputs(inputs)
    contenders: list[tuple[list[float], Launch]] = [
        (k.ms, launcher(problem, k.entry.kernel, k.config, inputs, o, lse))
        for k in shape.kernels
        if k.config is not None
    ]
    sdpa = sdpa_launch(problem, inputs)
    contenders += [
        (shape.backend_ms[backend], forced(backend, sdpa))
        for backend, reason in shape.refusals.items()
        if reason is None
    ]
    if not contenders:
        return
    timer.warm_clocks(sdpa)
    log.seen.clear()
    medians = interleaved(timer, [launch for _, launch in contenders], rng)
    shape.clocks.seen += log.seen
    for (ms, _), own in zip(contenders, medians, strict=True):
        ms.append(own)


def interleaved(timer: Timer, launches: Sequence[Launch], rng: random.Random) -> list[float]:
    """The median in ms of each of ``launches`` over rounds, each in an order of its own, so that
    nobody always runs behind the same other."""
    first = timer.in_turns(launches, 3)  # also for what a first call alone does
    turn_ms = sum(map(median, first))
    rounds = min(MOST_ROUNDS, max(1, ceil(RUN_MS / ROUND_SAMPLES / turn_ms)))
    samples: list[list[float]] = [[] for _ in launches]
    for _ in range(rounds):
        order = rng.sample(range(len(launches)), len(launches))
        taken = timer.in_turns([launches[at] for at in order], ROUND_SAMPLES)
        for at, own in zip(order, taken, strict=True):
            samples[at] += own
    return [median(own) for own in samples]
