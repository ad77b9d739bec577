"""The results file: one Parquet file for each gpu x kernel x dtype x D, safe against a kill.

While a sweep runs, ``NAME.parquet`` is left alone and new rows go into ``.NAME.parts/`` beside it:
numbered parts, each a small Parquet file with the same schema and metadata, complete or absent.
``finish`` merges everything into the file and removes the parts. Rows are keyed by problem and
config. For one key a part wins over the file and a later part over an earlier one.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from struct import pack, unpack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from flashtune.errors import FlashtuneError
from flashtune.records import (
    Config,
    Problem,
    Provenance,
    Row,
    RunInfo,
    SdpaResult,
    SdpaTiming,
    Status,
    SweepFile,
)

if TYPE_CHECKING:  # neither has a place in a command that only prints help
    import pandas as pd
    import pyarrow as pa  # type: ignore[import-untyped]

SCHEMA_VERSION = 1
METADATA_KEY = b"flashtune"
FLUSH_SECONDS = 1.0
PART_ROWS = 256
"""A part is rewritten until it holds this many rows, so that long sweeps leave few parts."""

_PART = re.compile(r"part-(\d+)\.parquet")
_MAGIC = b"PAR1"
_Key = tuple[Problem, Config]
_MISSING = (FileNotFoundError, NotADirectoryError)


def results_path(out: Path, gpu: str, kernel: str, dtype: str, D: int, measured: bool) -> Path:
    """The file in ``out`` that holds these rows; characters unfit for a file name become ``-``."""
    name = re.sub(r"[^\w.+-]+", "-", f"{gpu}_{kernel}_{dtype}_D{D}")
    return out / f"{name}{'' if measured else '_unmeasured'}.parquet"


def schema() -> pa.Schema:
    """The columns in the order of ``Row``. Times are float64 ms, samples float32 ms, sizes bytes.

    Every column is null where nothing was measured; ``measured_at`` is in UTC microseconds.
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
    }  # fmt: skip
    return pa.schema(list(columns.items()))


def read(path: Path) -> SweepFile:
    """The results at ``path``, with the parts of a sweep that is running or was interrupted.

    Raises FlashtuneError when there is nothing, or when a file is damaged, foreign or newer.
    """
    found = _load(path)
    if found is None:
        raise _missing(path)
    return found


def frame(path: Path) -> pd.DataFrame:
    """``read(path)`` as a DataFrame, one row a problem x config, integers as nullable Int32.

    Raises what ``read`` raises.
    """
    import pandas as pd
    import pyarrow as pa

    table = _table(read(path))
    view: pd.DataFrame = table.to_pandas(types_mapper={pa.int32(): pd.Int32Dtype()}.get)
    return view


def find(where: Path) -> list[Path]:
    """The results files at ``where``, a file or a folder (not its subfolders), sorted by name.

    A file of which only parts exist so far is listed too, under the name it will have.
    Raises FlashtuneError when ``where`` does not exist.
    """
    if where.is_file() or _parts(where):
        return [where]
    if not where.is_dir():
        raise _missing(where)
    paths = {path for path in where.glob("*.parquet") if path.is_file()}
    for folder in where.glob(".*.parts"):
        path = where / f"{folder.name.removeprefix('.').removesuffix('.parts')}.parquet"
        if _parts(path):
            paths.add(path)
    return sorted(path for path in paths if not path.name.startswith("."))


class SweepStore:
    """One results file, opened for writing by one sweep. Use it in a ``with`` statement.

    Leaving the block writes what is buffered and lets the file go, so that the same command
    continues from there; only ``finish`` merges the parts into the file.
    """

    def __init__(
        self, path: Path, lock: int, existing: SweepFile | None, here: Provenance, run: RunInfo
    ) -> None:
        """Use ``open``, which takes the lock first."""
        self.path = path
        self._lock: int | None = lock
        self._run = run
        self._known = _Contents(existing.provenance if existing else here)
        if existing:
            self._known.take(existing)
        self._number = max((_number(part) for part in _parts(path)), default=0) + 1
        self._part: dict[_Key, Row] = {}  # the rows of the part being filled
        self._dirty = False
        self._flushed = time.monotonic()

    @classmethod
    def open(
        cls, path: Path, provenance: Provenance, run: RunInfo, *, fresh: bool = False
    ) -> SweepStore:
        """Open ``path`` to add rows to what it holds, creating its folder where needed.

        ``fresh`` starts over: what is there, parts included, is kept as ``NAME.parquet.old``.
        Raises FlashtuneError when another sweep is writing the file, when its provenance differs,
        when it cannot be read, or when the folder cannot be written.
        """
        with _writing(path):
            lock = _acquire(path)
            try:
                _sync_folder(path.parent)
                for leftover in _parts_folder(path).glob("*.tmp"):
                    leftover.unlink()
                if fresh:
                    _set_aside(path)
                existing = _load(path)
                if existing is not None:
                    _refuse_differences(path, provenance, existing.provenance)
                return cls(path, lock, existing, provenance, run)
            except BaseException:
                _release(path, lock)
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.flush()
        except FlashtuneError:
            if error is None:  # never hide what ended the sweep behind a second error
                raise
        finally:
            self._close()

    def get(self, problem: Problem, config: Config) -> Row | None:
        """The row of this problem and config, from the file, a part or this run."""
        return self._known.rows.get((problem, config))

    def rows(self) -> tuple[Row, ...]:
        """Every row known so far, in the file's order."""
        return _ordered(self._known.rows.values())

    def sdpa_for(self, problem: Problem) -> tuple[SdpaResult, ...]:
        """The SDPA results of one problem, of every run that measured it."""
        return tuple(result for result in self._known.sdpa.values() if result.problem == problem)

    def add(self, row: Row) -> None:
        """Add a row or replace the one with its problem and config.

        The row is kept as the file will hold it: samples in float32, ``measured_at`` in UTC.
        It is on disk once ``flush`` has run, which ``add`` calls at most about once a second;
        rows still in memory came within a second of each other, and a kill loses no more.
        Raises FlashtuneError when it cannot be written, ValueError on a time without a zone.
        """
        self._require_open()
        kept = _as_stored(row)
        self._part[kept.problem, kept.config] = kept
        self._known.rows[kept.problem, kept.config] = kept
        self._changed()

    def add_sdpa(self, result: SdpaResult) -> None:
        """Add an SDPA result; it replaces one of the same run, problem and backend."""
        self._require_open()
        self._known.sdpa[_sdpa_key(result)] = result
        self._changed()

    def note(self, text: str) -> None:
        """Add a note for the file's readers, once however often it is given."""
        self._require_open()
        if text not in self._known.notes:
            self._known.notes[text] = None
            self._changed()

    def flush(self) -> None:
        """Put everything added so far on disk, in a part. Raises FlashtuneError."""
        if not self._dirty:
            return
        self._require_open()
        part = _parts_folder(self.path) / f"part-{self._number:06d}.parquet"
        with _writing(self.path):
            _replace(part, self._known.file(self._part), part.with_name(part.name + ".tmp"))
        self._dirty = False
        self._flushed = time.monotonic()
        if len(self._part) >= PART_ROWS:
            self._number, self._part = self._number + 1, {}

    def finish(self) -> SweepFile:
        """Merge the parts into the file, remove them and let the file go.

        A file to which nothing was added is left as it is. Raises FlashtuneError when the disk is
        full or the folder cannot be written; the parts are then kept.
        """
        self._require_open()
        self.flush()
        whole = self._known.file()
        with _writing(self.path):
            if _parts(self.path) or not self.path.exists():
                _replace(self.path, whole, _parts_folder(self.path) / "whole.parquet.tmp")
            _remove_parts(self.path)
        self._close()
        return whole

    def _changed(self) -> None:
        # A run is recorded with the first thing it adds: one that only looked leaves no trace.
        self._known.runs.setdefault(self._run.run_id, self._run)
        self._dirty = True
        if time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def _require_open(self) -> None:
        if self._lock is None:
            raise RuntimeError(f"{self.path}: this store is closed; open it again to add to it")

    def _close(self) -> None:
        if self._lock is not None:
            lock, self._lock = self._lock, None
            _release(self.path, lock)


# The order and the merge.


class _Contents:
    """What files of one provenance hold together, the one taken last winning."""

    def __init__(self, provenance: Provenance) -> None:
        self.provenance = provenance
        self.runs: dict[str, RunInfo] = {}
        self.sdpa: dict[tuple[Problem, str, str], SdpaResult] = {}
        self.notes: dict[str, None] = {}
        self.rows: dict[_Key, Row] = {}

    def take(self, file: SweepFile) -> None:
        self.runs.update({run.run_id: run for run in file.runs})
        self.sdpa.update({_sdpa_key(result): result for result in file.sdpa})
        self.notes.update(dict.fromkeys(file.notes))
        self.rows.update({(row.problem, row.config): row for row in file.rows})

    def file(self, rows: Mapping[_Key, Row] | None = None) -> SweepFile:
        """Everything, or everything about these ``rows``, in the file's order."""
        return SweepFile(
            self.provenance,
            tuple(self.runs.values()),
            tuple(self.sdpa[key] for key in sorted(self.sdpa)),
            tuple(self.notes),
            _ordered((self.rows if rows is None else rows).values()),
        )


def _ordered(rows: Iterable[Row]) -> tuple[Row, ...]:
    """By problem, then config, both field by field: independent of the order of the sweep."""
    return tuple(sorted(rows, key=lambda row: (row.problem, row.config)))


def _sdpa_key(result: SdpaResult) -> tuple[Problem, str, str]:
    return result.problem, result.timing.backend, result.run_id


def _as_stored(row: Row) -> Row:
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


def _load(path: Path) -> SweepFile | None:
    # Parts before the file: a sweep that finishes meanwhile removes a part only once the file
    # holds its rows, so that a part found missing here is in the file read after it.
    files: list[SweepFile] = []
    for part in _parts(path):
        with suppress(*_MISSING):
            files.append(_read_one(part))
    with suppress(*_MISSING):
        files.insert(0, _read_one(path))
    if not files:
        return None
    contents = _Contents(files[0].provenance)
    for file in files:
        _refuse_differences(path, file.provenance, contents.provenance)
        contents.take(file)
    return contents.file()


def _refuse_differences(path: Path, here: Provenance, there: Provenance) -> None:
    differences = here.differences(there)
    if differences:
        raise FlashtuneError(
            f"{path} holds results of another setup: {'; '.join(differences)}",
            f"--fresh starts over (the old file is kept as {_old(path).name}), "
            "--out DIR writes elsewhere",
        )


# Parquet, one file at a time.


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
    }
    metadata = {METADATA_KEY: json.dumps(document).encode()}
    return pa.Table.from_pydict(columns, schema=schema().with_metadata(metadata))


def _read_one(path: Path) -> SweepFile:
    """One Parquet file. A missing one raises the OSError itself, for the caller to judge."""
    import pyarrow as pa
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    try:
        data = path.read_bytes()
    except _MISSING:
        raise
    except OSError as error:
        raise FlashtuneError(
            f"{path}: cannot read it: {error.strerror}", "pass a results file that you may read"
        ) from error
    if len(data) < 12 or data[:4] != _MAGIC or data[-4:] != _MAGIC:
        raise _unreadable(path, _what_is_wrong(data))
    try:
        table = pq.read_table(pa.BufferReader(data))
        document = (table.schema.metadata or {}).get(METADATA_KEY)
        if document is None:
            raise FlashtuneError(
                f"{path}: a Parquet file, but without flashtune's metadata",
                "pass a file that 'flashtune sweep' wrote, or use --out DIR to write elsewhere",
            )
        return _from_table(path, table, json.loads(document))
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise _unreadable(path, f"is damaged ({type(error).__name__}: {first_line})") from error


def _from_table(path: Path, table: pa.Table, document: dict[str, Any]) -> SweepFile:
    version = int(document["schema_version"])
    if version > SCHEMA_VERSION:
        raise FlashtuneError(
            f"{path} needs a flashtune that reads schema_version {version}; "
            f"this one reads up to {SCHEMA_VERSION}",
            "upgrade flashtune, or use --out DIR to write elsewhere",
        )
    if table.schema.names != [field.name for field in fields(Row)]:
        raise ValueError(f"its columns are not those of schema_version {version}")
    return SweepFile(
        Provenance(**document["provenance"]),
        tuple(
            RunInfo(run["run_id"], run["command"], datetime.fromisoformat(run["started"]))
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


def _unreadable(path: Path, what: str) -> FlashtuneError:
    if _PART.fullmatch(path.name):
        return FlashtuneError(f"{path} {what}", "delete this part to continue without its rows")
    return FlashtuneError(
        f"{path} {what}",
        f"restore a copy of it, or start over with --fresh (it is kept as {_old(path).name})",
    )


def _missing(path: Path) -> FlashtuneError:
    return FlashtuneError(f"{path}: no results there", "run 'flashtune sweep', or pass its --out")


# The folder of parts, its lock, and writes that are complete or absent.


def _parts_folder(path: Path) -> Path:
    return path.with_name(f".{path.stem}.parts")


def _old(path: Path) -> Path:
    return path.with_name(path.name + ".old")


def _number(part: Path) -> int:
    match = _PART.fullmatch(part.name)
    return int(match[1]) if match else 0


def _parts(path: Path) -> list[Path]:
    """The finished parts of ``path``, oldest first."""
    if not path.name:
        return []
    try:
        found = [entry for entry in _parts_folder(path).iterdir() if _PART.fullmatch(entry.name)]
    except _MISSING:
        return []
    except OSError as error:
        raise FlashtuneError(
            f"{_parts_folder(path)}: cannot read it: {error.strerror}",
            "make the folder readable, or use --out DIR to write elsewhere",
        ) from error
    return sorted(found, key=_number)


def _remove_parts(path: Path) -> None:
    # Oldest first: should a kill leave some, none of them is older than a row of the file.
    for part in _parts(path):
        part.unlink()


def _set_aside(path: Path) -> None:
    """Keep the file, with the rows of its parts, as ``NAME.parquet.old``."""
    if _parts(path):
        with suppress(FlashtuneError):  # damaged: the file itself is kept as it is
            whole = _load(path)
            if whole is not None:
                _replace(path, whole, _parts_folder(path) / "whole.parquet.tmp")
        _remove_parts(path)
    with suppress(FileNotFoundError):
        os.replace(path, _old(path))
        _sync_folder(path.parent)


def _replace(target: Path, file: SweepFile, temporary: Path) -> None:
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
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:  # some network file systems cannot sync a folder
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
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


def _acquire(path: Path) -> int:
    """Lock the parts folder, creating it, and return the lock's file descriptor."""
    folder = _parts_folder(path)
    attempts = 0
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except (FileNotFoundError, FileExistsError):
            # A sweep that just finished removed the folder under us, or it cannot be created.
            attempts += 1
            if attempts > 100:
                raise
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The one who held it before may have removed the file: only the file that stands
            # at the name now is a lock that others see.
            if os.path.samestat(os.fstat(lock), os.stat(folder / "lock")):
                os.ftruncate(lock, 0)
                os.pwrite(lock, str(os.getpid()).encode(), 0)
                return lock
        except FileNotFoundError:
            pass
        except BlockingIOError as error:
            holder = os.pread(lock, 32, 0).decode() or "unknown"
            os.close(lock)
            raise FlashtuneError(
                f"{path}: another sweep is writing it (pid {holder})",
                "wait until it has ended, or use --out DIR to write elsewhere",
            ) from error
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _release(path: Path, lock: int) -> None:
    """Let the lock go; the folder goes with it when no parts are left."""
    try:
        with suppress(OSError, FlashtuneError):
            if not _parts(path):
                (_parts_folder(path) / "lock").unlink()
                _parts_folder(path).rmdir()
    finally:
        os.close(lock)
