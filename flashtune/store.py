"""The results file: one Parquet file for each gpu x kernel x dtype x D, safe against a kill.

While a sweep runs, ``NAME.parquet`` is left alone and new rows go into ``.NAME.parts/`` beside it:
numbered parts, each a small Parquet file with the same schema and metadata, complete or absent.
``finish`` merges everything into the file and removes the parts. Rows are keyed by problem and
config. For one key a part wins over the file and a later part over an earlier one.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from flashtune.errors import FlashtuneError
from flashtune.parquet import (
    MISSING,
    as_stored,
    data_frame,
    read_file,
    sync_folder,
    write_file,
    writing,
)
from flashtune.records import Config, Problem
from flashtune.results import Provenance, RaceVerdict, Row, RunInfo, SdpaResult, SweepFile

if TYPE_CHECKING:
    import pandas as pd

FLUSH_SECONDS = 1.0
PART_ROWS = 256
"""A part is rewritten until it holds this many rows, so that long sweeps leave few parts."""

_PART = re.compile(r"part-(\d+)\.parquet")
_Key = tuple[Problem, Config]


def results_path(out: Path, gpu: str, kernel: str, dtype: str, D: int, measured: bool) -> Path:
    """The file in ``out`` that holds these rows; characters unfit for a file name become ``-``."""
    name = re.sub(r"[^\w.+-]+", "-", f"{gpu}_{kernel}_{dtype}_D{D}")
    return out / f"{name}{'' if measured else '_unmeasured'}.parquet"


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
    return data_frame(read(path))


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
        with writing(path):
            lock = _acquire(path)
            try:
                sync_folder(path.parent)
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
        self._keep(row)
        self._changed()

    def add_sdpa(self, result: SdpaResult) -> None:
        """Add an SDPA result; it replaces one of the same run, problem and backend."""
        self._require_open()
        self._known.sdpa[_sdpa_key(result)] = result
        self._changed()

    def verdict_for(self, problem: Problem) -> RaceVerdict | None:
        """What the last race on ``problem`` decided."""
        return self._known.verdicts.get(problem)

    def decide(self, rows: Iterable[Row], verdict: RaceVerdict | None) -> None:
        """Add the rows that a race ends with together with its verdict, and put them on disk: a
        kill leaves all of them or none."""
        self._require_open()
        for row in rows:
            self._keep(row)
        if verdict is not None:
            self._known.verdicts[verdict.problem] = verdict
        self._known.runs.setdefault(self._run.run_id, self._run)
        self._dirty = True
        self.flush()

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
        with writing(self.path):
            write_file(part, self._known.file(self._part), part.with_name(part.name + ".tmp"))
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
        with writing(self.path):
            if _parts(self.path) or not self.path.exists():
                write_file(self.path, whole, _parts_folder(self.path) / "whole.parquet.tmp")
            _remove_parts(self.path)
        self._close()
        return whole

    def _keep(self, row: Row) -> None:
        kept = as_stored(row)
        self._part[kept.problem, kept.config] = kept
        self._known.rows[kept.problem, kept.config] = kept

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
        self.verdicts: dict[Problem, RaceVerdict] = {}

    def take(self, file: SweepFile) -> None:
        self.runs.update({run.run_id: run for run in file.runs})
        self.sdpa.update({_sdpa_key(result): result for result in file.sdpa})
        self.notes.update(dict.fromkeys(file.notes))
        self.rows.update({(row.problem, row.config): row for row in file.rows})
        self.verdicts.update({verdict.problem: verdict for verdict in file.verdicts})

    def file(self, rows: Mapping[_Key, Row] | None = None) -> SweepFile:
        """Everything, or everything about these ``rows``, in the file's order."""
        return SweepFile(
            self.provenance,
            tuple(self.runs.values()),
            tuple(self.sdpa[key] for key in sorted(self.sdpa)),
            tuple(self.notes),
            _ordered((self.rows if rows is None else rows).values()),
            tuple(self.verdicts[problem] for problem in sorted(self.verdicts)),
        )


def _ordered(rows: Iterable[Row]) -> tuple[Row, ...]:
    """By problem, then config, both field by field: independent of the order of the sweep."""
    return tuple(sorted(rows, key=lambda row: (row.problem, row.config)))


def _sdpa_key(result: SdpaResult) -> tuple[Problem, str, str]:
    return result.problem, result.timing.backend, result.run_id


def _load(path: Path) -> SweepFile | None:
    # Parts before the file: a sweep that finishes meanwhile removes a part only once the file
    # holds its rows, so that a part found missing here is in the file read after it.
    files: list[SweepFile] = []
    for part in _parts(path):
        with suppress(*MISSING):
            files.append(read_file(part, _remedy(part)))
    with suppress(*MISSING):
        files.insert(0, read_file(path, _remedy(path)))
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


def _remedy(path: Path) -> str:
    """What to do about a file whose bytes are not what a sweep wrote."""
    if _PART.fullmatch(path.name):
        return "delete this part to continue without its rows"
    return f"restore a copy of it, or start over with --fresh (it is kept as {_old(path).name})"


def _missing(path: Path) -> FlashtuneError:
    return FlashtuneError(f"{path}: no results there", "run 'flashtune sweep', or pass its --out")


# The folder of parts and its lock.


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
    except MISSING:
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
                write_file(path, whole, _parts_folder(path) / "whole.parquet.tmp")
        _remove_parts(path)
    with suppress(FileNotFoundError):
        os.replace(path, _old(path))
        sync_folder(path.parent)


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
