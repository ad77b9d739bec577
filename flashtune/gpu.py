"""GPUs: what configs/gpus.toml says of them, what the driver says of the card that is present,
and the provenance of a run.

Nothing here imports torch. NVML gives the name, clocks and power; the CUDA driver gives the launch
limits. Asking it initialises the driver but makes no context, so it takes no device memory. It
does mean that a child made by fork() afterwards cannot use CUDA: start workers with spawn.
"""

from __future__ import annotations

import ctypes
import difflib
import os
import platform
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from flashtune.errors import FlashtuneError
from flashtune.records import Provenance

DEFAULT_TARGET = "rtx-4070-super"
"""The target when no GPU is present and none is named."""

_PACKAGE = Path(__file__).resolve().parent
_OLDEST_CC = 80
_NO_CARD_HINT = "Fix the driver, or go on without the card: CUDA_VISIBLE_DEVICES=-1 hides it."

# CUdevice_attribute in cuda.h.
_ATTRIBUTES = {
    "warp_size": 10,
    "sms": 16,
    "bus_width_bits": 37,
    "l2_bytes": 38,
    "threads_per_sm": 39,
    "cc_major": 75,
    "cc_minor": 76,
    "shared_per_sm": 81,
    "registers_per_sm": 82,
    "shared_per_block": 97,  # with the opt-in that Triton makes
    "blocks_per_sm": 106,
    "shared_reserved_per_block": 111,
}
_OVERRIDDEN = (
    "sms", "l2_bytes", "shared_per_sm", "shared_per_block", "shared_reserved_per_block",
    "blocks_per_sm", "registers_per_sm",
)  # fmt: skip
_CUDA_NO_DEVICE = 100  # CUresult

# nvmlClocksEventReason* in nvml.h.
_THROTTLE_REASONS = {
    0x001: "idle",
    0x002: "application clocks",
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "thermal (software)",
    0x040: "thermal (hardware)",
    0x080: "power brake",
    0x100: "display clocks",
}


@dataclass(frozen=True)
class Limits:
    """What one SM can hold. ``shared_*`` are bytes; a warp is 32 threads."""

    shared_per_sm: int
    shared_per_block: int  # the most a block may ask for
    shared_reserved_per_block: int  # what the driver adds to each block
    warps_per_sm: int
    blocks_per_sm: int
    registers_per_sm: int
    registers_per_thread: int
    register_unit_per_warp: int
    sub_partitions: int
    shared_unit: int


@dataclass(frozen=True)
class TensorRates:
    """Dense tensor FLOP per clock per SM by input and accumulator; a multiply-add counts as 2."""

    bf16_fp32: int
    fp16_fp32: int
    fp16_fp16: int
    tf32_fp32: int


@dataclass(frozen=True)
class GpuSpec(Limits):
    """One GPU: its row of configs/gpus.toml, with the driver's answers in it when ``present``.

    ``boost_clock_mhz`` is the clock behind the data sheet's tensor TFLOPS; a card may go up to
    ``max_sm_clock_mhz``, which only the driver knows. ``dram_gb_s`` is 10^9 bytes a second.
    """

    name: str  # slug: the row's, or made from the driver's name
    title: str  # for people; the driver's name when present
    driver_names: tuple[str, ...]
    cc: str
    sms: int
    boost_clock_mhz: int
    dram_gb_s: float
    l2_bytes: int
    power_limit_w: float | None
    sources: tuple[str, ...]
    tensor_rates: TensorRates | None  # None: a present card that has no row
    present: bool = False
    driver: str | None = None
    cuda: str | None = None  # the newest CUDA version that the driver supports
    max_sm_clock_mhz: int | None = None
    max_mem_clock_mhz: int | None = None

    @property
    def cc_number(self) -> int:
        """The compute capability as Triton counts it: 80, 86, 89, 90, 100, 120."""
        return _cc_number(self.cc)

    def tensor_flop_per_clock_per_sm(self, dtype: str) -> int | None:
        """Dense FLOP per clock per SM with fp32 accumulators; fp32 inputs run as tf32.

        None when the card has no row in configs/gpus.toml. The rates come from the documents in
        ``sources``. Raises FlashtuneError for a dtype other than bf16, fp16 and fp32.
        """
        keys = {"bf16": "bf16_fp32", "fp16": "fp16_fp32", "fp32": "tf32_fp32"}
        if dtype not in keys:
            raise FlashtuneError(
                f"No tensor rate for dtype '{dtype}'.", f"Use one of: {', '.join(keys)}."
            )
        if self.tensor_rates is None:
            return None
        rate: int = getattr(self.tensor_rates, keys[dtype])
        return rate


@dataclass(frozen=True)
class Clocks:
    """A card's state at one moment. None where the card does not report the value."""

    sm_clock_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    throttle: str | None  # why the clock is held down, e.g. "power cap"; "none"


@dataclass(frozen=True)
class Libraries:
    """The driver's two libraries: libcuda.so.1 through ctypes, and the pynvml module."""

    cuda: Any
    nvml: Any


@dataclass(frozen=True)
class _Card:
    """What the two libraries say of one present card."""

    name: str
    driver: str
    cuda: str
    attributes: dict[str, int]  # keys of _ATTRIBUTES
    max_sm_clock_mhz: int | None
    max_mem_clock_mhz: int | None
    power_limit_w: float | None

    @property
    def cc(self) -> str:
        return f"{self.attributes['cc_major']}.{self.attributes['cc_minor']}"

    @property
    def dram_gb_s(self) -> float | None:
        """Bus width x memory clock, two transfers a clock. None when NVML hides the clock."""
        if self.max_mem_clock_mhz is None:
            return None
        return 2 * self.max_mem_clock_mhz * self.attributes["bus_width_bits"] / 8 / 1000


def config_dir() -> Path:
    """The folder with gpus.toml: the wheel's flashtune/_configs, or the checkout's configs/.

    Raises FlashtuneError when neither is there.
    """
    # The wheel's copy first: beside an installed package, configs/ could be anyone's.
    for folder in (_PACKAGE / "_configs", _PACKAGE.parent / "configs"):
        if (folder / "gpus.toml").is_file():
            return folder
    raise FlashtuneError(
        f"flashtune's configs are missing beside {_PACKAGE}.", "Install flashtune again."
    )


def known_gpus() -> dict[str, GpuSpec]:
    """Every GPU of configs/gpus.toml by its slug, in the file's order.

    Raises FlashtuneError when the file is broken, naming the key.
    """
    tables = _gpu_tables()
    limits = _all_limits(tables)
    specs = {}
    for name, row in tables.items():
        if name == "cc":
            continue
        where = f"[{name}]"
        cc = _value(row, "cc", str, where)
        if cc not in limits:
            raise _broken(f"{where}.cc is '{cc}'", f"one of {', '.join(limits)}")
        rates = _value(row, "tensor_flop_per_clock_per_sm", dict, where)
        specs[name] = GpuSpec(
            **limits[cc],
            name=name,
            title=_value(row, "title", str, where),
            driver_names=tuple(_value(row, "driver_names", list, where)),
            cc=cc,
            sms=_value(row, "sms", int, where),
            boost_clock_mhz=_value(row, "boost_clock_mhz", int, where),
            dram_gb_s=float(_value(row, "dram_gb_s", (int, float), where)),
            l2_bytes=_value(row, "l2_bytes", int, where),
            power_limit_w=float(_value(row, "power_limit_w", (int, float), where)),
            sources=tuple(_value(row, "sources", list, where)),
            tensor_rates=TensorRates(
                **_integers(TensorRates, rates, f"[{name}.tensor_flop_per_clock_per_sm]")
            ),
        )
    return specs


def find_gpu(name: str) -> GpuSpec:
    """The row called ``name``, in any case. Raises FlashtuneError listing near names."""
    specs = known_gpus()
    wanted = name.strip().lower()
    if wanted in specs:
        return specs[wanted]
    near = difflib.get_close_matches(wanted, specs, n=3)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(specs)}."
    raise FlashtuneError(f"Unknown GPU '{name}'.", hint)


def system_libraries() -> Libraries | None:
    """Load libcuda.so.1 and pynvml; None when no NVIDIA driver is installed.

    Raises FlashtuneError when libcuda.so.1 is there but cannot be loaded.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        # OSError is also what a broken library gives; only an absent one means "no driver".
        if str(error).startswith("libcuda.so.1: cannot open shared object file: No such file"):
            return None
        raise FlashtuneError(f"libcuda.so.1 does not load: {error}", _NO_CARD_HINT) from error
    import pynvml  # type: ignore[import-untyped]  # not needed where there is no driver

    return Libraries(cuda, pynvml)


Load = Callable[[], Libraries | None]


def present_gpu(index: int = 0, load: Load = system_libraries) -> GpuSpec | None:
    """The card that CUDA calls ``index``, or None when there is no NVIDIA driver or no card.

    CUDA_VISIBLE_DEVICES is respected. Its row of configs/gpus.toml gives what no driver reports
    (tensor rates, boost clock, units); all else is the driver's. Raises FlashtuneError for a card
    older than Ampere or without a table of limits, for an index beyond the last card, and with
    the driver's words when it fails.
    """
    card = _read_card(index, load)
    return None if card is None else _present_spec(card)


def target_gpu(name: str, load: Load = system_libraries) -> GpuSpec:
    """The GPU to tune for: "auto" is the card that is present, else DEFAULT_TARGET; else a row.

    A named row that is the card that is present comes with the driver's answers in it. Raises
    FlashtuneError for an unknown name, and whatever present_gpu raises.
    """
    if name.strip().lower() == "auto":
        return present_gpu(load=load) or find_gpu(DEFAULT_TARGET)
    row = find_gpu(name)
    card = _read_card(0, load)
    return _present_spec(card) if card and card.name in row.driver_names else row


def clocks_now(index: int = 0, load: Load = system_libraries) -> Clocks | None:
    """The card's SM clock (MHz), temperature (C), power (W) and throttling from NVML.

    None when there is no driver or no card. Raises FlashtuneError with NVML's words otherwise.
    """
    with _opened(index, load) as opened:
        if opened is None:
            return None
        nvml, handle = opened[0].nvml, opened[2]
        power = _optional(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
        bits = _optional(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        return Clocks(
            sm_clock_mhz=_optional(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            temperature_c=_optional(
                nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU
            ),
            power_w=None if power is None else power / 1000,
            throttle=None if bits is None else _throttle_text(bits),
        )


def provenance(spec: GpuSpec, kernel: str, kernel_hash: str) -> Provenance:
    """Where a run's numbers come from: the card or target, versions, and the source's commit.

    Raises FlashtuneError when Triton is not installed.
    """
    triton = _version("triton")
    if triton is None:
        raise FlashtuneError(
            "Triton is not installed, so no kernel can be compiled.", "pip install 'triton>=3.6'"
        )
    return Provenance(
        gpu=spec.title if spec.present else spec.name,
        cc=spec.cc,
        sms=spec.sms,
        measured=spec.present,
        driver=spec.driver,
        torch=_version("torch"),
        triton=triton,
        cuda=spec.cuda,
        python=platform.python_version(),
        kernel=kernel,
        kernel_hash=kernel_hash,
        sm_clock_mhz=spec.max_sm_clock_mhz,
        mem_clock_mhz=spec.max_mem_clock_mhz,
        power_limit_w=spec.power_limit_w if spec.present else None,
        git_commit=_git_commit(_PACKAGE),
    )


def _cc_number(cc: str) -> int:
    major, minor = cc.split(".")
    return int(major) * 10 + int(minor)


def _broken(what: str, allowed: str) -> FlashtuneError:
    return FlashtuneError(f"configs/gpus.toml: {what}.", f"Allowed: {allowed}.")


def _gpu_tables() -> dict[str, Any]:
    path = config_dir() / "gpus.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise FlashtuneError(f"{path} is not TOML: {error}.", "Repair that line.") from error


def _value(table: Any, key: str, kind: type | tuple[type, ...], where: str) -> Any:
    value = table.get(key) if isinstance(table, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        state = "is missing" if value is None else f"is {value!r}"
        raise _broken(f"{where}.{key} {state}".lstrip("."), " or ".join(k.__name__ for k in kinds))
    return value


def _integers(record: type[Any], table: Any, where: str) -> dict[str, Any]:
    return {f.name: _value(table, f.name, int, where) for f in fields(record)}


def _all_limits(tables: dict[str, Any]) -> dict[str, dict[str, Any]]:
    rows = _value(tables, "cc", dict, "")
    return {cc: _integers(Limits, row, f'[cc."{cc}"]') for cc, row in rows.items()}


def _visible_libraries(load: Load) -> Libraries | None:
    # CUDA would say "no device" too, but a broken driver would fail first and could not be hidden.
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return None
    return load()


def _check(cuda: Any, function: str, code: int) -> None:
    """Raise FlashtuneError with the driver's error name when ``function`` did not return 0."""
    if code:
        text = ctypes.c_char_p()
        cuda.cuGetErrorName(code, ctypes.byref(text))
        name = text.value.decode() if text.value else "an unknown error"
        raise FlashtuneError(f"CUDA driver: {function} failed: {name} ({code}).", _NO_CARD_HINT)


def _cuda_device(cuda: Any, index: int) -> ctypes.c_int | None:
    """The driver's handle of visible device ``index``; None when no device is visible."""
    code = cuda.cuInit(0)
    if code == _CUDA_NO_DEVICE:
        return None
    _check(cuda, "cuInit", code)
    count, device = ctypes.c_int(), ctypes.c_int()
    _check(cuda, "cuDeviceGetCount", cuda.cuDeviceGetCount(ctypes.byref(count)))
    if not 0 <= index < count.value:
        raise FlashtuneError(
            f"There is no GPU {index}: CUDA sees {count.value}.",
            "Choose a lower index, or look at CUDA_VISIBLE_DEVICES.",
        )
    _check(cuda, "cuDeviceGet", cuda.cuDeviceGet(ctypes.byref(device), index))
    return device


def _bus_id(cuda: Any, device: ctypes.c_int) -> str:
    text = ctypes.create_string_buffer(32)
    _check(cuda, "cuDeviceGetPCIBusId", cuda.cuDeviceGetPCIBusId(text, len(text), device))
    return text.value.decode()


def _attributes(cuda: Any, device: ctypes.c_int) -> dict[str, int]:
    values = {}
    for name, number in _ATTRIBUTES.items():
        value = ctypes.c_int()
        code = cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        _check(cuda, f"cuDeviceGetAttribute for {name}", code)
        values[name] = value.value
    return values


@contextmanager
def _nvml_session(nvml: Any) -> Iterator[bool]:
    """NVML started and shut down; False when it is not there. Its errors become FlashtuneError."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED):
            yield False
            return
        raise FlashtuneError(f"NVML does not start: {error}.", _NO_CARD_HINT) from error
    try:
        yield True
    except nvml.NVMLError as error:
        raise FlashtuneError(f"NVML failed: {error}.", _NO_CARD_HINT) from error
    finally:
        nvml.nvmlShutdown()


def _optional(nvml: Any, query: Callable[..., int], *args: Any) -> int | None:
    """The query's answer, or None when this card (a vGPU, say) does not support the query."""
    try:
        return query(*args)
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_NOT_SUPPORTED:
            return None
        raise


@contextmanager
def _opened(index: int, load: Load) -> Iterator[tuple[Libraries, ctypes.c_int, Any] | None]:
    """The libraries, and the CUDA device and NVML handle of one and the same card."""
    libraries = _visible_libraries(load)
    device = None if libraries is None else _cuda_device(libraries.cuda, index)
    if libraries is None or device is None:
        yield None
        return
    with _nvml_session(libraries.nvml) as alive:
        if not alive:
            yield None
            return
        # NVML counts every card of the machine and CUDA only the visible ones, in another order.
        bus_id = _bus_id(libraries.cuda, device)
        yield libraries, device, libraries.nvml.nvmlDeviceGetHandleByPciBusId(bus_id)


def _read_card(index: int, load: Load) -> _Card | None:
    with _opened(index, load) as opened:
        if opened is None:
            return None
        libraries, device, handle = opened
        nvml = libraries.nvml
        version = nvml.nvmlSystemGetCudaDriverVersion()  # 13000 is 13.0
        power = _optional(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        return _Card(
            name=nvml.nvmlDeviceGetName(handle),
            driver=nvml.nvmlSystemGetDriverVersion(),
            cuda=f"{version // 1000}.{version % 1000 // 10}",
            attributes=_attributes(libraries.cuda, device),
            max_sm_clock_mhz=_optional(
                nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM
            ),
            max_mem_clock_mhz=_optional(
                nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_MEM
            ),
            power_limit_w=None if power is None else power / 1000,
        )


def _present_spec(card: _Card) -> GpuSpec:
    rows = [spec for spec in known_gpus().values() if card.name in spec.driver_names]
    base = rows[0] if rows else _spec_without_row(card)
    answers = card.attributes
    limits: dict[str, Any] = {name: answers[name] for name in _OVERRIDDEN}
    return replace(
        base,
        present=True,
        title=card.name,
        cc=card.cc,
        driver=card.driver,
        cuda=card.cuda,
        max_sm_clock_mhz=card.max_sm_clock_mhz,
        max_mem_clock_mhz=card.max_mem_clock_mhz,
        power_limit_w=card.power_limit_w,
        dram_gb_s=base.dram_gb_s if card.dram_gb_s is None else card.dram_gb_s,
        warps_per_sm=answers["threads_per_sm"] // answers["warp_size"],
        **limits,
    )


def _spec_without_row(card: _Card) -> GpuSpec:
    if _cc_number(card.cc) < _OLDEST_CC:
        raise FlashtuneError(
            f"{card.name} has compute capability {card.cc}; Ampere (8.0) or newer is needed.",
            "Tune for another GPU by name with --gpu, without timing.",
        )
    limits = _all_limits(_gpu_tables())
    if card.cc not in limits:
        raise FlashtuneError(
            f"{card.name} has compute capability {card.cc}, which configs/gpus.toml has no limits"
            f" for; Ampere or newer is needed, of {', '.join(limits)}.",
            f'Add a [cc."{card.cc}"] table to configs/gpus.toml, or choose a target with --gpu.',
        )
    if card.dram_gb_s is None or card.max_sm_clock_mhz is None:
        raise FlashtuneError(
            f"NVML does not report the clocks of {card.name}, and it has no row.",
            f'Add a row with driver_names = ["{card.name}"] to configs/gpus.toml.',
        )
    return GpuSpec(
        **limits[card.cc],
        name=_slug(card.name),
        title=card.name,
        driver_names=(card.name,),
        cc=card.cc,
        sms=card.attributes["sms"],
        boost_clock_mhz=card.max_sm_clock_mhz,
        dram_gb_s=card.dram_gb_s,
        l2_bytes=card.attributes["l2_bytes"],
        power_limit_w=card.power_limit_w,
        sources=(f"the driver, {card.driver}",),
        tensor_rates=None,
    )


def _slug(driver_name: str) -> str:
    words = re.findall(r"[a-z0-9]+", driver_name.lower())
    return "-".join(word for word in words if word not in ("nvidia", "geforce"))


def _throttle_text(bits: int) -> str:
    known = [text for bit, text in _THROTTLE_REASONS.items() if bits & bit]
    rest = bits & ~sum(_THROTTLE_REASONS)
    return ", ".join(known + ([f"unknown ({rest:#x})"] if rest else [])) or "none"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _git_commit(folder: Path) -> str | None:
    """The commit ``folder`` is checked out at; None when it is not part of a checkout."""

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *args], capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # A virtual environment inside some other checkout is not ours: the file itself must be tracked.
    if git("ls-files", "--error-unmatch", "records.py") is None:
        return None
    commit = git("rev-parse", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if commit and changed else commit
