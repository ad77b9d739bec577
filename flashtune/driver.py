"""The card that is present, as libcuda and NVML describe it.

Nothing here imports torch. NVML gives the name, clocks and power; the CUDA driver gives the launch
limits. Asking it initialises the driver but makes no context, so it takes no device memory. It
does mean that a child made by fork() afterwards cannot use CUDA: start workers with spawn.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flashtune.errors import FlashtuneError

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
class Card:
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
    import pynvml  # not needed where there is no driver

    return Libraries(cuda, pynvml)


Load = Callable[[], Libraries | None]


def read_card(index: int, load: Load) -> Card | None:
    """The card that CUDA calls ``index``, or None when there is no NVIDIA driver or no card.

    CUDA_VISIBLE_DEVICES is respected. Raises FlashtuneError for an index beyond the last card, and
    with the driver's or NVML's words when one fails.
    """
    with _opened(index, load) as opened:
        if opened is None:
            return None
        libraries, device, handle = opened
        nvml = libraries.nvml
        version = nvml.nvmlSystemGetCudaDriverVersion()  # 13000 is 13.0
        power = _optional(nvml, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        return Card(
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


@contextmanager
def clock_reader(
    index: int = 0, load: Load = system_libraries
) -> Iterator[Callable[[], Clocks | None]]:
    """A function that reads the card's state; NVML stays open between the readings.

    It returns None when there is no driver or no card. Raises FlashtuneError with NVML's words.
    """
    with _opened(index, load) as opened:
        if opened is None:
            yield lambda: None
            return
        nvml, handle = opened[0].nvml, opened[2]
        yield lambda: _read_clocks(nvml, handle)


def clocks_now(index: int = 0, load: Load = system_libraries) -> Clocks | None:
    """One reading of the card's state, as :func:`clock_reader` gives it."""
    with clock_reader(index, load) as read:
        return read()


def other_processes(index: int = 0, load: Load = system_libraries) -> tuple[int, ...] | None:
    """Ids of the processes, but this one, that hold a context on the card ``index`` of CUDA.

    None when there is no card, or it does not say: no sweep shall end over that. In a container
    they may be hidden, or have ids of another name space.
    """
    with _opened(index, load) as opened:
        if opened is None:
            return None
        nvml, handle = opened[0].nvml, opened[2]
        try:
            running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except nvml.NVMLError:
            return None
        return tuple(sorted(p.pid for p in running if p.pid != os.getpid()))


def _read_clocks(nvml: Any, handle: Any) -> Clocks:
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


def _throttle_text(bits: int) -> str:
    known = [text for bit, text in _THROTTLE_REASONS.items() if bits & bit]
    rest = bits & ~sum(_THROTTLE_REASONS)
    return ", ".join(known + ([f"unknown ({rest:#x})"] if rest else [])) or "none"
