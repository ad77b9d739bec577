"""The real compiler, for GPUs that are not there, and what becomes of it when it misbehaves."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    eventually,
    once,
    processes_with,
    shared_folder,
    stop_compile_pool,
    subprocess_env,
)

from flashtune import compiler
from flashtune.budget import assess, launched_registers, verdict
from flashtune.compiler import CompileJob, specialisation
from flashtune.cubin import read_cubin
from flashtune.fan_out import compile_all, cpus_beside_launches
from flashtune.gpu import find_gpu
from flashtune.kernels import KERNELS, find_kernel
from flashtune.records import Compiled, Problem, Status
from flashtune.space import parse_config

HERE = Path(__file__).resolve().parent
V0, V6, V7 = KERNELS["v0_baseline"], KERNELS["v6_heads_first"], KERNELS["v7_descriptor"]
PROBLEM = Problem(4, 8, 8, 4096, 4096, 64, False, "bf16")
SMALL = "16x16x1x1"  # compiles fastest


def job(
    config: str,
    cc: int = 89,
    problem: Problem = PROBLEM,
    kernel: Any = V6,
    timeout_s: float = 120.0,
) -> CompileJob:
    return CompileJob(kernel, problem, parse_config(config), cc, timeout_s)


def compile_jobs(jobs: list[CompileJob], n_jobs: int = 2) -> dict[CompileJob, Compiled]:
    results = dict(compile_all(jobs, n_jobs))
    assert set(results) == set(jobs)
    assert all(compiled.config == j.config for j, compiled in results.items())
    return results


# One batch that many tests look at ---------------------------------------------------------------

CAPABILITIES = (80, 86, 89, 90, 100, 120)
# Config, shared bytes, registers and spills of the article's own kernel, which differs a little.
ARTICLE_TABLE = {
    "16x16x4x3": (10_752, 56, 0),
    "64x32x4x3": (24_576, 127, 0),
    "64x32x4x5": (40_960, 127, 0),
    "128x64x8x4": (65_536, 146, 0),
    "128x128x8x3": (81_920, 207, 0),
    "256x64x16x5": (98_304, 128, 4),
    "64x256x4x2": (73_728, 255, 152),
}
NARROW = replace(PROBLEM, D=40, causal=True)  # rows of 80 bytes: not a multiple of 16 elements
BATCH = [
    *(job("64x32x4x3", cc) for cc in CAPABILITIES),
    *(job(config, kernel=V0) for config in ARTICLE_TABLE),
    *(job("64x32x4x3", problem=NARROW, kernel=kernel) for kernel in (V0, V6)),
    *(job("64x32x4x3", cc, problem, V7) for cc in (90, 120) for problem in (PROBLEM, NARROW)),
    job("64x32x4x3:maxnreg=64"),
]


def compile_batch(folder: Path) -> list[Compiled]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder / "triton-cache"))
        stop_compile_pool()
        results = compile_jobs(BATCH)
        stop_compile_pool()
    return [results[j] for j in BATCH]


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> dict[CompileJob, Compiled]:
    return dict(zip(BATCH, once(tmp_path_factory, "batch", compile_batch), strict=True))


@pytest.fixture(scope="module")
def batch_cache(batch: object, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_folder(tmp_path_factory, "batch") / "triton-cache"


@pytest.mark.parametrize("cc", CAPABILITIES)
def test_every_capability_compiles_with_no_gpu(
    cc: int, batch: dict[CompileJob, Compiled], batch_cache: Path
) -> None:
    compiled = batch[job("64x32x4x3", cc)]
    assert compiled.failure is None, compiled.reason
    assert compiled.shared is not None
    assert compiled.shared >= 24_576
    assert compiled.regs is not None
    assert 32 <= compiled.regs <= 255
    assert compiled.spills is not None
    assert compiled.spills <= 8
    assert compiled.seconds is not None
    assert compiled.code_hash
    # For that GPU, and not for the one that the same worker compiled for before.
    targets = [re.search(r"^\.target sm_(\d+)", ptx.read_text(), re.M) for ptx in
               batch_cache.glob("*/*.ptx")]  # fmt: skip
    assert str(cc) in {target[1] for target in targets if target}


def test_capabilities_have_code_of_their_own(batch: dict[CompileJob, Compiled]) -> None:
    hashes = {cc: batch[job("64x32x4x3", cc)].code_hash for cc in CAPABILITIES}
    del hashes[86]  # may equal 8.9's, instruction for instruction
    assert len(set(hashes.values())) == len(hashes)


@pytest.mark.parametrize("config", ARTICLE_TABLE)
def test_the_article_s_table(config: str, batch: dict[CompileJob, Compiled]) -> None:
    shared, regs, spills = ARTICLE_TABLE[config]
    compiled = batch[job(config, kernel=V0)]
    assert compiled.failure is None, compiled.reason
    assert compiled.shared == shared
    assert compiled.regs is not None
    # Addresses are computed otherwise here, and ptxas rounds down to 128 where that is near.
    assert abs(compiled.regs - regs) <= 24
    assert compiled.spills is not None
    assert (compiled.spills > 64) == (spills > 64)  # the one that spills heavily


def test_cubin_facts_are_cuobjdump_s(batch_cache: Path) -> None:
    import triton

    cubins = sorted(batch_cache.glob("*/*.cubin"))
    assert len(cubins) == len({(j.kernel, j.problem, j.config, j.cc) for j in BATCH})
    for cubin in cubins:
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        usage = re.search(r"REG:(\d+) STACK:(\d+)", said)
        assert usage is not None, said
        facts = read_cubin(cubin.read_bytes())
        assert (facts.regs, facts.frame_bytes) == (int(usage[1]), int(usage[2]))


def test_a_file_that_is_no_cubin_is_refused() -> None:
    for junk in (b"", b"\x7fELF", b"#!/bin/sh\n" * 20):
        with pytest.raises(ValueError, match="ELF|cubin"):
            read_cubin(junk)


@pytest.mark.parametrize("kernel", [V0, V6], ids=lambda kernel: kernel.name)
def test_head_dimension_40_keeps_asynchronous_copies(
    kernel: Any, batch: dict[CompileJob, Compiled], batch_cache: Path
) -> None:
    """Its strides are multiples of 8 and not of 16, which is where Triton stops believing them."""
    narrow = batch[job("64x32x4x3", problem=NARROW, kernel=kernel)]
    assert narrow.shared == 24_576  # pipelined: 3 stages
    source = {V0: "v0_baseline", V6: "v6_heads_first"}[kernel]
    found = 0
    for ptx in (path.read_text() for path in batch_cache.glob("*/*.ptx")):
        if source not in ptx or ".target sm_89" not in ptx:
            continue
        found += 1
        assert "cp.async.cg.shared.global" in ptx  # 16 bytes a thread
        assert "cp.async.ca" not in ptx  # 4 or 8
        assert not re.search(r"ld\.global[.\w:]*\.[bu](8|16)\b", ptx)
    assert found == len({j for j in BATCH if j.kernel is kernel and j.cc == 89})


def test_maxnreg_is_the_most_registers_of_a_thread(batch: dict[CompileJob, Compiled]) -> None:
    free, capped = batch[job("64x32x4x3")], batch[job("64x32x4x3:maxnreg=64")]
    assert free.regs is not None and free.regs > 64 and capped.regs == 64
    assert capped.spills and capped.shared == free.shared
    assert capped.code_hash != free.code_hash


def test_maxnreg_may_starve_a_wgmma(triton_cache: Path) -> None:
    """As the budget's rule wgmma_registers says: 90 for 128 columns."""
    jobs = [job(f"64x128x4x2:maxnreg={n}", 90) for n in (88, 96)]
    compiled = compile_jobs(jobs)
    starved, fed = (compiled[j] for j in jobs)
    assert starved.failure is Status.COMPILE_FAILED and "C7602" in str(starved.reason)
    assert fed.failure is None and fed.regs is not None and fed.regs <= 96


@pytest.mark.parametrize("problem", [PROBLEM, NARROW], ids=str)
@pytest.mark.parametrize("cc", [90, 120])
def test_descriptors_load_through_tma_alone(
    cc: int, problem: Problem, batch: dict[CompileJob, Compiled], batch_cache: Path
) -> None:
    """The machine code has bulk tensor loads, and no asynchronous copy or plain load beside."""
    compiled = batch[job("64x32x4x3", cc, problem, V7)]
    assert compiled.failure is None, compiled.reason
    (cubin,) = (
        path
        for path in batch_cache.glob("*/*.cubin")
        if str(compiled.code_hash).startswith(read_cubin(path.read_bytes()).code_hash)
    )
    import triton

    command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(cubin)]
    sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    opcodes = set(re.findall(r"\b(UTMALDG|LDGSTS|LDG|HGMMA|HMMA)\b", sass))
    assert opcodes == {"UTMALDG", "HGMMA" if cc == 90 else "HMMA"}


# The cache ---------------------------------------------------------------------------------------


def test_a_second_compile_finds_the_first(
    batch: dict[CompileJob, Compiled], batch_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(batch_cache))
    stop_compile_pool()
    again = compile_jobs(BATCH)
    stop_compile_pool()
    for j in BATCH:
        assert again[j].seconds is None
        assert again[j] == replace(batch[j], seconds=None)


def _compile_and_tell(job: CompileJob) -> Compiled:
    return replace(compiler._compile(job), reason=str("torch" in sys.modules))


def test_a_worker_never_loads_torch(triton_cache: Path) -> None:
    kernels = [BATCH[0], job("64x32x4x3", 90, kernel=V7)]
    told = [compiled for _, compiled in compile_all(kernels, 1, _compile_and_tell)]
    stop_compile_pool()
    assert all(compiled.failure is None and compiled.regs for compiled in told)
    assert [compiled.reason for compiled in told] == ["False", "False"]


def _where(job: CompileJob) -> Compiled:
    return Compiled(job.config, reason=str(sorted(os.sched_getaffinity(0))))


def test_workers_leave_a_cpu_to_the_launches(triton_cache: Path) -> None:
    cpus = cpus_beside_launches()
    if cpus is None:
        pytest.skip("this machine has one CPU")
    assert len(cpus) == len(os.sched_getaffinity(0)) - 1
    ((_, compiled),) = compile_all(BATCH[:1], 1, _where, cpus=cpus)
    stop_compile_pool()
    assert compiled.reason == str(sorted(cpus))


def _leave_a_file(folder: Path, job: CompileJob) -> Compiled:
    if str(job.config) == SMALL:
        time.sleep(1)
    (folder / str(job.config)).touch()
    return Compiled(job.config)


def test_while_the_caller_is_not_ready_the_workers_go_on(
    triton_cache: Path, tmp_path: Path
) -> None:
    jobs = [job(f"16x16x{warps}x{stages}") for warps in (1, 2) for stages in range(1, 9)]
    assert str(jobs[0].config) == SMALL  # takes longer than some others
    folder = tmp_path / "done"
    folder.mkdir()

    def all_done() -> bool:
        return len(list(folder.iterdir())) == len(jobs)

    def ready() -> bool:
        if not all_done():
            return False
        time.sleep(1)  # the last results are on their way
        return True

    results = compile_all(jobs, 2, functools.partial(_leave_a_file, folder), ready=ready)
    first, _ = next(results)
    assert all_done() and first == jobs[0]
    results.close()
    stop_compile_pool()


def test_who_is_not_wanted_is_asked_about_again(triton_cache: Path, tmp_path: Path) -> None:
    jobs = [job(f"16x16x1x{stages}") for stages in (1, 2, 3)]
    first, _, later = jobs
    wanted = {first}
    compiled = []
    folder = tmp_path / "done"
    folder.mkdir()
    leave_a_file = functools.partial(_leave_a_file, folder)
    for done, _ in compile_all(jobs, 2, leave_a_file, wanted=wanted.__contains__):
        compiled.append(done)
        wanted.add(later)
    stop_compile_pool()
    assert compiled == [first, later]
    assert {path.name for path in folder.iterdir()} == {str(first.config), str(later.config)}


# Every way in which an argument's value changes what Triton compiles, or must not.
SPECIALISED = [
    PROBLEM,
    replace(PROBLEM, N=512, N_k=512),
    replace(PROBLEM, B=16, H=16, H_kv=16),
    replace(PROBLEM, N=100, N_k=100),
    replace(PROBLEM, N=108, N_k=108),
    replace(PROBLEM, N=100),
    replace(PROBLEM, N=1, N_k=1),
    replace(PROBLEM, B=1, H=1, H_kv=1),
    replace(PROBLEM, H_kv=4),
    replace(PROBLEM, H_kv=2),
    replace(PROBLEM, H=16, H_kv=1),
    replace(PROBLEM, D=128),
    replace(PROBLEM, D=40),
    replace(PROBLEM, D=40, N=101, N_k=101),
    replace(PROBLEM, dtype="fp32"),
    replace(PROBLEM, causal=True),
    replace(PROBLEM, B=2, H=32, H_kv=32, N=2**20),  # strides of 2**31
]


def test_specialisation_is_what_the_compiler_sees(triton_cache: Path) -> None:
    """Problems compile once for each specialisation: the first misses the cache, the rest hit."""
    seen: set[object] = set()
    for problem in SPECIALISED:
        (compiled,) = compile_jobs([job(SMALL, problem=problem)], n_jobs=1).values()
        assert compiled.failure is None, compiled.reason
        fresh = compiled.seconds is not None
        assert fresh == (specialisation(problem) not in seen), problem
        seen.add(specialisation(problem))


def test_lengths_share_their_binary_where_they_are_multiples_of_16() -> None:
    def same(**changes: Any) -> bool:
        return specialisation(PROBLEM) == specialisation(replace(PROBLEM, **changes))

    assert same(N=512, N_k=512)
    assert not same(N=100, N_k=100)
    assert not same(D=128)
    assert not same(dtype="fp16")
    assert not same(causal=True)


LAUNCHED = [
    (PROBLEM, "as it is"),
    (replace(PROBLEM, B=1, H=1, H_kv=1), "as it is"),
    (replace(PROBLEM, N=100, N_k=53), "as it is"),
    (replace(PROBLEM, H_kv=2, causal=True), "as it is"),
    (replace(PROBLEM, D=40, N=77, N_k=77), "as it is"),
    (replace(PROBLEM, dtype="fp32", D=80), "as it is"),
    (replace(PROBLEM, B=1, H=32, H_kv=32, N=512, N_k=512, dtype="fp16"), "three_axes"),
]


def test_a_launch_finds_what_was_compiled(triton_cache: Path) -> None:
    """Real tensors through ``forward``, in another process, under another driver."""
    kernels = itertools.cycle([V0, V6])
    planned = [(k, p, layout) for k, (p, layout) in zip(kernels, LAUNCHED, strict=False)]
    compiled = compile_jobs([job(SMALL, problem=p, kernel=k) for k, p, _ in planned])
    assert [c.reason for c in compiled.values() if c.failure] == []
    request = [[k.name, asdict(p), SMALL, layout] for k, p, layout in planned]
    entries = set(triton_cache.glob("*/*.cubin"))
    done = subprocess.run(
        [sys.executable, str(HERE / "launch_script.py"), "89"], input=json.dumps(request),
        capture_output=True, text=True, env=subprocess_env(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == [True] * len(planned)
    assert set(triton_cache.glob("*/*.cubin")) == entries


def test_so_does_a_launch_of_each_kernel_through_descriptors(triton_cache: Path) -> None:
    kernels = [kernel for kernel in KERNELS.values() if kernel.loads == "descriptor"]
    compiled = compile_jobs([job("128x32x4x2", 90, kernel=kernel) for kernel in kernels])
    assert [c.reason for c in compiled.values() if c.failure] == []
    request = [[k.name, asdict(PROBLEM), "128x32x4x2", "as it is"] for k in kernels]
    done = subprocess.run(
        [sys.executable, str(HERE / "launch_script.py"), "90"], input=json.dumps(request),
        capture_output=True, text=True, env=subprocess_env(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == [True] * len(kernels)


# Config, mask, D, dtype, Kernel.warps, and where it is known, registers.
SPECIALISED_WARPS = [
    ("v9_ping_pong", "128x128x4x2", False, 128, "bf16", (8, 12), 168),
    ("v9_ping_pong", "256x64x4x3", False, 64, "bf16", (16, 20), 96),
    ("v9_ping_pong", "64x32x4x1", True, 40, "bf16", (4, 8), 255),
    ("v10_persistent", "128x128x4x2", False, 128, "bf16", (8, 12), 168),
    ("v10_persistent", "256x64x4x3", False, 64, "bf16", (16, 20), 96),
    ("v8_warp_specialised", "128x128x4x2", False, 128, "bf16", (8, 12), 168),
    ("v8_warp_specialised", "256x64x4x2", True, 64, "bf16", (8, 12), 168),
    # Both warpgroups compute all of its 64 rows: twice the work.
    ("v8_warp_specialised", "64x64x4x2", False, 64, "bf16", (8, 12), 168),
    ("v8_warp_specialised", "128x64x4x2:warp_specialize=off", False, 64, "bf16", (4, 4), None),
]


@pytest.fixture(scope="module")
def specialised(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    found: list[Compiled] = once(tmp_path_factory, "specialised", compile_specialised)
    return found


def compile_specialised(folder: Path) -> list[Compiled]:
    jobs = [
        job(config, 90, replace(PROBLEM, causal=causal, D=D, dtype=dtype), KERNELS[kernel])
        for kernel, config, causal, D, dtype, _, _ in SPECIALISED_WARPS
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder / "triton-cache"))
        stop_compile_pool()
        results = compile_jobs(jobs)
        stop_compile_pool()
    return [results[j] for j in jobs]


@pytest.mark.parametrize("at", range(len(SPECIALISED_WARPS)))
def test_warps_of_a_block_are_those_that_the_kernel_says(
    at: int, specialised: list[Compiled]
) -> None:
    kernel, config, _, _, _, warps, regs = SPECIALISED_WARPS[at]
    compiled = specialised[at]
    assert compiled.failure is None, compiled.reason
    assert KERNELS[kernel].warps(parse_config(config), 90) == warps
    assert (compiled.warps, compiled.spills) == (warps[1], 0)
    if regs is not None:
        assert compiled.regs == regs
    if warps[0] != warps[1] and regs != 255:  # what an SM has for so many warps
        assert compiled.regs == launched_registers(find_gpu("h200"), warps[1], None)


def test_64_rows_of_v8_are_computed_twice(
    specialised: list[Compiled], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As the budget says of it: two warpgroups have a whole multiply of 64 rows each."""
    folder = shared_folder(tmp_path_factory, "specialised") / "triton-cache"
    found = 0
    for path in folder.glob("*/*.ttgir"):
        text = path.read_text()
        if "v8_warp_specialised.py" not in text or "tensor<64x64xbf16" not in text:
            continue
        scores = re.findall(r"warp_group_dot .*-> tensor<(\d+)x64xf32", text)
        if "partition1(" in text and set(scores) == {"64"}:
            found += 1
            assert len(scores) == 2 * 2  # Q K^T and P V, in each of two partitions
    assert found == 1
    budget = assess(PROBLEM, parse_config("64x64x4x2"), find_gpu("h200"),
                    KERNELS["v8_warp_specialised"], (3, 9))  # fmt: skip
    answer = verdict(budget, find_gpu("h200"))
    assert (budget.repeats, answer.rule) == (2, "repeated_work")


GPU_LAUNCH = """
import torch, triton
from flashtune.kernels import KERNELS, load_kernel
from flashtune.kernels.launch import forward
from flashtune.space import parse_config

hits = []
triton.knobs.compilation.listener = lambda **event: hits.append(bool(event["cache_hit"]))
q, k, v = (torch.randn(4, 8, 4096, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
o, lse = torch.empty_like(q), torch.empty(4, 8, 4096, device="cuda")
for name in {names}:
    run = load_kernel(KERNELS[name]).flash_fwd_kernel
    forward(KERNELS[name], run, q, k, v, o, lse, False, parse_config("64x32x4x3"))
torch.cuda.synchronize()
print(hits)
"""


@pytest.mark.gpu
def test_a_real_launch_finds_what_was_compiled(triton_cache: Path) -> None:
    import torch

    major, minor = torch.cuda.get_device_capability()
    cc = 10 * major + minor
    # Not v8, which with this config may do anything.
    fit = (k for k in KERNELS.values() if k.misfit(PROBLEM, parse_config("64x32x4x3"), cc) is None)
    names = [k.name for k in fit if k.name != "v8_warp_specialised"]
    compiled = compile_jobs([job("64x32x4x3", cc, kernel=KERNELS[name]) for name in names])
    assert [c.reason for c in compiled.values() if c.failure] == []
    entries = set(triton_cache.glob("*/*.cubin"))
    done = subprocess.run(
        [sys.executable, "-c", GPU_LAUNCH.format(names=names)],
        capture_output=True, text=True, env=subprocess_env(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == str([True] * len(names))
    assert set(triton_cache.glob("*/*.cubin")) == entries


# Compilers that misbehave ------------------------------------------------------------------------

# A stand-in for ptxas that looks at the block size in its input: 32 threads kill whoever called it,
# 64 hang, 256 are refused, anything else is compiled. Questions about its version pass through.
FAKE_PTXAS = """#!/bin/sh
for argument in "$@"; do
    case "$argument" in
    *.ptx)
        if grep -q 'reqntid 32$' "$argument"; then kill -SEGV $PPID; sleep 1; fi
        if grep -q 'reqntid 64$' "$argument"; then
            echo hanging >&2
            sleep {marker}
        fi
        if grep -q 'reqntid 256$' "$argument"; then
            echo "ptxas fatal   : (C9999) No such thing" >&2
            exit 255
        fi
        ;;
    esac
done
exec "{real}" "$@"
"""
KILLED, HANGS, COMPILES, REFUSED = "16x16x1x1", "16x16x2x1", "16x16x4x1", "32x16x8x1"


class FakePtxas:
    def __init__(self, folder: Path) -> None:
        import triton

        # Seconds that nobody else sleeps, to be found again in the process table.
        self.marker = f"{100_000 + uuid.uuid4().int % 10**9}"
        path = folder / "ptxas"
        real = triton.knobs.nvidia.ptxas.path
        path.write_text(FAKE_PTXAS.format(marker=self.marker, real=real))
        path.chmod(0o755)
        self.env = {"TRITON_PTXAS_PATH": str(path), "TRITON_PTXAS_BLACKWELL_PATH": str(path)}

    def sleeping(self) -> bool:
        return bool(processes_with(f"sleep\0{self.marker}"))


@pytest.fixture
def fake_ptxas(tmp_path: Path) -> FakePtxas:
    return FakePtxas(tmp_path)


def test_a_compiler_that_hangs_dies_or_refuses_is_a_row_and_the_others_go_on(
    triton_cache: Path, fake_ptxas: FakePtxas, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in fake_ptxas.env.items():
        monkeypatch.setenv(name, value)
    others = [job(COMPILES, problem=replace(PROBLEM, D=D)) for D in (32, 64)]
    hangs, killed, refused = job(HANGS, timeout_s=8), job(KILLED), job(REFUSED)
    start = time.monotonic()
    results = compile_jobs([hangs, killed, others[0], refused, others[1]])
    assert 8 <= time.monotonic() - start < 60
    assert results[hangs].failure is Status.TIMEOUT
    assert results[hangs].reason == "compiling took over 8 s and was stopped"
    assert results[killed].failure is Status.COMPILE_FAILED
    assert "SIGSEGV" in (results[killed].reason or "")
    assert results[refused].failure is Status.COMPILE_FAILED
    assert "(C9999) No such thing" in (results[refused].reason or "")
    for other in others:
        assert results[other].failure is None, results[other].reason
        assert results[other].regs
    assert eventually(lambda: not fake_ptxas.sleeping())


def user_kernel(folder: Path, name: str, *, at_compile: str = "", at_import: str = "") -> Any:
    """A copy of v0 that runs ``at_compile`` while it is being compiled, if q_tile is 32.

    ``host`` is ``os``, by a name that Triton does not look into.
    """
    source = V0.path.read_text()
    start = "    q_start = tl.program_id(0)"
    assert source.count(start) == 1
    trap = f"""
BASED_ON = "v0_baseline"
{at_import or "pass"}


@triton.constexpr_function
def trap(q_tile):
    if q_tile == 32:
        import os as host

        {at_compile or "pass"}
    return q_tile


@triton.jit(do_not"""
    source = source.replace(start, f"    checked: tl.constexpr = trap(Q_TILE_SIZE)\n{start}")
    source = "import os, signal\n" + source.replace("\n@triton.jit(do_not", trap, 1)
    path = folder / f"{name}.py"
    path.write_text(source)
    return find_kernel(str(path))


def test_a_crash_inside_triton_is_a_row_with_its_signal(triton_cache: Path, tmp_path: Path) -> None:
    aborts = user_kernel(tmp_path, "aborts", at_compile="host.abort()")
    exits = user_kernel(tmp_path, "leaves", at_compile="host._exit(7)")
    raises = user_kernel(tmp_path, "raises", at_compile="raise ValueError('not like this')")
    ends = {k.name: job("32x16x4x1", kernel=k) for k in (aborts, exits, raises)}
    fine = [job("16x16x4x1", kernel=k) for k in (aborts, exits, raises)]
    results = compile_jobs([*ends.values(), *fine])
    for kernel, says in (("aborts", "SIGABRT"), ("leaves", "exit code 7"), ("raises", "not like")):
        compiled = results[ends[kernel]]
        assert compiled.failure is Status.COMPILE_FAILED, compiled
        assert says in (compiled.reason or "")
        assert "\n" not in (compiled.reason or "")
    for j in fine:
        assert results[j].failure is None, results[j].reason


def test_a_kernel_that_kills_its_worker_on_import_is_given_up(
    triton_cache: Path, tmp_path: Path
) -> None:
    kernel = user_kernel(tmp_path, "kills", at_import="os.kill(os.getpid(), signal.SIGKILL)")
    (compiled,) = compile_jobs([job(SMALL, kernel=kernel)], n_jobs=1).values()
    assert compiled.failure is Status.CRASHED
    assert "killed each time" in (compiled.reason or "")
    # The pool is not left broken.
    assert compile_jobs([job(SMALL)], n_jobs=1)[job(SMALL)].failure is None


def test_a_kernel_that_fails_to_import_says_why(triton_cache: Path, tmp_path: Path) -> None:
    kernel = user_kernel(tmp_path, "broken", at_import="raise KeyError('missing')")
    results = compile_jobs([job(SMALL, kernel=kernel), job(SMALL)], n_jobs=1)
    broken = results[job(SMALL, kernel=kernel)]
    assert broken.failure is Status.CRASHED
    assert "KeyError: 'missing'" in (broken.reason or "")
    assert results[job(SMALL)].failure is None


def test_killing_a_worker_loses_nothing(triton_cache: Path) -> None:
    from joblib.externals.loky import reusable_executor

    jobs = [
        job(f"{q}x16x1x1", problem=replace(PROBLEM, D=D)) for q in (16, 32) for D in (16, 32, 64)
    ]
    results: dict[CompileJob, Compiled] = {}
    for done, compiled in compile_all(jobs, 2):
        assert done not in results, "delivered twice"
        results[done] = compiled
        if len(results) == 1:
            os.kill(next(iter(reusable_executor._executor._processes)), signal.SIGKILL)
    assert set(results) == set(jobs)
    assert [c.reason for c in results.values() if c.failure] == []


# What the user sees ------------------------------------------------------------------------------


def script_request(jobs: list[CompileJob], n_jobs: int = 2) -> str:
    rows = [[j.kernel.name, asdict(j.problem), str(j.config), j.cc, j.timeout_s] for j in jobs]
    return json.dumps({"n_jobs": n_jobs, "jobs": rows})


def test_a_refusal_is_one_line_and_the_dump_reaches_nobody(tmp_path: Path) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    env = subprocess_env(TRITON_CACHE_DIR=str(tmp_path / "cache"), TMPDIR=str(scratch))
    done = subprocess.run(
        [sys.executable, str(HERE / "compile_script.py")], capture_output=True, text=True, env=env,
        input=script_request([job("256x256x16x2", 90), job(SMALL, 90)]),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    results = {r["config"]: r for r in map(json.loads, done.stdout.splitlines())}
    refused = results["256x256x16x2"]
    assert refused["failure"] == Status.COMPILE_FAILED
    assert "(C7602)" in refused["reason"]
    assert "Insufficient registers" in refused["reason"]
    assert len(refused["reason"]) <= 300
    assert results[SMALL]["failure"] is None
    assert len(done.stdout.splitlines()) == 2
    assert done.stderr == ""
    # A failing ptxas leaves its input of 180 KB behind; the workers clear it away.
    assert [path.name for path in scratch.rglob("*") if path.suffix in (".ptx", ".log")] == []
    assert [path.name for path in scratch.glob("flashtune-*")] == []


@pytest.mark.parametrize("when", ["compiling", "starting"])
def test_ctrl_c_stops_at_once_and_leaves_nothing_running(
    when: str, tmp_path: Path, fake_ptxas: FakePtxas
) -> None:
    mark = f"FLASHTUNE_TEST_MARK={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    env = subprocess_env(
        TRITON_CACHE_DIR=str(tmp_path / "cache"), TMPDIR=str(tmp_path), **fake_ptxas.env,
        **{name: value},
    )  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, str(HERE / "compile_script.py")], env=env, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(script_request([job(HANGS), job(HANGS, problem=NARROW)]))
    process.stdin.close()
    process.stdin = None
    try:
        if when == "compiling":
            assert eventually(fake_ptxas.sleeping, 60)
        else:  # its workers are there, and importing
            assert eventually(lambda: len(processes_with(mark)) >= 3, 60)
        start = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
        process.communicate(timeout=30)
        assert time.monotonic() - start < 10
        assert process.returncode in (-signal.SIGINT, 130)
        assert eventually(lambda: not processes_with(mark))
        assert not fake_ptxas.sleeping()
        assert list(tmp_path.glob("flashtune-*")) == []
    finally:
        for pid in processes_with(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def workers(mark: str) -> list[int]:
    """The loky workers among the marked processes; not the children that they forked."""
    found = []
    for pid in processes_with(mark):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            leads_its_group = os.getpgid(pid) == pid
            if b"loky.backend.popen_loky" in command and not leads_its_group:
                found.append(pid)
    return found


@pytest.mark.parametrize("who", ["run", "worker"])
def test_kill_9_leaves_no_compiler_running(who: str, tmp_path: Path, fake_ptxas: FakePtxas) -> None:
    """The workers of a run that is killed end by themselves, and so does what a worker started."""
    mark = f"FLASHTUNE_TEST_MARK={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    env = subprocess_env(
        TRITON_CACHE_DIR=str(tmp_path / "cache"), TMPDIR=str(tmp_path), **fake_ptxas.env,
        **{name: value},
    )  # fmt: skip
    with subprocess.Popen(
        [sys.executable, str(HERE / "compile_script.py")], env=env, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            assert process.stdin is not None
            process.stdin.write(script_request([job(HANGS)], n_jobs=1))
            process.stdin.close()
            assert eventually(fake_ptxas.sleeping, 60)
            victims = [process.pid] if who == "run" else workers(mark)
            assert victims
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            # A worker's death is not the run's: it starts the job again.
            if who == "worker":
                assert eventually(lambda: bool(set(workers(mark)) - set(victims)), 30)
                assert eventually(fake_ptxas.sleeping, 30)
                assert len(processes_with(f"sleep\0{fake_ptxas.marker}")) == 1
                process.kill()
            assert eventually(lambda: not fake_ptxas.sleeping(), 20)
        finally:
            for pid in processes_with(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_nothing_to_do_starts_nothing() -> None:
    assert list(compile_all([], 2)) == []
