"""The further axes of a config, maxnreg and warp_specialize: who has them and what follows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import CommandLine
from conftest import ROOT

from flashtune import choose
from flashtune.audit_budget import Case, audit
from flashtune.budget import assess, compiled_verdict, register_cap, verdict
from flashtune.compiler import CompileJob
from flashtune.cost import order
from flashtune.entries import entries
from flashtune.errors import FlashtuneError
from flashtune.explain import Explainer
from flashtune.fan_out import compile_all
from flashtune.gpu import find_gpu
from flashtune.kernels import KERNELS, Kernel, check_axes, find_kernel
from flashtune.kernels.launch import config_arguments
from flashtune.ladder import LADDER
from flashtune.records import Compiled, OutClass, Problem, Verdict
from flashtune.shared import buffers, terms
from flashtune.shortlist import recommend_for
from flashtune.space import load_space, parse_config
from flashtune.store import find, read
from flashtune.tuned import tuned_list

PROBLEM = Problem(4, 8, 8, 4096, 4096, 64, False, "bf16")
V6, V7 = KERNELS["v6_heads_first"], KERNELS["v7_descriptor"]
V8, V9 = KERNELS["v8_warp_specialised"], KERNELS["v9_ping_pong"]
H200 = find_gpu("h200")
TRITON = (3, 9)


@pytest.fixture
def own(tmp_path: Path) -> Kernel:
    """A user's file with the axis: v8's body, which as a file made from v7 is for any card."""
    return from_file(tmp_path, V8, "v7_descriptor")


def from_file(folder: Path, source: Kernel, based_on: str) -> Kernel:
    path = folder / "mine.py"
    path.write_text(f'{source.path.read_text()}\nBASED_ON = "{based_on}"\n')
    return find_kernel(str(path))


@pytest.fixture
def cli(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    return CommandLine.at(tmp_path, tmp_path_factory)


# The launch, and which kernels have which axis ----------------------------------------------------


def test_a_launch_passes_only_the_axes_that_are_set() -> None:
    plain = config_arguments(parse_config("64x32x4x3"))
    assert set(plain) == {
        "Q_TILE_SIZE", "K_TILE_SIZE", "num_warps", "num_stages", "enable_fp_fusion",
    }  # fmt: skip
    both = config_arguments(parse_config("64x32x4x3:maxnreg=168,warp_specialize=off"))
    assert both == {**plain, "maxnreg": 168, "WARP_SPECIALIZE": False}


def test_a_file_s_parameters_say_which_axes_it_has(own: Kernel, tmp_path: Path) -> None:
    assert own.axes == V8.axes == ("warp_specialize",) and not own.shared_modelled
    assert (own.loads, own.takes, own.warpgroups) == ("descriptor", None, 2)
    plain = from_file(tmp_path, V6, "v6_heads_first")
    assert (plain.axes, plain.shared_modelled, plain.warpgroups) == ((), True, 0)


@pytest.mark.parametrize(("default", "warps"), [("", 12), (" = True", 12), (" = False", 4)])
def test_an_open_axis_is_the_file_s_own_default(tmp_path: Path, default: str, warps: int) -> None:
    parameter = "WARP_SPECIALIZE: tl.constexpr"
    source = V8.path.read_text().replace(f"{parameter} = True", f"{parameter}{default}")
    path = tmp_path / "mine.py"
    path.write_text(f'{source}\nBASED_ON = "v7_descriptor"\n')
    kernel = find_kernel(str(path))
    assert kernel.warps(parse_config("128x64x4x2"), 90)[1] == warps
    assert kernel.warps(parse_config("128x64x4x2:warp_specialize=on"), 90)[1] == 12
    assert kernel.warps(parse_config("128x64x4x2:warp_specialize=off"), 90)[1] == 4


@pytest.mark.parametrize("base", list(KERNELS.values()), ids=lambda kernel: kernel.name)
def test_a_copy_is_taken_for_what_it_was_made_from(base: Kernel, tmp_path: Path) -> None:
    copy = from_file(tmp_path, base, base.name)
    taken = replace(base, name="mine", path=tmp_path / "mine.py", summary=copy.summary)
    # But for the buffers of a Gluon kernel, which its source allocates itself.
    assert copy == replace(taken, shared_modelled=base.shared_modelled and not base.gluon)


def test_an_axis_that_the_kernel_lacks_is_refused_by_name(own: Kernel) -> None:
    config = parse_config("64x64x4x2:warp_specialize=off")
    for ask in (
        lambda: check_axes(V6, [config]),
        lambda: assess(PROBLEM, config, H200, V6, TRITON),
    ):
        with pytest.raises(FlashtuneError) as caught:
            ask()
        assert (
            caught.value.message == f"config {config}: v6_heads_first has no axis warp_specialize"
        )
        assert "leave warp_specialize out" in caught.value.hint
        assert "Kernels with it: v8_warp_specialised. " in caught.value.hint
    check_axes(own, [config])
    check_axes(V8, [config])
    check_axes(V6, [parse_config("64x64x4x2:maxnreg=64")])


@pytest.mark.parametrize("command", ["budget", "sweep", "sweep --dry-run"])
def test_commands_refuse_it_before_anything_compiles(command: str, cli: CommandLine) -> None:
    (cli.folder / "mine.toml").write_text('configs = ["64x64x4x2:warp_specialize=on"]')
    name, *flags = command.split()
    what = ["64x64x4x2:warp_specialize=on"] if name == "budget" else ["--space", "mine.toml"]
    before = cli.compiled()
    done = cli.run(name, *what, "--gpu", "h200", *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert "v6_heads_first has no axis warp_specialize" in done.stderr
    assert cli.compiled() == before and not (cli.folder / "sweeps").exists()


def test_another_kernel_s_list_is_taken_without_its_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are about that kernel's code, and may not even exist in this one."""
    listed = tuned_list("h200", "v6_heads_first", "bf16", 64)
    assert listed is not None
    own = tuple(replace(c, maxnreg=128, warp_specialize=True) for c in listed.configs)
    foreign = replace(listed, kernel="another", configs=own, winners=())
    monkeypatch.setattr(choose, "nearest_list", lambda *_: foreign)
    chosen = choose.choose(LADDER["v6_heads_first"], PROBLEM, H200, TRITON)
    assert set(chosen.configs) <= {config.plain for config in own}
    capped = replace(listed, configs=tuple(replace(c, maxnreg=248) for c in own), winners=())
    monkeypatch.setattr(choose, "nearest_list", lambda *_: capped)
    with pytest.raises(FlashtuneError, match="has no axis warp_specialize"):
        choose.choose(LADDER["v6_heads_first"], PROBLEM, H200, TRITON)


def test_a_bench_does_not_launch_a_recorded_axis_that_the_file_has_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recommendation = recommend_for([read(find(ROOT / "sweeps")[-1])])
    winners = tuple(
        (p, replace(c, warp_specialize=True), ms) for p, c, ms in recommendation.winners
    )
    recorded = replace(recommendation, winners=winners)
    monkeypatch.setattr("flashtune.entries._recommended", lambda path: recorded)
    (entry,) = entries(["v6_heads_first"], winners[0][0], H200, Path("sweeps"), TRITON)
    assert entry.configs == ()
    assert "v6_heads_first has no axis warp_specialize" in entry.source


# maxnreg in the budget ----------------------------------------------------------------------------


def test_the_register_cap_is_the_smaller_of_the_two() -> None:
    assert register_cap(H200, 8) == register_cap(H200, 8, 255) == 255
    assert register_cap(H200, 8, 168) == 168
    assert register_cap(H200, 16, 168) == 128


def test_registers_spills_and_blocks_follow_the_cap_and_shared_memory_does_not() -> None:
    plain, capped = (
        assess(PROBLEM, parse_config(text), H200, V6, TRITON)
        for text in ("64x64x4x2", "64x64x4x2:maxnreg=80")
    )
    assert (capped.shared, capped.blocks_by_shared) == (plain.shared, plain.blocks_by_shared)
    assert (plain.register_cap, capped.register_cap) == (255, 80)
    assert plain.registers.expected > 80 == capped.registers.expected == capped.registers.high
    assert capped.registers.spill_probability > plain.registers.spill_probability
    more, fewer = (b.blocks_by_predicted_registers(H200) for b in (capped, plain))
    assert more > fewer


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ("64x128x4x2:maxnreg=88", "wgmma_registers"),
        ("128x128x4x2:maxnreg=168", "accumulators"),
        ("64x128x4x2:maxnreg=96", "spills"),
    ],
)
def test_what_the_cap_rules_out_says_so(config: str, rule: str) -> None:
    answer = verdict(assess(PROBLEM, parse_config(config), H200, V6, TRITON), H200)
    assert answer.rule == rule
    assert f"the cap with 4 warps and {config.partition(':')[2]} is" in str(answer.reason)
    plain = assess(PROBLEM, parse_config(config).plain, H200, V6, TRITON)
    assert verdict(plain, H200).rule is None


def test_the_order_sees_the_cap() -> None:
    """Configs that differ in their cap alone are not one tile to the cost model."""
    configs = [parse_config(text) for text in ("64x64x4x2", "64x64x4x2:maxnreg=80")]
    budgets = [assess(PROBLEM, config, H200, V6, TRITON) for config in configs]
    costs = order(PROBLEM, budgets, [verdict(b, H200) for b in budgets], H200, V6)
    assert [cost.config for cost in costs] == configs
    assert costs[0].predicted_ms != costs[1].predicted_ms


def test_neighbours_keep_the_axes_and_one_is_without_the_cap() -> None:
    explained = Explainer(PROBLEM, H200, V6, TRITON).explain(parse_config("64x128x4x2:maxnreg=96"))
    assert [(n.change, str(n.budget.config)) for n in explained.beside] == [
        ("one more stage", "64x128x4x3:maxnreg=96"),
        ("twice the warps", "64x128x8x2:maxnreg=96"),
        ("no maxnreg", "64x128x4x2"),
    ]
    starved = Explainer(PROBLEM, H200, V6, TRITON).explain(parse_config("64x128x4x2:maxnreg=88"))
    assert starved.nearest is not None
    nearest = starved.nearest
    assert (nearest.change, str(nearest.budget.config)) == ("no maxnreg", "64x128x4x2")


def test_the_budget_command_shows_the_axes(cli: CommandLine) -> None:
    texts = ("64x64x4x2:maxnreg=128", "64x64x4x2")
    one = cli.run("budget", texts[0], "--gpu", "h200").stdout
    assert "2 stages, at most 128 registers a thread" in one and "no maxnreg" in one
    table = cli.run("budget", *texts, "--gpu", "h200").stdout
    assert all(any(line.startswith(f"{text} ") for line in table.splitlines()) for text in texts)
    document = json.loads(cli.run("budget", *texts, "--gpu", "h200", "--json").stdout)
    capped, plain = document["budgets"]
    assert (capped["config"], capped["maxnreg"], capped["register_cap"]) == (texts[0], 128, 128)
    assert (plain["maxnreg"], plain["warp_specialize"], plain["register_cap"]) == (None, None, 255)
    assert capped["beside"][-1]["config"] == "64x64x4x2"


# A kernel whose shared memory is not modelled -----------------------------------------------------


@pytest.fixture(params=["v8", "a copy of v9"])
def unmodelled(request: pytest.FixtureRequest, tmp_path: Path) -> Kernel:
    return V8 if request.param == "v8" else from_file(tmp_path, V9, "v9_ping_pong")


def test_nothing_is_said_of_its_shared_memory(unmodelled: Kernel) -> None:
    kernel = unmodelled
    config = parse_config("128x64x4x2")
    budget = assess(PROBLEM, config, H200, kernel, TRITON)
    assert (budget.shared, budget.blocks_by_shared, budget.blocks_per_sm()) == (None, None, None)
    assert buffers(PROBLEM, config, H200, kernel, TRITON) is None
    assert terms(PROBLEM, config, H200, kernel, TRITON) is None
    assert verdict(budget, H200).kept
    # Too large for any card: here only the compiler may say so.
    huge = assess(PROBLEM, parse_config("128x128x4x9"), H200, kernel, TRITON)
    assert huge.order_blocks_by_shared == 0 and verdict(huge, H200).kept


def test_its_order_goes_by_the_same_kernel_without_specialisation(own: Kernel) -> None:
    configs = [c for c in load_space("article") if c.num_warps == 4]
    budgets = [assess(PROBLEM, c, H200, own, TRITON) for c in configs]
    alike = [assess(PROBLEM, c, H200, V7, TRITON) for c in configs]
    for budget, like in zip(budgets, alike, strict=True):
        assert budget.order_blocks_by_shared == like.blocks_by_shared
    keep = [Verdict(None, None, None)] * len(configs)
    predicted = order(PROBLEM, budgets, keep, H200, own)
    assert len(predicted) == len(configs)
    too_large = [budget.config for budget in budgets if budget.order_blocks_by_shared == 0]
    assert too_large
    places = {cost.config: place for place, cost in enumerate(predicted)}
    clean = [b.config for b in budgets
             if b.order_blocks_by_shared and b.registers.spill_probability < 0.5]  # fmt: skip
    assert max(places[c] for c in clean) < min(places[c] for c in too_large)


def test_specialised_warps_may_hold_more_than_maxnreg() -> None:
    """Of 12 warps with 168 registers a thread four keep 24 each, and eight may have 240."""
    for text, cap in (("", 240), (",warp_specialize=on", 240), (",warp_specialize=off", 168)):
        config = parse_config(f"128x64x4x2:maxnreg=168{text}")
        assert assess(PROBLEM, config, H200, V8, TRITON).register_cap == cap
    for kernel, cap in ((V7, 168), (V9, 240)):
        config = parse_config("128x64x4x2:maxnreg=168")
        assert assess(PROBLEM, config, H200, kernel, TRITON).register_cap == cap


def test_the_compiler_s_word_decides_once_it_is_asked() -> None:
    config = parse_config("128x64x4x2")
    explain = Explainer(PROBLEM, H200, V8, TRITON).explain
    asked = explain(config, Compiled(config, shared=50_000, regs=168, spills=0, warps=12)).line
    assert asked.verdict.kept and asked.shared == 50_000 and asked.budget.shared is None
    # 12 warps of 168 registers are 64,512: one block, though four warps alone would fit thrice.
    assert (asked.blocks_per_sm(H200), asked.binds(H200)) == (1, ["registers"])
    assert asked.blocks_by_warps(H200) == 64 // 12
    large = explain(config, Compiled(config, shared=300_000, regs=168, spills=0, warps=12)).line
    assert large.verdict.out is OutClass.CANNOT and "300,000 bytes" in str(large.verdict.reason)
    refused = Compiled(config, reason="why")
    assert compiled_verdict(asked.verdict, refused, H200) == asked.verdict


def test_the_budget_command_says_what_a_kernel_of_one_card_takes(cli: CommandLine) -> None:
    for gpu, config, why in (
        ("h200", "128x64x8x2", "v9_ping_pong takes 4 warps and adds to them what it needs"),
        ("b200", "128x64x4x2", "v9_ping_pong is written for compute capability 9.0 alone"),
    ):
        done = cli.run("budget", config, "--gpu", gpu, "--kernel", "v9_ping_pong", "--json")
        (budget,) = json.loads(done.stdout)["budgets"]
        answer = budget["verdict"]
        assert (answer["out"], answer["rule"], answer["reason"]) == ("cannot", "kernel", why)


def test_the_budget_command_says_that_programs_stay(cli: CommandLine) -> None:
    asked = ("--gpu", "h200", "--kernel", "v10_persistent", "--D", "128", "--N", "1024")
    done = cli.run("budget", "128x128x4x2", *asked, "--compile")
    assert "256: 132 programs stay for one after another, 1.94 each" in " ".join(
        done.stdout.split()
    )
    assert " waves " not in done.stdout
    done = cli.run("budget", "64x64x4x2", *asked, "--json")
    (budget,) = json.loads(done.stdout)["budgets"]
    assert (budget["verdict"]["out"], budget["verdict"]["rule"]) == ("cannot", "kernel")


def test_the_budget_command_says_whom_to_ask(own: Kernel, cli: CommandLine) -> None:
    asked = ("--gpu", "b200", "--kernel", str(own.path))
    one = cli.run("budget", "64x64x4x2", *asked).stdout
    assert "not modelled: only the compiler can say (--compile asks it)" in one
    assert "verdict         ask the compiler" in one
    texts = ("64x64x4x2:warp_specialize=on", "64x64x4x2:warp_specialize=off")
    table = cli.run("budget", *texts, *asked).stdout
    assert table.count("not modelled") == 2 and "--compile asks the compiler" in table
    document = json.loads(cli.run("budget", *texts, *asked, "--json").stdout)
    for budget, on in zip(document["budgets"], (True, False), strict=True):
        assert (budget["warp_specialize"], budget["shared"], budget["blocks_per_sm"]) == (
            on, None, None,
        )  # fmt: skip
        assert "order_blocks_by_shared" not in budget and budget["shared_terms"] == []
    compiled = cli.run("budget", *texts, *asked, "--compile", "--json")
    assert compiled.returncode == 0, compiled.stderr
    for budget, warps in zip(json.loads(compiled.stdout)["budgets"], (12, 4), strict=True):
        assert budget["shared"] is None and budget["compiled"]["shared"] > 0
        assert budget["compiled"]["warps"] == warps and budget["blocks_per_sm"] >= 1


def test_an_audit_has_nothing_to_compare(unmodelled: Kernel) -> None:
    report = audit([Case(unmodelled, PROBLEM, parse_config("64x64x4x2"), H200)], TRITON, 1)
    assert [(f.kind, f.predicted, f.compiled) for f in report.findings] == [
        ("not modelled", None, None)
    ]


# Compiled ----------------------------------------------------------------------------------------


def test_configs_of_equal_code_are_seen_to_be(triton_cache: Path) -> None:
    """On by itself, which is v8's default, and on by name; off is other code, with the warps that
    were asked for."""
    jobs = [
        CompileJob(V8, PROBLEM, parse_config(f"128x64x4x2{text}"), 90)
        for text in ("", ":warp_specialize=on", ":warp_specialize=off")
    ]
    answers = dict(compile_all(jobs, 2))
    default, on, off = (answers[job] for job in jobs)
    assert on.failure is None and off.failure is None
    assert default.code_hash == on.code_hash != off.code_hash
    assert (on.warps, off.warps) == (12, 4)


def test_a_sweep_s_rows_have_the_axes_and_no_shared_prediction(
    own: Kernel, cli: CommandLine
) -> None:
    (cli.folder / "mine.toml").write_text(
        "q_tile = [64]\nk_tile = [64]\nnum_warps = [4]\nnum_stages = [2]\n"
        'maxnreg = ["auto", 128]\nwarp_specialize = ["auto", true, false]\n'
    )
    done = cli.run(
        "sweep", "--N", "128", "--gpu", "b200", "--kernel", str(own.path),
        "--space", "mine.toml", "--json", "-q",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = find(cli.folder / "sweeps")
    rows = {str(row.config).partition(":")[2]: row for row in read(path).rows}
    assert set(rows) == {
        "", "warp_specialize=on", "warp_specialize=off", "maxnreg=128",
        "maxnreg=128,warp_specialize=on", "maxnreg=128,warp_specialize=off",
    }  # fmt: skip
    assert {row.shared_predicted for row in rows.values()} == {None}
    compiled = [row for row in rows.values() if row.status == "compiled"]
    assert len(compiled) == 6 and all(row.shared and row.blocks_per_sm for row in compiled)
    assert rows["maxnreg=128,warp_specialize=off"].regs is not None
    assert rows["maxnreg=128,warp_specialize=off"].regs <= 128
    # Nobody knows what else would fit: the list claims nothing of it, one way or the other.
    recommendation = json.loads(done.stdout)["recommendation"]
    assert recommendation["serves"] == [{"dtype": "bf16", "D": 64}]
    assert recommendation["unserved"] == []
