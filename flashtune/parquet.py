"""A results file as bytes: the columns, the metadata, and reading and writing one whole file.

What a damaged or foreign file means for the sweep that owns it is the caller's to say; here it is
an error with the ``remedy`` the caller names.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from struct import pack, unpack
from typing import TYPE_CHECKING, Any

from flashtune.errors import FlashtuneError
from flashtune.records import Config, Problem, Status
from flashtune.results import (
    Conditions,
    Provenance,
    RaceVerdict,
    Row,
    RunInfo,
    SdpaResult,
    SdpaTiming,
    SweepFile,
    Tie,
)

if TYPE_CHECKING:  # neither has a place in a command that only prints help
    import pandas as pd
    import pyarrow as pa

SCHEMA_VERSION = 2
ADDED = {2: ("maxnreg", "warp_specialize")}
"""Columns by the schema_version that added them: older files lack them, and are read with nulls."""
METADATA_KEY = b"flashtune"
MISSING = (FileNotFoundError, NotADirectoryError)

_MAGIC = b"PAR1"


def schema() -> pa.Schema:
    """The columns in the order of ``Row``. Times are float64 ms, samples float32 ms, sizes bytes.

    Every column is null where nothing was measured, or nothing was asked for; ``measured_at`` is
    in UTC microseconds.
    """
    import pyarrow as pa

    text, whole, real = pa.string(), pa.int32(), pa.float64()
    columns = {
        "run_id": text, "status": text, "reason": text, "kernel": text, "gpu": text, "cc": text,
        "dtype": text, "B": whole, "H": whole, "H_kv": whole, "N": whole, "N_k": whole,
        "D": whole, "causal": pa.bool_(),
        "q_tile": whole, "k_tile": whole, "num_warps": whole, "num_stages": whole,
        "shared_predicted": whole, "shared": whole, "shared_limit": whole,
        "regs": whole, "spills": whole, "blocks_per_sm": whole, "waves": real,
        "compile_s": real, "code_hash": text, "same_as": text,
        "predicted_ms": real, "ms": real, "ms_lo": real, "ms_hi": real, "tflops": real,
        "samples_ms": pa.list_(pa.float32()), "samples_round": pa.list_(pa.int16()),
        "max_abs_err": real, "sdpa_abs_err": real, "lse_abs_err": real,
        "sm_clock_mhz": whole, "measured_at": pa.timestamp("us", tz="UTC"),
        "maxnreg": pa.int16(), "warp_specialize": pa.bool_(),
    }  # fmt: skip
    return pa.schema(list(columns.items()))


def as_stored(row: Row) -> Row:
    """The row as the file will hold it: samples in float32, ``measured_at`` in UTC.

    Raises ValueError on a time without a zone.
    """
    if row.measured_at is not None and row.measured_at.tzinfo is None:
        raise ValueError(f"measured_at needs a time zone: {row.measured_at}")
    samples, reason, at = row.samples_ms, row.reason, row.measured_at
    return replace(
        row,
        samples_ms=samples and unpack(f"{len(samples)}f", pack(f"{len(samples)}f", *samples)),
        # A tool's output may hold bytes that were no UTF-8; the row must not be lost over them.
        reason=reason and reason.encode("utf-8", "replace").decode("utf-8"),
        measured_at=at and at.astimezone(UTC),
    )


def _table(file: SweepFile) -> pa.Table:
    import pyarrow as pa

    columns = {field.name: [getattr(row, field.name) for row in file.rows] for field in fields(Row)}
    document = {
        "schema_version": SCHEMA_VERSION,
        "provenance": asdict(file.provenance),
        "runs": [{**asdict(run), "started": run.started.isoformat()} for run in file.runs],
        "sdpa": [
            {"run_id": result.run_id, "problem": asdict(result.problem), **asdict(result.timing)}
            for result in file.sdpa
        ],
        "notes": list(file.notes),
        "verdicts": [asdict(verdict) for verdict in file.verdicts],
    }
    metadata = {METADATA_KEY: json.dumps(document).encode()}
    return pa.Table.from_pydict(columns, schema=schema().with_metadata(metadata))


def data_frame(file: SweepFile) -> pd.DataFrame:
    """The rows as a DataFrame, one row a problem x config, integers as nullable Int32 or Int16."""
    import pandas as pd
    import pyarrow as pa

    nullable = {pa.int32(): pd.Int32Dtype(), pa.int16(): pd.Int16Dtype()}
    view: pd.DataFrame = _table(file).to_pandas(types_mapper=nullable.get)
    return view.astype({"warp_specialize": "boolean"})  # the one truth value that may be null


NO_THREADS = {"use_threads": False, "pre_buffer": False}
"""For pyarrow's readers. A process that ends soon after a read aborts in pyarrow's threads, which
are still starting: every third one did, with pyarrow 26, of those that did nothing else."""


def read_file(path: Path, remedy: str) -> SweepFile:
    """One results file. ``remedy`` is the hint when its bytes are not what a sweep wrote.

    A missing file raises the OSError itself, for the caller to judge; anything else that is wrong
    with it raises FlashtuneError.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        data = path.read_bytes()
    except MISSING:
        raise
    except OSError as error:
        raise FlashtuneError(
            f"{path}: cannot read it: {error.strerror}", "pass a results file that you may read"
        ) from error
    if len(data) < 12 or data[:4] != _MAGIC or data[-4:] != _MAGIC:
        raise FlashtuneError(f"{path} {_what_is_wrong(data)}", remedy)
    try:
        table = pq.read_table(pa.BufferReader(data), **NO_THREADS)
        document = (table.schema.metadata or {}).get(METADATA_KEY)
        if document is None:
            raise FlashtuneError(
                f"{path}: a Parquet file, but without flashtune's metadata",
                "pass a file that 'flashtune sweep' wrote, or use --out DIR to write elsewhere",
            )
        return _from_table(path, table, json.loads(document))
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise FlashtuneError(
            f"{path} is damaged ({type(error).__name__}: {first_line})", remedy
        ) from error


def _from_table(path: Path, table: pa.Table, document: dict[str, Any]) -> SweepFile:
    version = int(document["schema_version"])
    if version > SCHEMA_VERSION:
        raise FlashtuneError(
            f"{path} needs a flashtune that reads schema_version {version}; "
            f"this one reads up to {SCHEMA_VERSION}",
            "upgrade flashtune, or use --out DIR to write elsewhere",
        )
    newer = {name for added, names in ADDED.items() if added > version for name in names}
    if table.schema.names != [field.name for field in fields(Row) if field.name not in newer]:
        raise ValueError(f"its columns are not those of schema_version {version}")
    return SweepFile(
        Provenance(**document["provenance"]),
        tuple(
            RunInfo(**{**run, "started": datetime.fromisoformat(run["started"])})
            for run in document["runs"]
        ),
        tuple(
            SdpaResult(
                item["run_id"],
                Problem(**item["problem"]),
                SdpaTiming(item["backend"], item["ms"], item["reason"]),
            )
            for item in document["sdpa"]
        ),
        tuple(document["notes"]),
        tuple(_row(values) for values in table.to_pylist()),
        tuple(_verdict(item) for item in document.get("verdicts", ())),
    )


def _verdict(item: dict[str, Any]) -> RaceVerdict:
    return RaceVerdict(
        **{
            **item,
            "problem": Problem(**item["problem"]),
            "chosen": Config(**item["chosen"]),
            "leader": Config(**item["leader"]),
            "ties": tuple(
                Tie(**{**tie, "config": Config(**tie["config"])}) for tie in item["ties"]
            ),
            "conditions": tuple(Conditions(**state) for state in item["conditions"]),
        }
    )


def _row(values: dict[str, Any]) -> Row:
    for name in ("samples_ms", "samples_round"):
        if values[name] is not None:
            values[name] = tuple(values[name])
    return Row(**{**values, "status": Status(values["status"])})


def _what_is_wrong(data: bytes) -> str:
    if not data:
        return "is empty (0 bytes)"
    return "is cut short" if data[:4] == _MAGIC else "is not a Parquet file"


def write_file(target: Path, file: SweepFile, temporary: Path) -> None:
    """Put the file on disk at ``target``, which is complete or what it was before at any moment.

    ``temporary`` is a name in the same file system. Raises OSError.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = pa.BufferOutputStream()
    pq.write_table(_table(file), buffer, compression="zstd")
    try:
        with open(temporary, "wb") as stream:
            stream.write(buffer.getvalue())
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except OSError:
        with suppress(OSError):  # give a full disk its space back
            temporary.unlink()
        raise
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Make the folder's own entries durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:  # some network file systems cannot sync a folder
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError into the error that a user can act on."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FlashtuneError(
                f"{path}: the disk is full; the rows written before are kept",
                "free some space and run the same command: it continues from them",
            ) from error
        raise FlashtuneError(
            f"{path}: cannot write there: {error.strerror or error}",
            "make its folder writable, or use --out DIR to write elsewhere",
        ) from error
