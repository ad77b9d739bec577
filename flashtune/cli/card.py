"""One config's budget explained line by line. Plain text: loading rich would take half the time."""

from __future__ import annotations

from flashtune.budget import Budget, BudgetLine, carve_out_kb
from flashtune.cost import Cost
from flashtune.explain import Explanation, Neighbour
from flashtune.gpu import GpuSpec
from flashtune.records import Config
from flashtune.registers import Registers
from flashtune.shared import Term
from flashtune.tensor_cores import Instructions

_NAME_WIDTH = 15
_LIKELY, _UNLIKELY = 0.8, 0.2  # a spill's probability, in words
_UNITS = {
    "tensor": "tensor cores", "special": "exp2", "arithmetic": "fp32", "shared": "shared memory",
    "l2": "L2", "dram": "DRAM",
}  # fmt: skip
_INSTRUCTIONS = {
    Instructions.MMA: "mma.sync",
    Instructions.WGMMA: "wgmma, which reads K and V in shared memory",
    Instructions.TCGEN05: "tcgen05, which reads K and V in shared memory",
    None: "tensor instructions unknown for this compute capability",
}


def card(explained: Explanation, gpu: GpuSpec) -> str:
    """The lines of one config, each "name  text", in the order in which they decide."""
    line, cost = explained.line, explained.cost
    rows = [
        *_budget_rows(line),
        *_occupancy_rows(line, gpu),
        *_compiled_rows(line),
        *([] if cost is None else _predicted_rows(cost)),
        ("verdict", verdict_word(line) + ("" if line.verdict.kept else f": {line.verdict.reason}")),
    ]
    if explained.nearest is not None:
        nearest = explained.nearest
        rows.append(("nearest to run", _neighbour_text(nearest, line.budget, None, gpu)))
        rows.append(("", f"from here: {nearest.change}"))
    else:
        rows += [(n.change, _neighbour_text(n, line.budget, cost, gpu)) for n in explained.beside]
    return "\n".join(f"  {name:<{_NAME_WIDTH}} {text}" for name, text in rows)


def verdict_word(line: BudgetLine) -> str:
    """worth trying, ask the compiler, or the class that leaves it out."""
    if line.verdict.out is None:
        return "worth trying" if line.shared is not None else "ask the compiler"
    return str(line.verdict.out)


def shared_text(value: int | None) -> str:
    """Shared bytes, or that the budget has no model of them."""
    return "not modelled" if value is None else f"{value:,} bytes"


def _shared_row(budget: Budget) -> str:
    if budget.shared is None:
        return (
            "not modelled: only the compiler can say (--compile asks it) whether it is within the"
            f" {budget.shared_limit:,} bytes a block"
        )
    return f"{budget.shared:,} of {budget.shared_limit:,} bytes a block"


def _config_text(config: Config) -> str:
    text = (f"{config.q_tile} query rows x {config.k_tile} keys, {config.num_warps} warps,"
            f" {config.num_stages} stages")  # fmt: skip
    if config.maxnreg is not None:
        text += f", at most {config.maxnreg} registers a thread"
    if config.warp_specialize is not None:
        text += f", warp specialisation {'on' if config.warp_specialize else 'off'}"
    return text


def _budget_rows(line: BudgetLine) -> list[tuple[str, str]]:
    budget = line.budget
    warps = (
        "stacked: each owns whole rows"
        if budget.warps_stacked
        else "side by side along the keys: rows are split between warps"
    )
    return [
        ("config", _config_text(budget.config)),
        ("shared memory", _shared_row(budget)),
        *(("", _term_text(term)) for term in line.terms),
        *(("", f"under Triton {v}: {there:,} bytes") for v, there in line.other_tritons),
        ("accumulators", f"{budget.accumulators:g} fp32 registers a thread for S and O,"
                         f" cap {budget.register_cap}"),
        ("registers", registers_text(budget.registers)),
        ("warps", f"{warps}; {_INSTRUCTIONS[budget.instructions]}"),
        ("tensor work", f"{budget.repeats:g} times what is needed"),
    ]  # fmt: skip


def registers_text(registers: Registers) -> str:
    """The predicted range and the likelihood of spills."""
    p = registers.spill_probability
    word = "likely" if p >= _LIKELY else "unlikely" if p <= _UNLIKELY else "possible"
    span = (
        f"{registers.low} to {registers.high}"
        if registers.low < registers.high
        else f"{registers.high}"
    )
    return f"{span} a thread, predicted; spills {word} ({p:.0%})"


def _occupancy_rows(line: BudgetLine, gpu: GpuSpec) -> list[tuple[str, str]]:
    budget = line.budget
    blocks = line.blocks_per_sm(gpu)
    by_registers = line.blocks_by_registers(gpu)
    predicted = "" if line.registers_known else " predicted"
    waves = budget.waves(blocks)
    rows = [("blocks per SM", f"{_text(blocks)}, held by {' and '.join(line.binds(gpu))}"
             f" (shared memory {_text(line.blocks_by_shared(gpu))}, registers"
             f" {by_registers}{predicted}, warps {line.blocks_by_warps(gpu)},"
             f" blocks {budget.blocks_by_blocks})")]  # fmt: skip
    if blocks and line.shared is not None:
        kb = carve_out_kb(gpu, line.shared, blocks)
        rows.append(("", f"they need {kb} KB of an SM as shared memory, which leaves"
                     f" {gpu.l1_kb - kb} KB of L1"))  # fmt: skip
    if waves is not None and blocks is not None and budget.persistent:
        staying = min(budget.programs, budget.slots_per_block)
        stay = f"{staying:,} programs stay for one after another, {max(waves, 1.0):.2f} each"
        busy = f"in the last round {budget.last_wave_busy(1):.0%} of the SMs have one"
        rows.append(("query tiles", f"{budget.programs:,}: {stay}; {busy}"))
    elif waves is not None and blocks is not None:
        programs = f"{budget.programs:,} programs on {budget.slots_per_block} SMs"
        busy = f"the last wave fills {budget.last_wave_busy(blocks):.0%} of its places"
        rows.append(("waves", f"{waves:.2f}: {programs}; {busy}"))
    return rows


def _compiled_rows(line: BudgetLine) -> list[tuple[str, str]]:
    compiled = line.compiled
    if compiled is None:
        return []
    if compiled.failure is not None:
        return [("compiled", f"{compiled.failure}: {compiled.reason}")]
    return [("compiled", f"{compiled.shared:,} bytes shared, {compiled.regs} registers,"
             f" {compiled.spills} spilled")]  # fmt: skip


def _predicted_rows(cost: Cost) -> list[tuple[str, str]]:
    parts = cost.parts
    units = sorted(parts.units.items(), key=lambda item: -item[1])
    busy = ", ".join(f"{_UNITS[name]} {ms:.3g}" for name, ms in units)
    rest = (f"launch {parts.launch:.3g}, starts and ends {parts.start:.3g}, waiting"
            f" {parts.waiting:.3g}, SMs less than full {parts.tail:.3g}")  # fmt: skip
    return [
        ("predicted", f"{cost.predicted_ms:.4g} ms, by a model: not measured"),
        ("", f"units, busy at the same time (ms): {busy}"),
        ("", f"what is added to the busiest (ms): {rest}"),
    ]


def _neighbour_text(there: Neighbour, here: Budget, cost: Cost | None, gpu: GpuSpec) -> str:
    """What changes on the way from ``here``; ``cost`` is its own, None where it cannot run."""
    budget = there.budget
    said = []
    if budget.shared != here.shared:
        change = ""
        if budget.shared is not None and here.shared is not None:
            change = f" ({budget.shared - here.shared:+,})"
        said.append(f"shared {shared_text(budget.shared)}{change}")
    if there.cost is not None:
        if budget.repeats != here.repeats:
            said.append(f"tensor work x{budget.repeats / here.repeats:g}")
        blocks, before = (
            b.blocks_per_sm(b.blocks_by_predicted_registers(gpu)) for b in (budget, here)
        )
        if blocks != before or cost is None:
            instead = "" if cost is None else f" for {_text(before)}"
            said.append(f"blocks per SM {_text(blocks)}{instead}")
        ms = there.cost.predicted_ms
        slower = "" if cost is None else f" ({ms / cost.predicted_ms - 1:+.1%})"
        said.append(f"predicted {ms:.4g} ms{slower}")
    if not there.verdict.kept:
        said.append(f"{there.verdict.out}, {there.verdict.reason}")
    return f"{budget.config}: " + "; ".join(said)


def _term_text(term: Term) -> str:
    shares = "" if term.counted else " (in space that is free by then)"
    return f"{term.bytes:>9,} {term.name}: {term.why}{shares}"


def _text(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
