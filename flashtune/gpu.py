"""GPUs: what configs/gpus.toml says of them, and the driver of the card that is present."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from flashtune.config_files import config_dir, read_toml
from flashtune.driver import Card, Load, read_card, system_libraries
from flashtune.errors import FlashtuneError

DEFAULT_TARGET = "rtx-4070-super"
"""The target when no GPU is present and none is named."""

_OLDEST_CC = 80
# Keys of Card.attributes that replace the row's values under the same names.
_OVERRIDDEN = (
    "sms", "l2_bytes", "shared_per_sm", "shared_per_block", "shared_reserved_per_block",
    "blocks_per_sm", "registers_per_sm",
)  # fmt: skip


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
    l1_kb: int  # L1 and shared memory together
    shared_carve_outs_kb: tuple[int, ...]  # what an SM can set aside for shared memory, rising


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
    import difflib

    near = difflib.get_close_matches(wanted, specs, n=3)
    hint = f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(specs)}."
    raise FlashtuneError(f"Unknown GPU '{name}'.", hint)


def present_gpu(index: int = 0, load: Load = system_libraries) -> GpuSpec | None:
    """The card that CUDA calls ``index``, or None when there is no NVIDIA driver or no card.

    CUDA_VISIBLE_DEVICES is respected. Its row of configs/gpus.toml gives what no driver reports
    (tensor rates, boost clock, units); all else is the driver's. Raises FlashtuneError for a card
    older than Ampere or without a table of limits, for an index beyond the last card, and with
    the driver's words when it fails.
    """
    card = read_card(index, load)
    return None if card is None else _present_spec(card)


def target_gpu(name: str, load: Load = system_libraries) -> GpuSpec:
    """The GPU to tune for: "auto" is the card that is present, else DEFAULT_TARGET; else a row.

    A named row that is the card that is present comes with the driver's answers in it. Raises
    FlashtuneError for an unknown name, and whatever present_gpu raises.
    """
    if name.strip().lower() == "auto":
        return present_gpu(load=load) or find_gpu(DEFAULT_TARGET)
    row = find_gpu(name)
    card = read_card(0, load)
    return _present_spec(card) if card and card.name in row.driver_names else row


@lru_cache(maxsize=64)  # asked for several times for every config
def _cc_number(cc: str) -> int:
    major, minor = cc.split(".")
    return int(major) * 10 + int(minor)


def _broken(what: str, allowed: str) -> FlashtuneError:
    return FlashtuneError(f"configs/gpus.toml: {what}.", f"Allowed: {allowed}.")


def _gpu_tables() -> dict[str, Any]:
    return read_toml(config_dir() / "gpus.toml")


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
    return {cc: _limits(row, f'[cc."{cc}"]') for cc, row in rows.items()}


def _limits(row: Any, where: str) -> dict[str, Any]:
    numbers = [f.name for f in fields(Limits) if f.name != "shared_carve_outs_kb"]
    limits: dict[str, Any] = {name: _value(row, name, int, where) for name in numbers}
    carve_outs = _value(row, "shared_carve_outs_kb", list, where)
    return {**limits, "shared_carve_outs_kb": tuple(carve_outs)}


def _present_spec(card: Card) -> GpuSpec:
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


def _spec_without_row(card: Card) -> GpuSpec:
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
