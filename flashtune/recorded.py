"""Recorded sweeps as the audits read them: results files, and plain tables like them.

A table holds exhaustive timings that were recorded by other means. Its columns are those of a
results file that it cannot do without (COLUMNS); ``gpu`` and ``triton`` stand in the schema's
metadata. What is not in it is null. The kernel is somebody else's: the one of the ladder that it is
taken to be like decides the model's order and the budget.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flashtune.errors import FlashtuneError
from flashtune.gpu import GpuSpec, known_gpus
from flashtune.kernels import KERNELS, Kernel
from flashtune.parquet import METADATA_KEY, NO_THREADS
from flashtune.records import Status
from flashtune.results import Provenance, Row, SweepFile
from flashtune.store import read

COLUMNS = (
    "N", "causal", "D", "B", "H", "dtype", "q_tile", "k_tile", "num_warps", "num_stages", "status",
    "reason", "shared", "regs", "spills", "ms", "samples_ms",
)  # fmt: skip


def read_any(path: Path, kernel: str) -> SweepFile:
    """A results file, or a table like one, of a kernel that is taken to be like ``kernel``.

    Raises FlashtuneError when it is neither, or of a GPU that has no row in configs/gpus.toml.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_schema(path).metadata or {}
    except (OSError, pa.ArrowException):
        return read(path)  # parts only, or broken: it says which
    if METADATA_KEY in metadata:
        return read(path)
    table = pq.read_table(path, **NO_THREADS)
    missing = [name for name in COLUMNS if name not in table.schema.names]
    if missing:
        raise FlashtuneError(
            f"{path}: neither a results file nor a table like one: it has no {', '.join(missing)}",
            "Pass a file that 'flashtune sweep --exhaustive' wrote.",
        )
    said = {key.decode(): value.decode() for key, value in metadata.items()}
    gpu = _gpu(path, said.get("gpu", ""))
    provenance = Provenance(
        gpu=gpu.name, cc=gpu.cc, sms=gpu.sms, measured=True, driver=None, torch=said.get("torch"),
        triton=said.get("triton", "3.6.0"), cuda=None, python="", kernel=kernel, kernel_hash="",
        sm_clock_mhz=None, mem_clock_mhz=None, power_limit_w=None, git_commit=None,
    )  # fmt: skip
    notes = (f"a table without provenance, taken to be of a kernel like {kernel}",)
    rows = tuple(_row(values, provenance) for values in table.to_pylist())
    return SweepFile(provenance, (), (), notes, rows)


def subject(file: SweepFile) -> tuple[GpuSpec, Kernel] | str:
    """The GPU and the kernel of a measured sweep; or why it cannot be audited."""
    provenance = file.provenance
    gpu, kernel = known_gpus().get(provenance.gpu), KERNELS.get(provenance.kernel)
    name = f"{provenance.kernel} on {provenance.gpu}"
    if not provenance.measured:
        return f"{name}: nothing was measured"
    if gpu is None or kernel is None:
        return f"{name}: a card or a kernel that flashtune does not know"
    if not kernel.shared_modelled:
        return f"{name}: a kernel that is not modelled"
    if any(row.status is Status.SCREENED for row in file.rows):
        return f"{name}: a race, which times few configs in full"
    return gpu, kernel


def _gpu(path: Path, name: str) -> GpuSpec:
    for spec in known_gpus().values():
        if name in (spec.name, *spec.driver_names):
            return spec
    raise FlashtuneError(
        f"{path}: its metadata names no GPU that flashtune knows ({name or 'none'})",
        "Add the GPU to configs/gpus.toml, or pass a file that 'flashtune sweep' wrote.",
    )


def _row(values: dict[str, Any], provenance: Provenance) -> Row:
    samples = values["samples_ms"]
    timed = values["status"] == Status.TIMED
    return Row(
        run_id="",
        status=Status(values["status"]),
        reason=values["reason"],
        kernel=provenance.kernel,
        gpu=provenance.gpu,
        cc=provenance.cc,
        H_kv=values["H"],
        N_k=values["N"],
        ms=values["ms"] if timed else None,
        samples_ms=tuple(samples) if timed and samples else None,
        **{
            name: values[name]
            for name in COLUMNS
            if name not in ("status", "reason", "ms", "samples_ms")
        },
    )
