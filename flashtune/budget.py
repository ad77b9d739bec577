"""The budget: what one config needs and what the card has, from the numbers alone.

Nothing here compiles or imports torch or triton. Shared memory is shared.py's answer. Sources:
Triton's own lowering (where warps go), CUDA's occupancy rules, and the articles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashtune.descriptors import has_tma
from flashtune.gpu import GpuSpec
from flashtune.kernels import Kernel, check_axes
from flashtune.kernels.launch import grid
from flashtune.records import KEEP, Compiled, Config, OutClass, Problem, Verdict
from flashtune.registers import Registers, predict_registers, wgmma_registers
from flashtune.shared import Term, shared_bytes
from flashtune.tensor_cores import WARP, Instructions, instructions, is_stacked, repeats

ALWAYS_OUT_ACCUMULATORS = 512  # the article's rule: not even an exhaustive sweep compiles these
GRID_AXIS_1 = 65_535  # the most programs that CUDA launches along it; axis 0 takes 2**31 - 1
HOPELESS_REPEATS = 1.5
HOPELESS_SPILLS = 0.95  # a spill's probability that counts as certain
_LOADING_REGISTERS = 24  # the least that a warp can go down to, and what v9's producer asks for
KNOWN_TRITONS = ((3, 6), (3, 7), (3, 8), (3, 9))


@dataclass(frozen=True)
class Budget:
    """One config's needs against one card's limits. Bytes, registers a thread, blocks an SM."""

    config: Config
    working: Config  # with the warps that compute: those that a kernel adds, not those that load
    block_warps: int  # all of a block's
    shared: int | None  # bytes a block; None: not modelled, the compiler has to be asked
    shared_limit: int
    accumulators: float  # fp32 registers a thread that S and O alone take
    register_cap: int  # registers a thread that the compiler may use
    repeats: float  # tensor work executed / needed, before masking
    warps_stacked: bool  # each warp owns whole rows; False: warps sit side by side along the keys
    instructions: Instructions | None  # None: a compute capability nobody checked
    misfit: str | None  # why the kernel does not do such a thing at all
    lacks_tma: bool  # the kernel loads through descriptors and the card has no TMA
    registers: Registers  # predicted: only the compiler knows
    wgmma_registers: int  # a thread's, that ptxas insists on for the widest wgmma; 0: none
    blocks_by_shared: int | None
    # For the order alone: blocks_by_shared, or of a kernel whose shared memory is not modelled what
    # it would be without specialisation, or as v9's own. No figure to show to anybody.
    order_blocks_by_shared: int | None
    blocks_by_warps: int
    blocks_by_blocks: int
    programs: int  # or query tiles, where ``persistent``
    programs_axis_1: (
        int  # on grid axis 1: heads of all batches, or query tiles where heads are first
    )
    slots_per_block: int  # SMs: blocks resident on the card = this x blocks per SM
    persistent: bool  # programs stay for one query tile after another

    def blocks_per_sm(self, blocks_by_registers: int | None = None) -> int | None:
        """Resident blocks, with the registers' limit where it is known; None: shared unknown."""
        if self.blocks_by_shared is None:
            return None
        limits = [self.blocks_by_shared, self.blocks_by_warps, self.blocks_by_blocks]
        return min(limits if blocks_by_registers is None else [*limits, blocks_by_registers])

    def blocks_by_predicted_registers(self, gpu: GpuSpec) -> int:
        """Blocks an SM by the registers that the compiler will likely use."""
        specialised = self.block_warps != self.working.num_warps
        regs = launched_registers(gpu, self.block_warps, self.config.maxnreg)
        return blocks_by_registers(
            gpu, self.block_warps, regs if specialised else self.registers.expected
        )

    def last_wave_busy(self, blocks_per_sm: int) -> float:
        """The share of the resident slots that the last wave of programs fills."""
        slots = self.slots_per_block * blocks_per_sm
        return (self.programs % slots or slots) / slots

    def waves(self, blocks_per_sm: int | None) -> float | None:
        """Programs over resident slots: 1.14 is one full wave and a tail of 14%."""
        if not blocks_per_sm:
            return None
        return self.programs / (self.slots_per_block * blocks_per_sm)


@dataclass(frozen=True)
class BudgetLine:
    """A budget, its verdict and, where it was asked, the compiler's answer beside them."""

    budget: Budget
    verdict: Verdict
    compiled: Compiled | None
    other_tritons: tuple[tuple[str, int], ...]  # ("3.6", shared bytes) where they differ
    terms: tuple[Term, ...] = ()  # the sum behind the shared bytes

    @property
    def registers_known(self) -> bool:
        """Whether the compiler has said how many registers it uses; else they are predicted."""
        return self.compiled is not None and self.compiled.regs is not None

    @property
    def shared(self) -> int | None:
        """Bytes a block: the compiler's where it was asked, else the modelled ones."""
        known = None if self.compiled is None else self.compiled.shared
        return self.budget.shared if known is None else known

    def blocks_by_shared(self, gpu: GpuSpec) -> int | None:
        """By the compiler's figure where there is one, else by the modelled one."""
        return None if self.shared is None else blocks_by_shared(gpu, self.shared)

    def blocks_by_registers(self, gpu: GpuSpec) -> int:
        """From the compiler's register count where there is one, else from the predicted one."""
        if self.compiled is None or self.compiled.regs is None:
            return self.budget.blocks_by_predicted_registers(gpu)
        warps = self.compiled.warps or self.budget.config.num_warps
        return blocks_by_registers(gpu, warps, self.compiled.regs)

    def blocks_by_warps(self, gpu: GpuSpec) -> int:
        """By the warps that the compiler made of a block where it was asked."""
        if self.compiled is None or self.compiled.warps is None:
            return self.budget.blocks_by_warps
        return gpu.warps_per_sm // self.compiled.warps

    def blocks_per_sm(self, gpu: GpuSpec) -> int | None:
        """From the compiler's figures where there are some, else from the predicted ones."""
        limits = self._limits(gpu)
        if limits["shared memory"] is None:
            return None
        return min(value for value in limits.values() if value is not None)

    def binds(self, gpu: GpuSpec) -> list[str]:
        """Which limits hold the blocks per SM where they are."""
        limits = self._limits(gpu)
        known = {name: value for name, value in limits.items() if value is not None}
        return [name for name, value in known.items() if value == min(known.values())]

    def _limits(self, gpu: GpuSpec) -> dict[str, int | None]:
        return {
            "shared memory": self.blocks_by_shared(gpu),
            "registers": self.blocks_by_registers(gpu),
            "warps": self.blocks_by_warps(gpu),
            "blocks": self.budget.blocks_by_blocks,
        }


def blocks_by_registers(gpu: GpuSpec, num_warps: int, regs: int) -> int:
    """Blocks an SM by registers, for ``regs`` a thread as the compiler reports them.

    Registers are handed to warps in units of 256 from one of four sub-partitions (CUDA's occupancy
    header); this is lower than dividing the SM's 65,536 for 1 and 2 warps.
    """
    unit = gpu.register_unit_per_warp
    per_warp = -(-WARP * max(regs, 1) // unit) * unit
    warps = gpu.sub_partitions * (gpu.registers_per_sm // gpu.sub_partitions // per_warp)
    return warps // num_warps


def blocks_by_shared(gpu: GpuSpec, shared: int) -> int:
    """Blocks an SM by shared memory: what each asks for, rounded up, and the driver's own part.

    0 where one block asks for more than a block may have.
    """
    if shared > gpu.shared_per_block:
        return 0
    rounded = -(-shared // gpu.shared_unit) * gpu.shared_unit
    return gpu.shared_per_sm // (rounded + gpu.shared_reserved_per_block)


def carve_out_kb(gpu: GpuSpec, shared: int, blocks: int) -> int:
    """KB of an SM that go to shared memory for ``blocks`` resident blocks of ``shared`` bytes each:
    the smallest setting there is that holds them. The rest is L1."""
    rounded = -(-shared // gpu.shared_unit) * gpu.shared_unit
    needed = blocks * (rounded + gpu.shared_reserved_per_block)
    return next(kb for kb in gpu.shared_carve_outs_kb if kb * 1024 >= needed)


def register_cap(gpu: GpuSpec, num_warps: int, maxnreg: int | None = None) -> int:
    """Registers a thread that ptxas may use for a block to fit: 255 up to 8 warps, 128 at 16; or
    ``maxnreg`` where that is less."""
    fits = min(gpu.registers_per_thread, gpu.registers_per_sm // (WARP * num_warps))
    return fits if maxnreg is None else min(fits, maxnreg)


def launched_registers(gpu: GpuSpec, block_warps: int, maxnreg: int | None) -> int:
    """Registers a thread that a block with warps of different jobs is launched with, before they
    deal them out: as many as it can have in units of 8, or ``maxnreg``."""
    return maxnreg or gpu.registers_per_sm // (WARP * block_warps) // 8 * 8


def _computing_cap(gpu: GpuSpec, computing: int, block_warps: int, maxnreg: int | None) -> int:
    """Registers a thread that the computing warps may have once the loading ones keep 24."""
    pool = launched_registers(gpu, block_warps, maxnreg) * block_warps
    left = (pool - _LOADING_REGISTERS * (block_warps - computing)) // computing // 8 * 8
    return max(8, min(gpu.registers_per_thread, left))


def _cap(config: Config, gpu: GpuSpec, kernel: Kernel, computing: int, block_warps: int) -> int:
    """Registers a thread that the warps which compute may use."""
    if block_warps != computing:
        return _computing_cap(gpu, computing, block_warps, config.maxnreg)
    # Triton may have given warps other jobs all the same: then maxnreg is the mean.
    maxnreg = None if kernel.may_specialise(config) else config.maxnreg
    return register_cap(gpu, config.num_warps, maxnreg)


def assess(
    problem: Problem,
    config: Config,
    gpu: GpuSpec,
    kernel: Kernel,
    triton: tuple[int, int],
) -> Budget:
    """The budget of one config. ``triton`` is the version that will compile it, as (3, 6).

    Raises FlashtuneError where the config has an axis that the kernel lacks.
    """
    check_axes(kernel, (config,))
    shared = shared_bytes(problem, config, gpu, kernel, triton)
    likely = shared
    if not kernel.shared_modelled:
        plain = replace(kernel, shared_modelled=True)
        likely = shared_bytes(problem, config, gpu, plain, triton)
    computing, block_warps = kernel.warps(config, gpu.cc_number)
    working = replace(config, num_warps=computing)
    kind = instructions(gpu, working)
    scores = config.q_tile * config.k_tile
    outputs = config.q_tile * problem.padded_D
    cap = _cap(config, gpu, kernel, computing, block_warps)
    wgmma = kind is Instructions.WGMMA
    axis_0, axis_1 = grid(kernel, problem.B, problem.H, problem.N, config.q_tile)
    return Budget(
        config=config,
        working=working,
        block_warps=block_warps,
        shared=shared,
        shared_limit=gpu.shared_per_block,
        accumulators=(scores + outputs) / (WARP * computing),
        register_cap=cap,
        repeats=sum(repeats(problem, working, kind)) / 2,
        warps_stacked=is_stacked(problem, working, kind),
        instructions=kind,
        misfit=kernel.misfit(problem, config, gpu.cc_number),
        lacks_tma=kernel.loads == "descriptor" and not has_tma(gpu),
        registers=predict_registers(problem, working, kernel, kind, cap),
        wgmma_registers=wgmma_registers(problem, working) if wgmma else 0,
        blocks_by_shared=None if shared is None else blocks_by_shared(gpu, shared),
        order_blocks_by_shared=None if likely is None else blocks_by_shared(gpu, likely),
        blocks_by_warps=gpu.warps_per_sm // block_warps,
        # A persistent kernel starts as many programs as there are SMs.
        blocks_by_blocks=1 if kernel.persistent else gpu.blocks_per_sm,
        programs=axis_0 * axis_1,
        programs_axis_1=axis_1,
        slots_per_block=gpu.sms,
        persistent=kernel.persistent,
    )


def other_tritons(
    problem: Problem, config: Config, gpu: GpuSpec, kernel: Kernel, triton: tuple[int, int]
) -> tuple[tuple[str, int], ...]:
    """(version, shared bytes) of each known Triton that lays this config out differently."""
    own = shared_bytes(problem, config, gpu, kernel, triton)
    others = [(v, shared_bytes(problem, config, gpu, kernel, v)) for v in KNOWN_TRITONS]
    return tuple(
        (f"{v[0]}.{v[1]}", there) for v, there in others if there is not None and there != own
    )


def verdict(budget: Budget, gpu: GpuSpec, *, exhaustive: bool = False) -> Verdict:
    """Keep the config or leave it out, with the rule and its numbers.

    ``exhaustive`` keeps what is only hopeless, but for the article's accumulator rule, so that a
    recorded exhaustive sweep can judge the rules.
    """
    accumulators, cap = budget.accumulators, budget.register_cap
    if budget.misfit is not None:
        return Verdict(OutClass.CANNOT, "kernel", budget.misfit)
    if budget.lacks_tma:
        return Verdict(
            OutClass.CANNOT,
            "no_tma",
            f"{gpu.title} has no TMA, which came with compute capability 9.0: Triton would turn the"
            " descriptors into pointers, which are v6_heads_first's",
        )
    if accumulators > ALWAYS_OUT_ACCUMULATORS:
        return Verdict(
            OutClass.HOPELESS,
            "accumulators_512",
            f"S and O alone take {accumulators:g} registers a thread, over"
            f" {ALWAYS_OUT_ACCUMULATORS}: it would spill nearly everything",
        )
    if budget.shared is not None and budget.shared > budget.shared_limit:
        return Verdict(
            OutClass.CANNOT,
            "shared",
            _too_much_shared(budget.shared, gpu),
        )
    if budget.programs_axis_1 > GRID_AXIS_1:
        return Verdict(
            OutClass.CANNOT,
            "grid",
            f"{budget.programs_axis_1:,} programs on grid axis 1, CUDA launches at most"
            f" {GRID_AXIS_1:,}: B * H must be smaller where the kernel has heads there, q_tile"
            " larger where it has query tiles",
        )
    # ptxas checks that one against what the block is launched with, whoever gets more later.
    maxnreg = budget.config.maxnreg or cap
    if budget.wgmma_registers > min(cap, maxnreg):
        allowed = _cap_text(budget) if cap <= maxnreg else f"maxnreg is {maxnreg}"
        return Verdict(
            OutClass.CANNOT,
            "wgmma_registers",
            f"its widest wgmma takes {budget.wgmma_registers} registers a thread, {allowed}: ptxas"
            " refuses it (C7602)",
        )
    return KEEP if exhaustive else _hopeless(budget, gpu, accumulators, cap)


def compiled_verdict(predicted: Verdict, compiled: Compiled | None, gpu: GpuSpec) -> Verdict:
    """The verdict once the compiler has been asked: what takes too much shared memory cannot."""
    shared = None if compiled is None else compiled.shared
    if not predicted.kept or shared is None or shared <= gpu.shared_per_block:
        return predicted
    return Verdict(OutClass.CANNOT, "shared", _too_much_shared(shared, gpu))


def _too_much_shared(shared: int, gpu: GpuSpec) -> str:
    return (
        f"needs {shared:,} bytes of shared memory a block, {gpu.title} allows"
        f" {gpu.shared_per_block:,}"
    )


def _cap_text(budget: Budget) -> str:
    """What sets the register cap, and where it is."""
    warps, maxnreg = budget.working.num_warps, budget.config.maxnreg
    by = f" and maxnreg={maxnreg}" if maxnreg == budget.register_cap else ""
    return f"the cap with {warps} warps{by} is {budget.register_cap}"


def _hopeless(budget: Budget, gpu: GpuSpec, accumulators: float, cap: int) -> Verdict:
    config = budget.working
    if accumulators > cap:
        return Verdict(
            OutClass.HOPELESS,
            "accumulators",
            f"S and O alone take {accumulators:g} registers a thread, {_cap_text(budget)}: it"
            " always spills",
        )
    if gpu.cc_number == 90 and budget.instructions is not Instructions.WGMMA:
        return Verdict(
            OutClass.HOPELESS,
            "no_wgmma",
            f"{config.q_tile} rows and {config.num_warps} warps: Hopper's wgmma needs rows in"
            " multiples of 64 and warps in multiples of 4, and without it the tensor cores run at"
            " about half speed",
        )
    if budget.repeats >= HOPELESS_REPEATS:
        return Verdict(
            OutClass.HOPELESS,
            "repeated_work",
            f"{config.num_warps} warps on {config.q_tile} rows run {budget.repeats:g} times the"
            " tensor work that is needed",
        )
    if budget.registers.spill_probability >= HOPELESS_SPILLS:
        return Verdict(
            OutClass.HOPELESS,
            "spills",
            f"it would like {budget.registers.wanted:.0f} registers a thread, {_cap_text(budget)}:"
            f" spilling is predicted with {budget.registers.spill_probability:.1%}",
        )
    return KEEP
