"""The GPU table against published figures, the present card through fake driver libraries, and the
provenance of a run."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from types import SimpleNamespace
from typing import Any, NamedTuple

import pynvml  # type: ignore[import-untyped]
import pytest

from flashtune import config_files, driver, gpu, provenance, versions
from flashtune.errors import FlashtuneError

# Dense TFLOPS that NVIDIA publishes: (bf16 with fp32 accumulation, fp16 with fp16, tf32).
# Where only the sparse figure is published, it is halved here.
PUBLISHED_TFLOPS = {
    "rtx-4070-super": (568 / 8, 568 / 4, 568 / 16),  # 568 AI TOPS: FP8, sparse, FP16 accumulation
    "rtx-4090": (165.2, 330.3, 82.6),
    "rtx-3090": (71.0, 142.0, 35.6),
    "rtx-5090": (209.5, 419.0, 104.8),
    "a100": (312.0, 312.0, 156.0),
    "l4": (242 / 2, 242 / 2, 120 / 2),
    "l40s": (733 / 2, 733 / 2, 366 / 2),
    "h100-sxm": (989.4, 989.4, 494.7),
    "h200": (1979 / 2, 1979 / 2, 989 / 2),
    "b200": (4500 / 2, 4500 / 2, 2200 / 2),
}

H200_ATTRIBUTES = {
    "warp_size": 32,
    "sms": 132,
    "bus_width_bits": 6144,
    "l2_bytes": 62914560,  # unlike the row's, to see the driver win
    "threads_per_sm": 2048,
    "cc_major": 9,
    "cc_minor": 0,
    "shared_per_sm": 233472,
    "registers_per_sm": 65536,
    "shared_per_block": 232448,
    "blocks_per_sm": 32,
    "shared_reserved_per_block": 1024,
}
TURING_ATTRIBUTES = H200_ATTRIBUTES | {"cc_major": 7, "cc_minor": 5}
ADA_ATTRIBUTES = H200_ATTRIBUTES | {
    "cc_major": 8, "cc_minor": 9, "sms": 46, "bus_width_bits": 192, "l2_bytes": 37748736,
    "threads_per_sm": 1536, "shared_per_sm": 102400, "shared_per_block": 101376,
    "blocks_per_sm": 24,
}  # fmt: skip


class FakeCuda:
    """The seven functions of libcuda that are called, over (bus id, attributes) pairs."""

    def __init__(self, *devices: tuple[str, dict[str, int]], init: int = 0) -> None:
        self.devices = devices
        self.init = init

    def cuInit(self, flags: int) -> int:
        return self.init or (0 if self.devices else 100)

    def cuGetErrorName(self, code: int, text: Any) -> int:
        text._obj.value = b"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.devices)
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = index
        return 0

    def cuDeviceGetPCIBusId(self, text: Any, length: int, device: ctypes.c_int) -> int:
        text.value = self.devices[device.value][0].encode()
        return 0

    def cuDeviceGetAttribute(self, value: Any, number: int, device: ctypes.c_int) -> int:
        names = {v: k for k, v in driver._ATTRIBUTES.items()}
        value._obj.value = self.devices[device.value][1][names[number]]
        return 0


def fake_nvml(names: dict[str, str], **overrides: Any) -> SimpleNamespace:
    """pynvml's names over a table of bus id -> card name; its constants and errors are real."""
    opened: list[str] = []
    calls: dict[str, Any] = {
        "nvmlInit": lambda: opened.append("open"),
        "nvmlShutdown": opened.pop,
        "nvmlDeviceGetHandleByPciBusId": lambda bus_id: bus_id,
        "nvmlDeviceGetName": lambda handle: names[handle],
        "nvmlSystemGetDriverVersion": lambda: "580.159",
        "nvmlSystemGetCudaDriverVersion": lambda: 13000,
        "nvmlDeviceGetMaxClockInfo": lambda handle, kind: {
            pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 3201,
        }[kind],
        "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 650_000,
        "nvmlDeviceGetClockInfo": lambda handle, kind: 1755,
        "nvmlDeviceGetTemperature": lambda handle, sensor: 41,
        "nvmlDeviceGetPowerUsage": lambda handle: 512_500,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x24,
    }  # fmt: skip
    constants = {k: v for k, v in vars(pynvml).items() if k.startswith(("NVML_", "NVMLError"))}
    return SimpleNamespace(**(constants | calls | overrides), opened=opened)


def failing(code: int) -> Any:
    def fail(*args: Any) -> Any:
        raise pynvml.NVMLError(code)

    return fail


def load(cuda: FakeCuda, nvml: SimpleNamespace) -> driver.Load:
    return lambda: driver.Libraries(cuda, nvml)


def h200(**overrides: Any) -> driver.Load:
    bus_id = "0000:1B:00.0"
    cuda = FakeCuda((bus_id, H200_ATTRIBUTES))
    return load(cuda, fake_nvml({bus_id: "NVIDIA H200"}, **overrides))


@pytest.fixture(autouse=True)
def visible(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "gpu" not in request.keywords:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


# configs/gpus.toml


def test_every_row_has_published_figures_to_check() -> None:
    assert list(gpu.known_gpus()) == list(PUBLISHED_TFLOPS)


@pytest.mark.parametrize("name", PUBLISHED_TFLOPS)
def test_rates_give_the_published_tflops(name: str) -> None:
    spec = gpu.find_gpu(name)
    rates = spec.tensor_rates
    assert rates is not None
    per_rate = spec.sms * spec.boost_clock_mhz / 1e6
    bf16, fp16, tf32 = PUBLISHED_TFLOPS[name]
    assert rates.bf16_fp32 * per_rate == pytest.approx(bf16, rel=0.005)
    assert rates.fp16_fp32 * per_rate == pytest.approx(bf16, rel=0.005)
    assert rates.fp16_fp16 * per_rate == pytest.approx(fp16, rel=0.005)
    assert rates.tf32_fp32 * per_rate == pytest.approx(tf32, rel=0.025)  # b200: rounded to 1.1 PF


@pytest.mark.parametrize(
    ("name", "cc", "number", "sms", "shared_kb", "warps", "blocks"),
    [
        ("a100", "8.0", 80, 108, 164, 64, 32),
        ("rtx-3090", "8.6", 86, 82, 100, 48, 16),
        ("rtx-4070-super", "8.9", 89, 56, 100, 48, 24),
        ("h200", "9.0", 90, 132, 228, 64, 32),
        ("b200", "10.0", 100, 148, 228, 64, 32),
        ("rtx-5090", "12.0", 120, 170, 100, 48, 24),
    ],
)
def test_limits_of_each_cc(
    name: str, cc: str, number: int, sms: int, shared_kb: int, warps: int, blocks: int
) -> None:
    spec = gpu.find_gpu(name)
    assert (spec.cc, spec.cc_number, spec.sms) == (cc, number, sms)
    assert spec.shared_per_sm == shared_kb * 1024
    assert spec.shared_per_block == (shared_kb - 1) * 1024
    assert spec.shared_reserved_per_block == 1024
    assert (spec.warps_per_sm, spec.blocks_per_sm) == (warps, blocks)
    assert (spec.registers_per_sm, spec.registers_per_thread) == (65536, 255)
    assert (spec.register_unit_per_warp, spec.sub_partitions, spec.shared_unit) == (256, 4, 128)


def test_the_articles_card() -> None:
    spec = gpu.find_gpu(gpu.DEFAULT_TARGET)
    assert (spec.dram_gb_s, spec.l2_bytes, spec.shared_per_block) == (504.0, 48 << 20, 101376)
    assert [spec.tensor_flop_per_clock_per_sm(d) for d in ("bf16", "fp16", "fp32")] == [
        512, 512, 256,
    ]  # fmt: skip
    assert not spec.present


def test_no_driver_name_belongs_to_two_rows_and_every_row_names_its_sources() -> None:
    specs = gpu.known_gpus().values()
    names = [name for spec in specs for name in spec.driver_names]
    assert len(names) == len(set(names))
    assert all(spec.sources for spec in specs)


def test_an_unknown_dtype_has_no_rate() -> None:
    with pytest.raises(FlashtuneError, match="fp64"):
        gpu.find_gpu("h200").tensor_flop_per_clock_per_sm("fp64")


def test_names_ignore_case() -> None:
    assert gpu.find_gpu("H100-SXM").name == "h100-sxm"


def test_an_unknown_name_lists_near_ones_or_all() -> None:
    with pytest.raises(FlashtuneError, match="rtx-4070-suber") as near:
        gpu.find_gpu("rtx-4070-suber")
    assert "rtx-4070-super" in near.value.hint
    assert "b200" not in near.value.hint
    with pytest.raises(FlashtuneError) as far:
        gpu.find_gpu("zzz")
    assert all(name in far.value.hint for name in PUBLISHED_TFLOPS)


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[x]\ntitle = 1\n", "toml: cc is missing", "dict"),
        ("[cc]\n[x]\ntitle = 1\n", r"\[x\].cc is missing", "str"),
        ("[cc.'8.9']\nshared_per_sm = 'a'\n", r'\[cc."8.9"\].shared_per_sm is \'a\'', "int"),
        ("[[[", "is not TOML", "Repair"),
    ],
)
def test_a_broken_file_names_the_key_and_what_is_allowed(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, text: str, message: str, hint: str
) -> None:
    (tmp_path / "gpus.toml").write_text(text)
    monkeypatch.setattr(gpu, "config_dir", lambda: tmp_path)
    with pytest.raises(FlashtuneError, match=message) as error:
        gpu.known_gpus()
    assert hint in error.value.hint


def test_the_wheels_own_configs_come_before_a_folder_beside_it(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "flashtune"
    monkeypatch.setattr(config_files, "_PACKAGE", package)
    with pytest.raises(FlashtuneError, match="configs are missing"):
        config_files.config_dir()
    for folder in (tmp_path / "configs", package / "_configs"):
        folder.mkdir(parents=True)
        (folder / "gpus.toml").touch()
        assert config_files.config_dir() == folder


def test_a_file_that_cannot_be_read_is_told(tmp_path: Any) -> None:
    with pytest.raises(FlashtuneError, match="absent.toml cannot be read: No such file"):
        config_files.read_toml(tmp_path / "absent.toml")
    (tmp_path / "latin.toml").write_bytes(b"title = '\xe9'\n")
    with pytest.raises(FlashtuneError, match="latin.toml is not TOML") as error:
        config_files.read_toml(tmp_path / "latin.toml")
    assert "UTF-8" in error.value.hint


# The present card


def test_no_driver_is_no_card() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("an NVIDIA driver is installed")
    assert driver.system_libraries() is None
    assert gpu.present_gpu() is None
    assert driver.clocks_now() is None
    assert gpu.target_gpu("auto").name == "rtx-4070-super"


def test_a_driver_without_devices_is_no_card() -> None:
    assert gpu.present_gpu(load=load(FakeCuda(), fake_nvml({}))) is None
    assert driver.clocks_now(load=load(FakeCuda(), fake_nvml({}))) is None


@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED]
)
def test_nvml_that_is_not_there_is_no_card(code: int) -> None:
    assert gpu.present_gpu(load=h200(nvmlInit=failing(code))) is None


@pytest.mark.parametrize(
    "function", ["nvmlInit", "nvmlDeviceGetHandleByPciBusId", "nvmlDeviceGetMaxClockInfo"]
)
def test_other_nvml_errors_are_told(function: str) -> None:
    fail = failing(pynvml.NVML_ERROR_GPU_IS_LOST)
    with pytest.raises(FlashtuneError, match="GPU is lost"):
        gpu.present_gpu(load=h200(**{function: fail}))


def test_cuda_errors_are_told_by_name() -> None:
    broken = load(FakeCuda(("0000:1B:00.0", H200_ATTRIBUTES), init=803), fake_nvml({}))
    with pytest.raises(FlashtuneError, match=r"cuInit.*SYSTEM_DRIVER_MISMATCH \(803\)"):
        gpu.present_gpu(load=broken)


@pytest.mark.parametrize("value", ["", "-1"])
def test_hidden_cards_leave_the_driver_alone(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)

    def load_nothing() -> driver.Libraries:
        raise AssertionError("the driver was touched")

    assert gpu.present_gpu(load=load_nothing) is None
    assert driver.clocks_now(load=load_nothing) is None


def test_the_driver_overrides_the_row() -> None:
    row = gpu.find_gpu("h200")
    spec = gpu.present_gpu(load=h200())
    assert spec is not None
    assert spec.present
    assert (spec.name, spec.title, spec.driver, spec.cuda) == (
        "h200", "NVIDIA H200", "580.159", "13.0",
    )  # fmt: skip
    assert (spec.l2_bytes, spec.power_limit_w) == (62914560, 650.0)
    assert spec.dram_gb_s == pytest.approx(4917, abs=1)  # 2 x 3201 MHz x 6144 bits
    assert (spec.max_sm_clock_mhz, spec.boost_clock_mhz) == (1980, 1830)
    assert (spec.shared_per_block, spec.warps_per_sm, spec.blocks_per_sm) == (232448, 64, 32)
    assert spec.tensor_rates == row.tensor_rates


def test_nvml_is_shut_down_again_also_after_an_error() -> None:
    fine = fake_nvml({"b": "NVIDIA H200"})
    gpu.present_gpu(load=load(FakeCuda(("b", H200_ATTRIBUTES)), fine))
    assert fine.opened == []
    bad = fake_nvml({}, nvmlDeviceGetName=failing(pynvml.NVML_ERROR_UNKNOWN))
    with pytest.raises(FlashtuneError):
        gpu.present_gpu(load=load(FakeCuda(("b", H200_ATTRIBUTES)), bad))
    assert bad.opened == []


def test_what_a_card_does_not_support_is_none() -> None:
    fail = failing(pynvml.NVML_ERROR_NOT_SUPPORTED)
    spec = gpu.present_gpu(
        load=h200(nvmlDeviceGetMaxClockInfo=fail, nvmlDeviceGetEnforcedPowerLimit=fail)
    )
    assert spec is not None
    assert (spec.max_sm_clock_mhz, spec.power_limit_w, spec.dram_gb_s) == (None, None, 4800.0)


def test_the_nvml_handle_is_found_by_the_bus_id_of_the_visible_card() -> None:
    # CUDA_VISIBLE_DEVICES=1 on a machine with two cards: CUDA sees one, NVML both.
    cards = {"0000:01:00.0": "NVIDIA GeForce RTX 4070", "0000:1B:00.0": "NVIDIA H200"}
    only_second = load(FakeCuda(("0000:1B:00.0", H200_ATTRIBUTES)), fake_nvml(cards))
    spec = gpu.present_gpu(0, only_second)
    assert spec is not None
    assert spec.title == "NVIDIA H200"


def test_an_index_beyond_the_visible_cards() -> None:
    with pytest.raises(FlashtuneError, match="no GPU 1: CUDA sees 1"):
        gpu.present_gpu(1, h200())


def test_a_card_without_a_row_comes_from_the_driver_and_its_cc() -> None:
    nvml = fake_nvml({"b": "NVIDIA GeForce RTX 4070"})
    spec = gpu.present_gpu(load=load(FakeCuda(("b", ADA_ATTRIBUTES)), nvml))
    assert spec is not None
    assert (spec.name, spec.cc_number, spec.sms, spec.warps_per_sm) == ("rtx-4070", 89, 46, 48)
    assert (spec.register_unit_per_warp, spec.shared_unit) == (256, 128)
    assert spec.tensor_rates is None
    assert spec.tensor_flop_per_clock_per_sm("bf16") is None


@pytest.mark.parametrize(
    "attributes", [TURING_ATTRIBUTES, H200_ATTRIBUTES | {"cc_major": 13, "cc_minor": 0}]
)
def test_a_card_that_is_too_old_or_has_no_limits(attributes: dict[str, int]) -> None:
    other = load(FakeCuda(("b", attributes)), fake_nvml({"b": "NVIDIA Other"}))
    with pytest.raises(FlashtuneError, match=r"Ampere .*or newer"):
        gpu.present_gpu(load=other)
    assert gpu.target_gpu("l4", other).name == "l4"  # a named target still works beside it


def test_target() -> None:
    nothing = load(FakeCuda(), fake_nvml({}))
    assert gpu.target_gpu("auto", nothing) == gpu.find_gpu("rtx-4070-super")
    assert gpu.target_gpu("auto", h200()).present
    assert gpu.target_gpu("H200", h200()).present
    assert gpu.target_gpu("h100-sxm", h200()) == gpu.find_gpu("h100-sxm")
    with pytest.raises(FlashtuneError, match="Unknown GPU"):
        gpu.target_gpu("h2000x", h200())


def test_clocks_now() -> None:
    assert driver.clocks_now(load=h200()) == driver.Clocks(
        sm_clock_mhz=1755,
        temperature_c=41,
        power_w=512.5,
        throttle="power cap, thermal (software)",
    )
    quiet = h200(nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0)
    odd = h200(nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x1004)
    assert [getattr(driver.clocks_now(load=each), "throttle", None) for each in (quiet, odd)] == [
        "none",
        "power cap, unknown (0x1000)",
    ]


def test_other_processes_are_counted_without_our_own() -> None:
    class Process(NamedTuple):
        pid: int

    running = [Process(77), Process(os.getpid()), Process(5)]
    busy = h200(nvmlDeviceGetComputeRunningProcesses=lambda handle: running)
    assert driver.other_processes(load=busy) == (5, 77)
    hidden = h200(nvmlDeviceGetComputeRunningProcesses=failing(pynvml.NVML_ERROR_NOT_SUPPORTED))
    assert driver.other_processes(load=hidden) is None
    assert driver.other_processes(load=lambda: None) is None


# Provenance


def test_provenance_of_a_target_and_of_a_card() -> None:
    target = provenance.provenance(gpu.find_gpu("l4"), "kernel", "hash")
    assert (target.gpu, target.cc, target.measured, target.driver) == ("l4", "8.9", False, None)
    assert (target.power_limit_w, target.sm_clock_mhz) == (None, None)
    spec = gpu.present_gpu(load=h200())
    assert spec is not None
    card = provenance.provenance(spec, "kernel", "hash")
    assert (card.gpu, card.measured, card.driver, card.cuda) == ("h200", True, "580.159", "13.0")
    assert (card.sm_clock_mhz, card.mem_clock_mhz, card.power_limit_w) == (1980, 3201, 650.0)
    assert "gpu: h200 there, l4 here" in target.differences(card)


def test_provenance_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda name: None)
    with pytest.raises(FlashtuneError, match="Triton"):
        provenance.provenance(gpu.find_gpu("l4"), "kernel", "hash")


@pytest.mark.parametrize("found", ["3.5.1", "2.9.0+git1a2b3c4d", "3"])
def test_provenance_refuses_an_old_triton(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(versions, "version", lambda name: found)
    with pytest.raises(FlashtuneError, match=re.escape(f"Triton {found} is too old")) as error:
        provenance.provenance(gpu.find_gpu("l4"), "kernel", "hash")
    assert error.value.hint == "pip install 'triton>=3.6'"


@pytest.mark.parametrize("found", ["3.6.0", "3.10.1", "3.6.0+git1a2b3c4d", "4.0"])
def test_provenance_takes_a_newer_triton(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(versions, "version", lambda name: found)
    assert provenance.provenance(gpu.find_gpu("l4"), "kernel", "hash").triton == found


def test_version_of_what_is_not_installed_is_none() -> None:
    assert versions.version("pytest") == pytest.__version__
    assert versions.version("no-such-distribution-flashtune") is None


def test_git_commit(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)  # a commit hook's variables point at another repository

    def git(*args: str) -> None:
        who = ("-c", "user.name=x", "-c", "user.email=x@example.com")
        subprocess.run(["git", *who, *args], cwd=tmp_path, check=True, capture_output=True)

    source = tmp_path / "records.py"
    source.write_text("one\n")
    assert provenance._git_commit(tmp_path) is None  # no checkout
    git("init")
    assert provenance._git_commit(tmp_path) is None  # a checkout that the source is no part of
    git("add", ".")
    git("commit", "-m", "one")
    clean = provenance._git_commit(tmp_path)
    assert clean is not None
    assert len(clean) == 40
    index = tmp_path / ".git" / "index"
    before = index.read_bytes()
    os.utime(source, (1, 1))  # git would refresh its index over this, under a lock
    assert provenance._git_commit(tmp_path) == clean
    assert index.read_bytes() == before
    source.write_text("two\n")
    assert provenance._git_commit(tmp_path) == f"{clean}-dirty"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance._git_commit(tmp_path) is None  # no git


# On a card


@pytest.mark.gpu
def test_the_card_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    spec = gpu.present_gpu()
    properties = torch.cuda.get_device_properties(0)
    assert spec is not None
    assert spec.title == properties.name
    assert spec.cc == f"{properties.major}.{properties.minor}"
    assert spec.sms == properties.multi_processor_count
    assert spec.l2_bytes == properties.L2_cache_size
    assert spec.shared_per_sm == properties.shared_memory_per_multiprocessor
    assert spec.shared_per_block == properties.shared_memory_per_block_optin
    assert spec.warps_per_sm * 32 == properties.max_threads_per_multi_processor
    assert spec.registers_per_sm == properties.regs_per_multiprocessor
    clocks = driver.clocks_now()
    assert clocks is not None
    assert clocks.sm_clock_mhz is not None
    assert clocks.throttle is not None
    assert gpu.target_gpu("auto") == spec


@pytest.mark.gpu
def test_an_h200_agrees_with_its_row() -> None:
    spec = gpu.present_gpu()
    if spec is None or spec.name != "h200":
        pytest.skip("no H200")
    row = gpu.find_gpu("h200")
    assert (spec.sms, spec.shared_per_block) == (132, 232448)
    for name in (
        "cc", "sms", "shared_per_sm", "shared_per_block", "shared_reserved_per_block",
        "warps_per_sm", "blocks_per_sm", "registers_per_sm",
    ):  # fmt: skip
        assert getattr(spec, name) == getattr(row, name), name
    assert spec.dram_gb_s == pytest.approx(row.dram_gb_s, rel=0.05)
    assert spec.max_sm_clock_mhz == 1980
