"""How far the budget's shared memory can be trusted: a random sample, asked of the compiler too.

The compiler is the installed Triton, stopped as soon as it has allocated shared memory: a tenth of
a second a case, no LLVM, no ptxas, no GPU. That is exactly what a full compile reports as
``metadata.shared``.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flashtune.compiler import CompileJob, prepare_worker
from flashtune.descriptors import has_tma
from flashtune.errors import FlashtuneError
from flashtune.fan_out import compile_all
from flashtune.gpu import GpuSpec
from flashtune.kernels import KERNELS, Kernel
from flashtune.kernels.launch import DTYPE_NAMES, AbsentTensor, arguments, config_arguments
from flashtune.records import Compiled, Config, Problem
from flashtune.shared import shared_bytes

TILES = (16, 32, 64, 128, 256)
WARPS = (1, 2, 4, 8, 16)
STAGES = range(1, 8)
COMMON_D = (16, 32, 64, 128, 256)
MAX_ACCUMULATORS = 512  # registers a thread for S and O: beyond it no sweep compiles a config
UNALIGNED_SHARE = 0.3


@dataclass(frozen=True)
class Case:
    """One thing to predict and to ask: a kernel, its problem, a config, a card, how K and V lie."""

    kernel: Kernel
    problem: Problem
    config: Config
    gpu: GpuSpec
    odd_address: str = ""  # of "q", "k", "v": whose base address is no multiple of 16 bytes
    odd_strides: str = ""  # of "q", "k", "v": whose strides are no multiples of 8 elements

    def __str__(self) -> str:
        odd = [f"{x.upper()} at an odd address" for x in self.odd_address]
        odd += [f"{x.upper()} with odd strides" for x in self.odd_strides]
        p = self.problem
        mask = "causal" if p.causal else "full"
        return ", ".join([f"{self.kernel.name} {self.config} sm_{self.gpu.cc_number}",
                          f"D={p.D} {mask} {p.dtype}", *odd])  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """A case with the budget's answer and the compiler's."""

    case: Case
    predicted: int | None  # None: not modelled
    compiled: int | None  # None: the compiler refused, for ``reason``, or was not asked
    reason: str | None = None

    @property
    def kind(self) -> str:
        """exact, wrong, not modelled or refused."""
        if self.predicted is None:
            return "not modelled"
        if self.compiled is None:
            return "refused"
        return "exact" if self.predicted == self.compiled else "wrong"


@dataclass(frozen=True)
class Report:
    """All findings of one audit, in the sample's order."""

    findings: tuple[Finding, ...]

    def count(self, kind: str) -> int:
        return sum(f.kind == kind for f in self.findings)

    def of_kind(self, kind: str) -> list[Finding]:
        return [f for f in self.findings if f.kind == kind]

    def by_target(self) -> dict[tuple[str, str], Counter[str]]:
        """How the cases ended, for each (compute capability, dtype)."""
        counts: dict[tuple[str, str], Counter[str]] = {}
        for f in sorted(self.findings, key=lambda f: (f.case.gpu.cc_number, f.case.problem.dtype)):
            counts.setdefault((f.case.gpu.cc, f.case.problem.dtype), Counter())[f.kind] += 1
        return counts


def draw(
    count: int, seed: int, gpus: Sequence[GpuSpec], kernels: Sequence[Kernel] = ()
) -> list[Case]:
    """``count`` random cases of ``kernels``, by default the ladder's; the same arguments give the
    same ones.

    One card stands for its compute capability, because nothing else of it matters here.
    """
    if not gpus:
        raise FlashtuneError("no GPU to audit for", "Name one, or all.")
    kernels = list(kernels or KERNELS.values())
    if not any(_runs_on(gpu, kernel) for gpu in gpus for kernel in kernels):
        raise FlashtuneError(
            f"{', '.join(k.name for k in kernels)} cannot run on {', '.join(g.name for g in gpus)}",
            "Audit it for a card that it can run on, or for all.",
        )
    cards = list({gpu.cc: gpu for gpu in gpus}.values())
    rng = random.Random(seed)
    found: list[Case] = []
    while len(found) < count:
        D = rng.choice(COMMON_D) if rng.random() < 0.6 else 8 * rng.randint(1, 32)
        problem = Problem(4, 8, 8, 4096, 4096, D, rng.random() < 0.5, rng.choice(list(DTYPE_NAMES)))
        config = Config(rng.choice(TILES), rng.choice(TILES), rng.choice(WARPS), rng.choice(STAGES))
        case = Case(rng.choice(kernels), problem, config, rng.choice(cards))
        if rng.random() < UNALIGNED_SHARE:
            which, address = rng.choice(("k", "v", "kv", "qkv")), rng.random() < 0.5
            case = replace(
                case, odd_address=which if address else "", odd_strides="" if address else which
            )
        elements = config.q_tile * (config.k_tile + problem.padded_D)
        if elements <= MAX_ACCUMULATORS * 32 * config.num_warps and _launches(case):
            found.append(case)
    return found


def _runs_on(gpu: GpuSpec, kernel: Kernel) -> bool:
    """Whether the card has what the kernel is written for."""
    if kernel.takes is not None and kernel.takes.cc != gpu.cc_number:
        return False
    return kernel.loads == "pointer" or has_tma(gpu)


def _launches(case: Case) -> bool:
    """Whether the kernel would be launched like this at all: TMA needs a card that has it, and
    addresses and strides in multiples of 16 bytes; some kernels are written for one card."""
    if case.kernel.misfit(case.problem, case.config, case.gpu.cc_number) is not None:
        return False
    odd = case.odd_address or case.odd_strides
    return _runs_on(case.gpu, case.kernel) and (case.kernel.loads == "pointer" or not odd)


def audit(
    cases: Sequence[Case],
    triton: tuple[int, int],
    n_jobs: int,
    done: Callable[[], None] = lambda: None,
) -> Report:
    """Ask the installed Triton, ``triton``, about every case that is modelled; ``done`` is called
    after each case."""
    budgets = {case: predicted(case, triton) for case in cases}
    answers = {case: Compiled(case.config) for case in cases}
    for _ in (case for case, budget in budgets.items() if budget is None):
        done()
    for case, compiled in _asked([c for c in cases if budgets[c] is not None], n_jobs):
        answers[case] = compiled
        done()
    findings = [
        Finding(case, budgets[case], answers[case].shared, answers[case].reason) for case in cases
    ]
    return Report(tuple(findings))


def predicted(case: Case, triton: tuple[int, int]) -> int | None:
    """The budget's answer."""
    values = case_arguments(case)
    return shared_bytes(
        case.problem, case.config, case.gpu, case.kernel, triton,
        aligned_q=is_aligned(values, "q") or is_aligned(values, "o"),
        aligned_k=is_aligned(values, "k"), aligned_v=is_aligned(values, "v"),
    )  # fmt: skip


def is_aligned(values: dict[str, Any], letter: str) -> bool:
    """Whether Triton sees whole 16-byte pieces in Q ("q"), K, V or O of a launch's arguments.

    A stride counts when it is a multiple of 16, or of 8 where the launch says that all are.
    """
    multiple = 8 if values["STRIDES_OF_8"] else 16
    strides = [values[f"stride_{letter}{axis}"] for axis in ("bhq" if letter in "qo" else "bhk")]
    address = values[f"{letter.upper()}_ptr"].data_ptr()
    return address % 16 == 0 and all(stride % multiple == 0 for stride in strides)


def case_arguments(case: Case) -> dict[str, Any]:
    """What a launch of the case passes."""
    p = case.problem
    dtype = DTYPE_NAMES[p.dtype]
    o = AbsentTensor((p.B, p.H, p.N, p.D), dtype)
    kv = (p.B, p.H_kv, p.N_k, p.D)
    q, k, v = (
        _OddTensor(shape, dtype, letter in case.odd_address, letter in case.odd_strides)
        for letter, shape in (("q", o.shape), ("k", kv), ("v", kv))
    )
    return arguments(q, k, v, o, AbsentTensor((p.B, p.H, p.N), "float32"), p.causal)


@dataclass(frozen=True)
class _OddTensor(AbsentTensor):
    """A tensor that is a view into a larger one, where it is odd."""

    odd_address: bool = False
    odd_strides: bool = False

    def stride(self) -> tuple[int, ...]:
        if not self.odd_strides:
            return super().stride()
        b, h, k, d = super().stride()
        return (b + 1, h + 1, k + 1, d)

    def data_ptr(self) -> int:
        return 4 if self.odd_address else 0


# Asking the compiler ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _AuditJob(CompileJob):
    case: Case | None = None


def _asked(cases: Sequence[Case], n_jobs: int) -> Iterator[tuple[Case, Compiled]]:
    jobs = [
        _AuditJob(case.kernel, case.problem, case.config, case.gpu.cc_number, case=case)
        for case in dict.fromkeys(cases)
    ]
    for job, compiled in compile_all(jobs, n_jobs, allocate):
        assert isinstance(job, _AuditJob) and job.case is not None
        yield job.case, compiled


class _Enough(Exception):
    """Shared memory is allocated: the rest of the compiler has nothing to add."""


def allocate(job: CompileJob) -> Compiled:
    """Compile up to the allocation of shared memory. Runs in a child of its own: it breaks Triton
    there, by a pass pipeline that runs when the allocation joins it and then stops."""
    import triton
    from triton._C.libtriton import nvidia
    from triton.backends.nvidia.compiler import CUDABackend

    assert isinstance(job, _AuditJob) and job.case is not None
    # Nothing of this is worth keeping, and half-compiled entries do not belong in a cache.
    os.environ["TRITON_CACHE_DIR"] = os.path.join(os.environ["TMPDIR"], "cache")
    triton.knobs.compilation.always_compile = True
    kernel = prepare_worker(job.kernel, job.cc)
    passes, modules = nvidia.passes.ttgpuir, []
    make_llir, add_allocation = CUDABackend.make_llir, passes.add_allocate_shared_memory_nv

    def remember(backend: Any, module: Any, *rest: Any) -> Any:
        modules.append(module)
        return make_llir(backend, module, *rest)

    def run_and_stop(pipeline: Any, *rest: Any) -> None:
        add_allocation(pipeline, *rest)
        pipeline.run(modules[-1], "allocate")
        raise _Enough

    CUDABackend.make_llir = remember
    passes.add_allocate_shared_memory_nv = run_and_stop
    try:
        kernel.warmup(**case_arguments(job.case), **config_arguments(job.config), grid=(1,))
    except _Enough:
        return Compiled(job.config, shared=modules[-1].get_int_attr("ttg.shared"))
    raise RuntimeError("this Triton allocates shared memory in a way that the audit cannot watch")
