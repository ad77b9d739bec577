"""The ladder's kernels: an explicit table. Reading the table imports neither torch nor triton."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

from flashtune.errors import FlashtuneError
from flashtune.ladder import LADDER, Fixed, Step
from flashtune.records import FURTHER_AXES, Config, Problem

_HERE = Path(__file__).parent
_GROUP_WARPS = 4  # of a warpgroup
_HOPPER_CC = 90


class Takes(NamedTuple):
    """All that a kernel can do which is written for one card's instructions."""

    cc: int  # 90 for 9.0
    dtypes: tuple[str, ...]
    num_warps: int
    q_tiles: tuple[int, ...]


@dataclass(frozen=True)
class Kernel:
    """What the budget and the launcher must know of a kernel without importing it."""

    name: str
    path: Path  # the file that defines ``flash_fwd_kernel``
    summary: str
    heads_first: bool  # grid = (B * H, query tiles) instead of (query tiles, B * H)
    key_loops: int  # 1: one loop masks every tile; 2: an unmasked and a masked loop
    skips_causal_tiles: bool  # tiles above the diagonal are never visited
    loads: Literal["pointer", "descriptor"] = "pointer"  # Q, K and V; descriptors are TMA's
    axes: tuple[str, ...] = ()  # a config's further axes that are parameters of this kernel
    shared_modelled: bool = True  # False: only the compiler knows how much shared memory it takes

    warpgroups: int = 0  # that multiply, beside warps that only load; 0: no warp has a job alone
    rows_a_warpgroup: int | None = None  # of Q; None: all compute, those of 64 rows twice the same
    takes: Takes | None = None  # None: what the budget allows
    gluon: bool = False  # written in Gluon, for which Triton has no interpreter
    built_on: tuple[str, ...] = ()  # other kernels' files, whose functions it calls
    persistent: bool = False  # a program stays for one query tile after another
    unreliable: bool = False  # some Triton miscompiles it silently: never launched unchecked
    specialises: bool = True  # where its axis warp_specialize is left open

    def may_specialise(self, config: Config) -> bool:
        """Whether warps of the config's blocks may have jobs of their own, loading or multiplying,
        and deal out the block's registers among themselves."""
        asked = config.warp_specialize
        return self.warpgroups > 0 and (self.specialises if asked is None else asked)

    def warps(self, config: Config, cc: int) -> tuple[int, int]:
        """Warps of a block that compute, and all of them, as far as is known: other cards' warps
        are not looked into, nor is a loop of one stage, which Triton 3.9 does not split."""
        warps = config.num_warps
        if not self.may_specialise(config) or warps != _GROUP_WARPS:
            return warps, warps
        groups = self.warpgroups if cc == _HOPPER_CC else 1
        if self.rows_a_warpgroup is not None:
            groups = max(1, min(groups, config.q_tile // self.rows_a_warpgroup))
        return _GROUP_WARPS * groups, _GROUP_WARPS * (groups + 1)

    def misfit(self, problem: Problem, config: Config, cc: int) -> str | None:
        """Why the kernel does not do that at all; None where it may."""
        takes = self.takes
        if takes is None:
            return None
        rows = ", ".join(map(str, takes.q_tiles))
        if cc != takes.cc:
            return f"{self.name} is written for compute capability {takes.cc / 10:.1f} alone"
        if problem.dtype not in takes.dtypes:
            return f"{self.name} takes {' and '.join(takes.dtypes)} alone"
        if config.num_warps != takes.num_warps:
            return f"{self.name} takes {takes.num_warps} warps and adds to them what it needs"
        if config.q_tile not in takes.q_tiles:
            return f"{self.name} takes query tiles of {rows} rows"
        return None


_HOPPER = Takes(_HOPPER_CC, ("bf16", "fp16"), _GROUP_WARPS, (64, 128, 256))

KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            "v0_baseline",
            _HERE / "v0_baseline.py",
            "every key tile, a mask on each, exp",
            heads_first=False,
            key_loops=1,
            skips_causal_tiles=False,
        ),
        Kernel(
            "v3_causal_skip",
            _HERE / "v3_causal_skip.py",
            "causal tile-skipping, a mask on the diagonal tiles only, exp",
            heads_first=False,
            key_loops=2,
            skips_causal_tiles=True,
        ),
        Kernel(
            "v4_exp2",
            _HERE / "v4_exp2.py",
            "causal tile-skipping, exp2",
            heads_first=False,
            key_loops=2,
            skips_causal_tiles=True,
        ),
        Kernel(
            "v6_heads_first",
            _HERE / "v6_heads_first.py",
            "causal tile-skipping, exp2, heads on grid axis 0",
            heads_first=True,
            key_loops=2,
            skips_causal_tiles=True,
        ),
        Kernel(
            "v7_descriptor",
            _HERE / "v7_descriptor.py",
            "v6 with Q, K and V through tensor descriptors (TMA; compute capability 9.0 and up)",
            heads_first=True,
            key_loops=2,
            skips_causal_tiles=True,
            loads="descriptor",
        ),
        Kernel(
            "v8_warp_specialised",
            _HERE / "v8_warp_specialised.py",
            "v7 in one loop that Triton splits between loading and computing warps (Hopper)",
            heads_first=True,
            key_loops=1,
            skips_causal_tiles=True,
            loads="descriptor",
            axes=("warp_specialize",),
            shared_modelled=False,
            unreliable=True,
            warpgroups=2,
            takes=_HOPPER,
        ),
        Kernel(
            "v9_ping_pong",
            _HERE / "v9_ping_pong.py",
            "a producer warp, and warpgroups that take turns on the tensor cores (Hopper)",
            heads_first=True,
            key_loops=2,
            skips_causal_tiles=True,
            loads="descriptor",
            warpgroups=4,
            rows_a_warpgroup=64,
            takes=_HOPPER,
            gluon=True,
        ),
        Kernel(
            "v10_persistent",
            _HERE / "v10_persistent.py",
            "v9 with programs that stay for one query tile after another (Hopper)",
            heads_first=True,
            key_loops=2,
            skips_causal_tiles=True,
            loads="descriptor",
            warpgroups=4,
            rows_a_warpgroup=64,
            takes=_HOPPER._replace(q_tiles=(128, 256)),
            gluon=True,
            built_on=("v9_ping_pong.py",),
            persistent=True,
        ),
    )
}

DEFAULT_KERNEL = "v6_heads_first"


def find_kernel(name: str) -> Kernel:
    """The kernel called ``name``, or the one in the user's file ``name`` (ends in .py).

    A user's file defines ``flash_fwd_kernel`` with the ladder's parameters and says which kernel of
    the ladder it was made from (``BASED_ON = "v6_heads_first"``): its grid and its buffers are
    taken to be that one's. With a parameter WARP_SPECIALIZE it has that axis, and its buffers are
    the compiler's to say; so are those of a file in Gluon, whose source allocates them. Raises
    FlashtuneError for an unknown name, a step of the ladder that is another's body with other
    configs, or a file that lacks either.
    """
    if name in KERNELS:
        return KERNELS[name]
    if name in LADDER:
        raise _no_body_of_its_own(LADDER[name])
    if name.endswith(".py"):
        return _kernel_from_file(Path(name))
    import difflib

    near = difflib.get_close_matches(name, KERNELS, n=3, cutoff=0.4) or list(KERNELS)
    raise FlashtuneError(
        f"--kernel {name!r}: no kernel of that name",
        f"Did you mean {' or '.join(near)}? A file of your own works by its path (FILE.py).",
    )


def check_axes(kernel: Kernel, configs: Iterable[Config]) -> None:
    """Raises FlashtuneError for a config with an axis that the kernel does not have. maxnreg is the
    launch's, and so every kernel's."""
    for config in configs:
        for axis in config.further:
            if axis != "maxnreg" and axis not in kernel.axes:
                having = [other.name for other in KERNELS.values() if axis in other.axes]
                raise FlashtuneError(
                    f"config {config}: {kernel.name} has no axis {axis}",
                    (f"Kernels with it: {', '.join(having)}. " if having else "")
                    + f"With {kernel.name}, leave {axis} out.",
                )


def _no_body_of_its_own(step: Step) -> FlashtuneError:
    choice = step.choice
    config = f"fixed at {choice.config}" if isinstance(choice, Fixed) else "tuned"
    return FlashtuneError(
        f"--kernel {step.name}: has no kernel of its own: it is {step.body}'s with its config"
        f" {config}",
        f"Use --kernel {step.body}.",
    )


def _kernel_from_file(path: Path) -> Kernel:
    import ast

    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FlashtuneError(
            f"--kernel {path}: cannot be read ({error.strerror})", "Check the path."
        ) from error
    except (SyntaxError, UnicodeDecodeError) as error:
        raise FlashtuneError(
            f"--kernel {path}: is not Python ({error})", "Fix the file and run again."
        ) from error
    based_on = None
    parameters: dict[str, ast.expr | None] | None = None  # with their defaults
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "flash_fwd_kernel":
            last = node.args.args[len(node.args.args) - len(node.args.defaults) :]
            parameters = dict.fromkeys(each.arg for each in node.args.args)
            parameters |= {a.arg: d for a, d in zip(last, node.args.defaults, strict=True)}
            defaults = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            parameters |= {a.arg: d for a, d in defaults}
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            based_on = node.value.value if "BASED_ON" in names else based_on
    if parameters is None:
        raise FlashtuneError(
            f"--kernel {path}: defines no function flash_fwd_kernel",
            f"Start from a copy of {KERNELS[DEFAULT_KERNEL].path}.",
        )
    if not isinstance(based_on, str) or based_on not in KERNELS:
        raise FlashtuneError(
            f"--kernel {path}: BASED_ON is {based_on!r}, not a kernel of the ladder",
            f"Add a line BASED_ON = one of {', '.join(map(repr, KERNELS))}.",
        )
    base = KERNELS[based_on]
    axes = tuple(axis for axis in FURTHER_AXES if axis.upper() in parameters)
    left_open = parameters.get("WARP_SPECIALIZE")
    return replace(
        base,
        name=path.stem,
        path=path.resolve(),
        summary=f"{path}, made from {base.name}",
        axes=axes,
        shared_modelled=base.shared_modelled and not axes and not base.gluon,
        warpgroups=max(base.warpgroups, 2 if "warp_specialize" in axes else 0),
        specialises=not (isinstance(left_open, ast.Constant) and left_open.value is False),
    )


def kernel_hash(kernel: Kernel) -> str:
    """A hash of the kernel's source, and of what it shares with others of the ladder."""
    import hashlib

    shared = ["tiles.py", "launch.py", *(["tma.py"] if kernel.loads == "descriptor" else [])]
    shared += kernel.built_on
    digest = hashlib.sha256()
    for path in (kernel.path, *(_HERE / name for name in shared)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def load_kernel(kernel: Kernel) -> ModuleType:
    """Import the kernel's module (this imports triton); ``.flash_fwd_kernel`` is the JIT function.

    Raises FlashtuneError when the module itself fails to import.
    """
    import importlib.util

    if kernel.loads == "descriptor":
        _give_descriptors_memory()
    if kernel.path.parent == _HERE:
        return importlib.import_module(f"flashtune.kernels.{kernel.name}")
    spec = importlib.util.spec_from_file_location(f"flashtune_user_{kernel.name}", kernel.path)
    assert spec is not None and spec.loader is not None  # the path ends in .py
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's module raises
        raise FlashtuneError(
            f"--kernel {kernel.path}: importing it failed: {type(error).__name__}: {error}",
            "Fix the file and run again.",
        ) from error
    return module


def _give_descriptors_memory() -> None:
    """A launch whose programs make descriptors needs scratch memory for them (128 bytes each), and
    Triton asks its user for it. Compiling does not, so that torch is only loaded by a launch."""
    import triton

    def allocate(size: int, alignment: int, stream: int | None) -> object:
        import torch

        return torch.empty(size, dtype=torch.int8, device="cuda")

    triton.set_allocator(allocate)
