"""The command line as users meet it: help, JSON, pipes, and every bad input of the list."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from command_line import TARGET, CommandLine

from flashtune.store import find, read

COMMANDS = ("sweep", "budget", "export-autotune", "bench", "env")
HEAVY = ("torch", "triton", "pandas", "pyarrow", "joblib")
SMALL = "64x32x4x3 32x32x2x2"
RESULTS = "rtx-4070-super_v6_heads_first_bf16_D64_unmeasured.parquet"
SWEEP = ("sweep", *TARGET, "--N", "100", "--space", "small.toml")


def write_space(folder: Path, configs: str = SMALL) -> None:
    listed = ", ".join(f'"{config}"' for config in configs.split())
    (folder / "small.toml").write_text(f"configs = [{listed}]\n")


@pytest.fixture
def cli(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    write_space(tmp_path)
    return CommandLine.at(tmp_path, tmp_path_factory)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a small sweep has finished. Tests that change it take a copy."""
    folder = tmp_path_factory.mktemp("finished")
    write_space(folder)
    done = CommandLine.at(folder, tmp_path_factory).run(*SWEEP)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def swept(cli: CommandLine, finished: Path) -> CommandLine:
    """A command line in a copy of the folder of a finished sweep."""
    shutil.copytree(finished / "sweeps", cli.folder / "sweeps")
    return cli


def assert_two_lines(done: subprocess.CompletedProcess[str], first: str, second: str) -> None:
    """Exit 2, nothing on stdout, and on stderr what is wrong and what to do, a line each."""
    assert done.returncode == 2, done.stderr
    assert not done.stdout
    lines = done.stderr.splitlines()
    assert len(lines) == 2, done.stderr
    assert lines[0].startswith("Error: ") and re.search(first, lines[0]), lines[0]
    assert re.search(second, lines[1]), lines[1]


# -- bad input


@pytest.mark.parametrize(
    ("args", "first", "second"),
    [
        ("budget 64x32x4", "'64x32x4'", "64x32x4x3"),
        ("budget 64x33x4x3", "k_tile is 33", "powers of two from 16"),
        ("budget 0x32x4x3", "q_tile is 0", "powers of two from 16"),
        ("budget 64x32x4x3 --N 0", "--N 0", "1 to"),
        ("budget 64x32x4x3 --N 512,1024", "--N '512,1024'", "--N 512"),
        ("budget 64x32x4x3 --triton three", "--triton 'three'", "3.6"),
        ("sweep --N 0", "--N 0", "1 to"),
        ("sweep --N -5", "--N -5", "1 to"),
        ("sweep --N 512,many", "--N .*'many'", "--N 4096"),
        ("sweep --D 50", "--D 50", "multiples of 8"),
        ("sweep --D 512", "--D 512", "multiples of 8"),
        ("sweep --H 8 --H-kv 3", "--H-kv 3", "key head"),
        ("sweep --jobs 0", "--jobs 0", "--jobs 2"),
        ("sweep --top 0", "--top 0", "--top 40"),
        ("sweep --gpu rtx-4080", "'rtx-4080'", "rtx-4090"),
        ("sweep --gpu voodoo", "'voodoo'", "Known: .*h200"),
        ("sweep --kernel v6", "--kernel 'v6'", "v6_heads_first"),
        ("sweep --kernel nowhere.py", "nowhere.py", "path"),
        ("sweep --dtype bf61", "--dtype 'bf61'", "bf16"),
        ("sweep --dtype int4", "--dtype 'int4'", "bf16.*fp16.*fp32"),
        ("sweep --space artcle", "--space 'artcle'", "article"),
        ("sweep --space nowhere.toml", "nowhere.toml", "path"),
        ("bench --runs 0", "--runs 0", "--runs 5"),
        ("bench --N 0", "--N 0", "1 to"),
        ("bench --shapes llama", "--shapes 'llama'", "llama-3-8b.*whisper"),
        ("bench --shapes whisper --B 0", "--B 0", "1 to"),
        ("bench --shapes whisper --N 512", "--shapes whisper and --N", "Leave out --N"),
        ("bench --shapes whisper --both", "--shapes whisper and --both", "Leave out --both"),
        ("bench --roofline --kernels v6", "--kernels: 'v6'", "v6_heads_first"),
        ("bench --roofline --sweeps nowhere", "--sweeps nowhere", "--sweeps"),
        ("bench --json --markdown", "--markdown and --json", "--out"),
        ("bench --out nowhere/bench.json", "nowhere/bench.json", "folder"),
        ("bench --out small.toml", "small.toml exists", "--force"),
        ("bench --gpu voodoo", "'voodoo'", "Known: .*h200"),
        ("export-autotune configs.py", "sweeps", "flashtune sweep"),
        ("export-autotune configs.py --from nowhere", "nowhere", "flashtune sweep"),
        ("export-autotune configs.py --param-names BLOCK_M", "--param-names.*BLOCK_M", "BLOCK_M"),
    ],
)
def test_a_bad_option_is_two_lines(cli: CommandLine, args: str, first: str, second: str) -> None:
    before = sorted(cli.folder.iterdir())
    assert_two_lines(cli.run(*shlex.split(args)), first, second)
    assert sorted(cli.folder.iterdir()) == before


@pytest.mark.parametrize("args", ["sweep --D abc", "sweep --jobs x", "budget", "sweep --nope"])
def test_what_the_parser_refuses_exits_with_2(cli: CommandLine, args: str) -> None:
    done = cli.run(*args.split())
    assert done.returncode == 2 and not done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "first", "second"),
    [
        ("q_tiles = [64]", "q_tiles.*did you mean q_tile", "q_tile, k_tile"),
        (
            "q_tile = [64]\nk_tile = [32, 48]\nnum_warps = [4]\nnum_stages = [3]",
            r"k_tile\[1\] is 48",
            "powers of two",
        ),
        ('configs = ["64x32x4x3", "64x32x64x3"]', r"configs\[1\].*num_warps is 64", "1 to 32"),
        ("q_tile = [64", "not TOML", "line"),
    ],
)
def test_a_bad_space_names_the_key(cli: CommandLine, text: str, first: str, second: str) -> None:
    (cli.folder / "mine.toml").write_text(text)
    assert_two_lines(cli.run("sweep", "--space", "mine.toml"), f"mine.toml.*{first}", second)


def test_a_results_folder_that_cannot_be_written(cli: CommandLine) -> None:
    (cli.folder / "file").write_text("mine")  # stands in the way of root too
    done = cli.run(*SWEEP, "-q", "--out", "file/results")
    assert_two_lines(done, "file/results.*cannot write there", "--out DIR")
    assert (cli.folder / "file").read_text() == "mine"
    if os.geteuid() == 0:
        return  # no mode denies root
    (cli.folder / "closed").mkdir(mode=0o555)
    done = cli.run(*SWEEP, "-q", "--out", "closed")
    assert_two_lines(done, "closed.*Permission denied", "--out DIR")


@pytest.mark.parametrize("args", ["budget 64x32x4x3", "sweep --dry-run", "env --json"])
def test_an_output_that_is_full_is_two_lines(args: str, cli: CommandLine) -> None:
    with open("/dev/full", "w") as full:
        done = cli.run(*args.split(), stdout=full)
    assert_two_lines(done, "the output: No space left on device", "write elsewhere")


def test_a_write_that_the_system_refuses_is_two_lines(cli: CommandLine) -> None:
    def no_file_over_2_kb() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))

    # Nothing to compile, so that the first large file is the results file.
    write_space(cli.folder, "512x512x4x5")
    done = cli.run(*SWEEP, "-q", preexec_fn=no_file_over_2_kb)
    assert_two_lines(done, f"{RESULTS}: cannot write there: File too large", "--out DIR")
    assert cli.run(*SWEEP, "-q").returncode == 1  # nothing was in the way of the next run


def _can_mount() -> bool:
    tried = subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True
    )
    return tried.returncode == 0


def test_a_full_disk_is_two_lines_and_the_same_command_continues(swept: CommandLine) -> None:
    if shutil.which("unshare") is None or not _can_mount():
        pytest.skip("no small file system can be mounted here")
    # In a private mount namespace: the same sweep with one more length on a disk that is full,
    # then with space again.
    command = shlex.join([sys.executable, "-m", "flashtune", *SWEEP, "--N", "100,200", "-q"])
    script = f"""
        set -eu
        mkdir disk
        mount -t tmpfs -o size=256k none disk
        cp sweeps/{RESULTS} disk/
        head -c 1000000 /dev/zero > disk/filler || true
        {command} --out disk 2> first-stderr > first-stdout || echo $? > first-exit
        cmp sweeps/{RESULTS} disk/{RESULTS}
        rm disk/filler
        {command} --out disk
        cp disk/{RESULTS} after.parquet
    """
    _, options = swept.prepared((), {})
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, **options
    )
    assert done.returncode == 0, done.stderr
    files = [swept.folder / f"first-{name}" for name in ("exit", "stdout", "stderr")]
    code, stdout, stderr = (file.read_text() for file in files)
    first = subprocess.CompletedProcess([], int(code), stdout, stderr)
    assert_two_lines(first, f"{RESULTS}: the disk is full", "free some space")
    assert len(read(swept.folder / "after.parquet").rows) == 4


def _cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _edit_metadata(path: Path, old: bytes, new: bytes) -> None:
    table = pq.read_table(path)
    metadata = dict(table.schema.metadata)
    assert old in metadata[b"flashtune"]
    metadata[b"flashtune"] = metadata[b"flashtune"].replace(old, new)
    pq.write_table(table.replace_schema_metadata(metadata), path)


def _newer(path: Path) -> None:
    _edit_metadata(path, b'"schema_version": 2', b'"schema_version": 9')


@pytest.mark.parametrize(
    ("damage", "first", "second"),
    [
        (_cut_short, "is cut short", "--fresh"),
        (_empty, "is empty", "--fresh"),
        (_newer, "schema_version 9.*up to 2", "upgrade"),
    ],
)
def test_a_results_file_that_cannot_be_read(
    swept: CommandLine, damage: object, first: str, second: str
) -> None:
    assert callable(damage)
    path = swept.folder / "sweeps" / RESULTS
    damage(path)
    before = path.read_bytes()
    assert_two_lines(swept.run(*SWEEP, "-q"), f"{RESULTS}.*{first}", second)
    assert_two_lines(swept.run("export-autotune", "configs.py"), f"{RESULTS}.*{first}", second)
    assert path.read_bytes() == before
    assert not (swept.folder / "configs.py").exists()


def test_a_results_file_of_another_gpu(swept: CommandLine) -> None:
    path = swept.folder / "sweeps" / RESULTS
    other = path.with_name(RESULTS.replace("rtx-4070-super", "h200"))
    path.rename(other)
    before = other.read_bytes()
    done = swept.run(*SWEEP, "-q", "--gpu", "h200")
    assert_two_lines(done, "another setup: gpu: rtx-4070-super there, h200 here", "--fresh")
    assert other.read_bytes() == before


def test_an_export_replaces_only_with_force(swept: CommandLine) -> None:
    target = swept.folder / "configs.py"
    target.write_text("mine\n")
    assert_two_lines(swept.run("export-autotune", "configs.py"), "configs.py exists", "--force")
    assert target.read_text() == "mine\n"
    done = swept.run("export-autotune", "configs.py", "--force")
    assert done.returncode == 0 and not done.stdout
    assert "AUTOTUNE_CONFIGS" in target.read_text()


def test_an_export_from_a_folder_without_a_sweep(cli: CommandLine) -> None:
    (cli.folder / "sweeps").mkdir()
    done = cli.run("export-autotune", "configs.py")
    assert_two_lines(done, "sweeps: no sweep is there", "flashtune sweep")
    assert not (cli.folder / "configs.py").exists()


@pytest.mark.parametrize("args", [(*SWEEP, "-q"), ("budget", "64x32x4x3", "--compile")])
def test_a_triton_that_is_too_old(cli: CommandLine, args: Sequence[str]) -> None:
    record = cli.folder / "old" / "triton-3.5.0.dist-info" / "METADATA"
    record.parent.mkdir(parents=True)
    record.write_text("Metadata-Version: 2.1\nName: triton\nVersion: 3.5.0\n")
    options = cli.prepared((), {})[1]
    path = os.pathsep.join([str(record.parent.parent), options["env"]["PYTHONPATH"]])
    done = cli.run(*args, env={"PYTHONPATH": path})
    assert_two_lines(done, "Triton 3.5.0 is too old", "triton>=3.6")


# -- Ctrl-C


def assert_interrupted(cli: CommandLine, stderr: str) -> None:
    assert "Traceback" not in stderr
    assert stderr.splitlines()[-2:] == [
        "Interrupted.",
        "What was finished is kept; the same command goes on from there.",
    ]
    assert not cli.left_behind()


def test_ctrl_c_in_the_interpreter_stage(cli: CommandLine) -> None:
    running = cli.start(*SWEEP)
    running.wait_for_stage("interpreting")
    running.wait_until(lambda: any("flashtune.interpreter" in c for c in cli.processes().values()))
    assert running.interrupt() == 130
    assert_interrupted(cli, running.stderr)
    done = cli.run(*SWEEP)
    assert done.returncode == 0, done.stderr


def test_ctrl_c_while_the_compile_workers_boot(cli: CommandLine) -> None:
    running = cli.start(*SWEEP)
    running.wait_until(lambda: any("loky.backend.popen" in c for c in cli.processes().values()))
    time.sleep(0.3)  # they are importing, and cannot yet ignore a signal by themselves
    assert running.interrupt() == 130
    assert_interrupted(cli, running.stderr)


def test_ctrl_c_in_the_compile_stage(cli: CommandLine) -> None:
    cli.cache = cli.folder / "cache"  # empty, so that there is something to interrupt
    write_space(cli.folder, "64x32x4x3 32x32x2x2 64x64x4x3 32x64x2x2")
    running = cli.start(*SWEEP, "--jobs", "1")
    running.wait_for_stage("compiling")
    running.wait_until(lambda: cli.compiled() >= 2)
    assert running.interrupt() == 130
    assert_interrupted(cli, running.stderr)

    (path,) = find(cli.folder / "sweeps")
    kept = read(path).rows
    assert 1 <= len(kept) <= 3 and {str(row.status) for row in kept} == {"compiled"}
    done = cli.run(*SWEEP, "--jobs", "1")
    assert done.returncode == 0, done.stderr
    assert f"compiling: {4 - len(kept)}\n" in done.stderr
    rows = read(path).rows
    assert len(rows) == 4 and set(kept) <= set(rows)


# -- help, output, pipes


@pytest.mark.parametrize("command", COMMANDS)
def test_every_example_of_the_help_runs(swept: CommandLine, command: str) -> None:
    text = swept.run(command, "--help", env={"COLUMNS": "200", "NO_COLOR": "1"}).stdout
    assert text == swept.run(command, "-h", env={"COLUMNS": "200", "NO_COLOR": "1"}).stdout
    examples = re.findall(rf"(?m)^\s*(?:Example: )?flashtune ({command}\b.*?)\s*$", text)
    assert examples
    for example in examples:
        args = shlex.split(example)
        if command == "sweep" and "--dry-run" not in args:
            args.append("--dry-run")
        if command == "bench":
            args += ["--roofline", *TARGET]  # for a card that is not here nothing is timed
        if command == "export-autotune":
            (swept.folder / "configs.py").unlink(missing_ok=True)
        done = swept.run(*args)
        assert done.returncode == 0, (example, done.stderr)
        assert done.stdout or command == "export-autotune"


def test_the_version(cli: CommandLine) -> None:
    from flashtune import __version__

    assert cli.run("--version").stdout == f"flashtune {__version__}\n"


def test_colours_only_where_they_are_wanted(cli: CommandLine) -> None:
    args = ("budget", "64x32x4x3", "128x128x8x4", *TARGET)
    assert "\x1b[" not in cli.run(*args).stdout
    assert "\x1b[" in cli.run(*args, env={"FORCE_COLOR": "1"}).stdout
    quiet = cli.run(*args, env={"FORCE_COLOR": "1", "NO_COLOR": "1"}).stdout
    assert not re.search(r"\x1b\[[\d;]*3\dm", quiet)  # bold is no colour


@pytest.mark.parametrize("args", ["budget 64x32x4x3", "budget 64x32x4x3 --json", "env"])
def test_a_closed_pipe_is_silent(cli: CommandLine, args: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = cli.run(*args.split(), stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "args",
    [
        "--help",
        "sweep --help",
        "budget 64x32x4x3",
        "budget 64x32x4x3 128x128x8x4 --json",
        "sweep --both --dry-run",
        "sweep --dry-run --json",
        "bench --help",
    ],
)
def test_a_quick_answer_imports_nothing_heavy(cli: CommandLine, args: str) -> None:
    done = cli.run(*args.split(), python=("-X", "importtime"))
    assert done.returncode == 0
    imported = set(re.findall(r"(?m)^import time:.*\|\s*([\w.]+)$", done.stderr))
    assert "flashtune.cli.app" in imported
    assert not {name for name in imported if name.split(".")[0] in HEAVY}


# -- budget


def budgets(cli: CommandLine, *args: str) -> dict[str, dict[str, object]]:
    done = cli.run("budget", *args, *TARGET, "--json")
    assert done.returncode == 0 and not done.stderr, done.stderr
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1 and document["gpu"] == "rtx-4070-super"
    return {budget["config"]: budget for budget in document["budgets"]}


def test_the_articles_figures(cli: CommandLine) -> None:
    shared = {
        "16x16x4x3": 10_752,
        "64x32x4x3": 24_576,
        "64x32x4x5": 40_960,
        "128x64x8x4": 65_536,
        "128x128x8x3": 81_920,
        "256x64x16x5": 98_304,
        "64x256x4x2": 73_728,
    }
    found = budgets(cli, *shared, "128x128x8x4", "--kernel", "v0_baseline", "--triton", "3.6")
    assert {config: found[config]["shared"] for config in shared} == shared
    assert found["128x128x8x4"]["verdict"]["out"] == "cannot"

    found = budgets(cli, "64x32x4x3", "64x32x4x4", "--N", "512", "--triton", "3.6")
    waves = [f"{budget['waves']:.2f}" for budget in found.values()]
    assert waves == ["1.14", "1.52"]

    fp32 = ("--dtype", "fp32", "--D", "128", "--triton", "3.6")
    found = budgets(cli, "64x32x4x3", "64x32x4x2", *fp32)
    assert [budget["shared"] for budget in found.values()] == [107_520, 74_752]
    assert [budget["verdict"]["out"] for budget in found.values()] == ["cannot", None]


def test_the_articles_split_of_its_space(cli: CommandLine) -> None:
    done = cli.run("sweep", *TARGET, "--exhaustive", "--dry-run", "--json")
    (plan,) = json.loads(done.stdout)["problems"]
    rules = [out["rule"] for out in plan["pruned"]]
    assert (len(plan["tried"]), len(plan["ranked"])) == (465, 0)
    assert {rule: rules.count(rule) for rule in rules} == {"shared": 100, "accumulators_512": 60}


def test_several_configs_make_a_table(cli: CommandLine) -> None:
    lines = cli.run("budget", "64x32x4x3", "128x128x8x4", *TARGET).stdout.splitlines()
    (first,) = [line for line in lines if line.startswith("64x32x4x3 ")]
    (second,) = [line for line in lines if line.startswith("128x128x8x4 ")]
    assert "24,576" in first and "worth trying" in first
    assert "114,688" in second and "cannot" in second


def test_predicted_and_compiled_shared_bytes_agree(cli: CommandLine) -> None:
    for budget in budgets(cli, *SMALL.split(), "--compile").values():
        assert budget["compiled"]["shared"] == budget["shared"]
        assert budget["compiled"]["regs"] > 0 and budget["compiled"]["failure"] is None


# -- bench


NO_GPU = {"CUDA_VISIBLE_DEVICES": "-1"}


@pytest.mark.parametrize("args", ["", "--shapes whisper", "--json --out bench.json"])
def test_a_bench_without_a_gpu_says_what_is_missing(cli: CommandLine, args: str) -> None:
    done = cli.run("bench", *args.split(), env=NO_GPU)
    assert_two_lines(done, "Nothing can be timed: no NVIDIA GPU", "--roofline.*flashtune budget")
    assert not (cli.folder / "bench.json").exists()


def test_the_roofline_needs_no_gpu(cli: CommandLine) -> None:
    args = ("bench", "--roofline", "--shapes", "stable-diffusion", *TARGET)
    done = cli.run(*args, "--kernels", "v6_heads_first", "--json", "--out", "bench.json")
    assert done.returncode == 0 and done.stderr == ""
    document = json.loads(done.stdout)
    assert document == json.loads((cli.folder / "bench.json").read_text())
    assert document["schema_version"] == 1 and not document["measured"]
    assert document["shapes"] is document["ceilings"] is None
    assert not document["roofline"]["roofs"]["measured"]
    first, second = document["roofline"]["shapes"]
    assert [r["problem"]["D"] for r in (first, second)] == [40, 80]
    assert first["needed"] == 4 * 4 * 8 * 4096**2 * 40
    assert first["executed"] > first["needed"]  # D = 40 is padded to 64

    assert_two_lines(cli.run(*args, "--out", "bench.json"), "bench.json exists", "--force")
    again = cli.run(*args, "--markdown", "--out", "bench.json", "--force")
    assert again.returncode == 0
    assert again.stdout.startswith("Roofline of GeForce RTX 4070 SUPER, bf16\n\n| N | D | mask |")
    assert "not measured" in again.stdout


# -- stdout and stderr


def test_json_alone_on_stdout_and_progress_on_stderr(swept: CommandLine) -> None:
    done = swept.run(*SWEEP, "--json")
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1 and document["counts"] == {"compiled": 2}
    assert not document["measured"] and document["problems"][0]["best"] is None
    assert document["recommendation"]["schema_version"] == 1
    assert "compiling: 0\n" in done.stderr and f"sweeps/{RESULTS}" in done.stderr

    facts = json.loads(swept.run("env", "--json").stdout)
    assert facts["schema_version"] == 1 and facts["triton"]


def test_quiet_is_quiet(cli: CommandLine) -> None:
    done = cli.run(*SWEEP, "-q")
    assert done.returncode == 0 and done.stderr == ""
    assert "Nothing was measured" in done.stdout and "2 compiled" in done.stdout


def test_the_exported_file_needs_only_triton(swept: CommandLine) -> None:
    names = "Q_TILE_SIZE=BLOCK_M,K_TILE_SIZE=BLOCK_N,is_causal="
    done = swept.run("export-autotune", "configs.py", "--param-names", names)
    assert done.returncode == 0, done.stderr
    path = swept.folder / "configs.py"
    assert "NOTHING WAS MEASURED" in path.read_text()
    spec = importlib.util.spec_from_file_location("exported", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.AUTOTUNE_KEY == ["N_QUERIES", "N_KEYS", "D"]
    assert {(c.kwargs["BLOCK_M"], c.kwargs["BLOCK_N"]) for c in module.AUTOTUNE_CONFIGS} == {
        (64, 32),
        (32, 32),
    }
