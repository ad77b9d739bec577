"""Spaces and configs as a user writes them: what they mean, and every way to get them wrong."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import subprocess_env
from hypothesis import given
from hypothesis import strategies as st

from flashtune.errors import FlashtuneError
from flashtune.records import Config
from flashtune.space import AXES, allowed, load_space, parse_config, space_names

AXIS_LINES = """
q_tile = [64, 128]
k_tile = [32, 16]
num_warps = [4]
num_stages = [3, 1, 2]
"""


def space_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def refusal(text: str) -> FlashtuneError:
    with pytest.raises(FlashtuneError) as caught:
        parse_config(text)
    return caught.value


def space_refusal(name: str) -> FlashtuneError:
    with pytest.raises(FlashtuneError) as caught:
        load_space(name)
    return caught.value


any_config = st.builds(
    Config,
    st.sampled_from([16, 32, 64, 128, 256, 512]), st.sampled_from([16, 32, 64, 128, 256, 512]),
    st.sampled_from([1, 2, 4, 8, 16, 32]), st.integers(1, 10),
    st.none() | st.integers(3, 31).map(lambda n: 8 * n), st.none() | st.booleans(),
)  # fmt: skip


@given(any_config)
def test_a_config_is_read_as_it_is_written(config: Config) -> None:
    assert parse_config(str(config)) == config
    assert parse_config(f" {str(config).upper()} ") == config


def test_the_text_of_a_config() -> None:
    plain = Config(128, 128, 4, 2)
    assert str(plain) == "128x128x4x2"
    assert str(replace(plain, maxnreg=168)) == "128x128x4x2:maxnreg=168"
    both = replace(plain, maxnreg=168, warp_specialize=False)
    assert str(both) == "128x128x4x2:maxnreg=168,warp_specialize=off"
    assert str(replace(both, warp_specialize=True, maxnreg=None)) == (
        "128x128x4x2:warp_specialize=on"
    )
    assert parse_config("128x128x4x2: warp_specialize = off, maxnreg = 168") == both
    assert both.plain == plain


@given(st.lists(any_config, max_size=12), st.randoms())
def test_configs_sort_whatever_they_leave_open(configs: list[Config], rng: random.Random) -> None:
    mixed = list(configs)
    rng.shuffle(mixed)
    assert sorted(mixed) == sorted(configs)
    assert len(set(mixed)) == len({str(config) for config in configs})


def test_an_open_axis_sorts_first() -> None:
    plain = Config(64, 32, 4, 3)
    capped = [replace(plain, maxnreg=n) for n in (64, 168)]
    off, on = replace(plain, warp_specialize=False), replace(plain, warp_specialize=True)
    order = [plain, off, on, *capped, Config(64, 32, 4, 4)]
    assert sorted(set(order)) == order
    assert plain < off and plain <= off and on > off and on >= off


def test_a_config_s_hash_is_the_same_in_every_process() -> None:
    """None's own, before Python 3.12, is not; the order of a set would change with it."""
    script = (
        "from flashtune.records import Config\n"
        "print(hash(Config(64, 32, 4, 3)), hash(Config(64, 32, 4, 3, 64, True)))"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", script], env=subprocess_env(), capture_output=True, check=True
        ).stdout
        for _ in range(3)
    }
    assert len(hashes) == 1


@given(
    st.text(alphabet="0123456789x.-+ e_²", max_size=14)
    | st.text(alphabet="0123456789=,: ofnmaxregwp_", max_size=30).map("64x32x4x3:".__add__)
)
def test_any_text_is_a_config_or_a_clear_error(text: str) -> None:
    try:
        config = parse_config(text)
    except FlashtuneError as error:
        assert repr(text) in error.message
        assert error.hint
        assert "\n" not in error.message + error.hint
    else:
        assert all(allowed(axis, getattr(config, axis)) for axis in AXES)
        assert all(allowed(axis, value) for axis, value in config.further.items())


OTHER_FORMS = [
    "64x32x4", "64x32x4x3x2", "", "x", "64x32x4x", "64*32*4*3", "64x-32x4x3", "64x32.0x4x3",
    "٦٤x32x4x3", "64x32x4x" + "9" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("text", OTHER_FORMS)
def test_a_text_of_another_form_is_refused(text: str) -> None:
    error = refusal(text)
    assert error.message == f"config {text!r}: not of the form q_tile x k_tile x warps x stages"
    assert "64x32x4x3" in error.hint


@pytest.mark.parametrize(
    ("text", "axis", "value", "range_"),
    [
        ("64x33x4x3", "k_tile", 33, "powers of two from 16 to 512"),
        ("0x32x4x3", "q_tile", 0, "powers of two from 16 to 512"),
        ("8x32x4x3", "q_tile", 8, "powers of two from 16 to 512"),
        ("64x1024x4x3", "k_tile", 1024, "powers of two from 16 to 512"),
        ("64x32x3x3", "num_warps", 3, "powers of two from 1 to 32"),
        ("64x32x0x3", "num_warps", 0, "powers of two from 1 to 32"),
        ("64x32x64x3", "num_warps", 64, "powers of two from 1 to 32"),
        ("64x32x4x0", "num_stages", 0, "whole numbers from 1 to 10"),
        ("64x32x4x11", "num_stages", 11, "whole numbers from 1 to 10"),
    ],
)
def test_a_value_that_is_not_allowed_names_its_axis(
    text: str, axis: str, value: int, range_: str
) -> None:
    error = refusal(text)
    assert error.message == f"config {text!r}: {axis} is {value}"
    assert error.hint == f"{axis} takes {range_}."


@pytest.mark.parametrize(
    ("further", "says", "hint"),
    [
        ("maxnreg=100", "maxnreg is 100", "maxnreg takes multiples of 8 from 24 to 248."),
        ("maxnreg=16", "maxnreg is 16", "multiples of 8 from 24 to 248"),
        ("maxnreg=256", "maxnreg is 256", "multiples of 8 from 24 to 248"),
        ("maxnreg=on", "maxnreg is on", "multiples of 8"),
        ("maxnreg", "maxnreg is empty", "multiples of 8"),
        ("warp_specialize=yes", "warp_specialize is yes", "warp_specialize takes on or off."),
        ("warp_specialize=1", "warp_specialize is 1", "on or off"),
        ("num_ctas=2", "no axis 'num_ctas'", "maxnreg and warp_specialize"),
        ("", "no axis ''", "maxnreg and warp_specialize"),
        ("maxnreg=64,", "no axis ''", "maxnreg and warp_specialize"),
        ("maxnreg=64,maxnreg=64", "maxnreg twice", "maxnreg and warp_specialize"),
    ],
)
def test_a_further_axis_that_is_not_allowed_is_named(further: str, says: str, hint: str) -> None:
    error = refusal(f"64x32x4x3:{further}")
    assert error.message == f"config '64x32x4x3:{further}': {says}"
    assert hint in error.hint


def test_the_article_space_is_the_article_s() -> None:
    tiles, warps, stages = (16, 32, 64, 128, 256), (1, 2, 4, 8, 16), (1, 2, 3, 4, 5)
    expected = [Config(*axes) for axes in itertools.product(tiles, tiles, warps, stages)]
    assert load_space("article") == expected  # 625, the last axis running fastest
    assert load_space("article") == load_space("article")


@pytest.mark.parametrize("name", space_names())
def test_every_space_that_comes_with_it_loads(name: str) -> None:
    space = load_space(name)
    assert space
    assert len(set(space)) == len(space)


def test_an_unknown_space_lists_near_names() -> None:
    error = space_refusal("artcle")
    assert error.message == "--space 'artcle': no space of that name"
    assert "article" in error.hint
    # With nothing near, all are listed.
    assert all(name in space_refusal("zzzzzz").hint for name in space_names())


def test_a_space_is_never_a_path_outside(tmp_path: Path) -> None:
    space_refusal("../spaces/article")
    space_refusal("")


def test_a_file_is_the_product_then_the_list_each_config_once(tmp_path: Path) -> None:
    text = AXIS_LINES + 'configs = ["16x16x1x1", "128x16x4x2", "16x16x1x1", "32x16x1x1"]\n'
    configs = [str(config) for config in load_space(space_file(tmp_path, text))]
    assert configs[:4] == ["64x32x4x3", "64x32x4x1", "64x32x4x2", "64x16x4x3"]
    assert configs[12:] == ["16x16x1x1", "32x16x1x1"]  # 128x16x4x2 is of the product
    assert len(configs) == 14


def test_a_repeated_value_counts_once(tmp_path: Path) -> None:
    text = AXIS_LINES.replace("[64, 128]", "[64, 64, 128, 64]")
    assert len(load_space(space_file(tmp_path, text))) == 12


def test_further_axes_are_further_factors_of_the_product(tmp_path: Path) -> None:
    text = AXIS_LINES + 'maxnreg = ["auto", 168]\nwarp_specialize = [true, false]\n'
    configs = load_space(space_file(tmp_path, text))
    assert [str(config) for config in configs[:5]] == [
        "64x32x4x3:warp_specialize=on", "64x32x4x3:warp_specialize=off",
        "64x32x4x3:maxnreg=168,warp_specialize=on", "64x32x4x3:maxnreg=168,warp_specialize=off",
        "64x32x4x1:warp_specialize=on",
    ]  # fmt: skip
    assert len(configs) == 12 * 4
    listed = 'configs = ["64x32x4x3", "64x32x4x3:maxnreg=64", "64x32x4x3"]\n'
    only_one = load_space(space_file(tmp_path, AXIS_LINES + "maxnreg = [64]\n" + listed))
    assert [str(config) for config in only_one[12:]] == ["64x32x4x3"]
    assert {config.maxnreg for config in only_one[:12]} == {64}


BROKEN = {
    "wrong key": (AXIS_LINES + "num_wraps = [4]\n", "unknown key num_wraps", "num_warps"),
    "key of another table": (AXIS_LINES + "[axes]\nq_tile = [64]\n", "unknown key axes", "q_tile"),
    "missing axis": (AXIS_LINES.replace("num_warps = [4]", ""), "num_warps is missing", "powers"),
    "number for a list": (
        AXIS_LINES.replace("[4]", "4"), "num_warps is 4", "powers of two from 1 to 32",
    ),
    "empty list": (AXIS_LINES.replace("[4]", "[]"), "num_warps is []", "powers of two"),
    "text in a list": (AXIS_LINES.replace("[4]", '["4"]'), "num_warps[0] is '4'", "powers of two"),
    "float in a list": (AXIS_LINES.replace("[4]", "[4.0]"), "num_warps[0] is 4.0", "powers of two"),
    "truth in a list": (AXIS_LINES.replace("[4]", "[true]"), "num_warps[0] is True", "powers of"),
    "value not allowed": (
        AXIS_LINES.replace("[32, 16]", "[32, 33]"), "k_tile[1] is 33",
        "powers of two from 16 to 512",
    ),
    "maxnreg not allowed": (
        AXIS_LINES + 'maxnreg = ["auto", 100]', "maxnreg[1] is 100",
        'maxnreg takes "auto" and multiples of 8 from 24 to 248.',
    ),
    "maxnreg not a list": (
        AXIS_LINES + "maxnreg = 168", "maxnreg is 168", 'a list of "auto" and multiples of 8',
    ),
    "text for a truth": (
        AXIS_LINES + 'warp_specialize = ["on"]', "warp_specialize[0] is 'on'",
        'warp_specialize takes "auto", true and false.',
    ),
    "further axes alone": ("maxnreg = [168]", "q_tile is missing", "powers of two"),
    "misspelt further axis": (
        AXIS_LINES + "warp_specialise = [true]", "did you mean warp_specialize?", "maxnreg",
    ),
    "listed further axis": (
        'configs = ["64x32x4x3:maxnreg=1"]', "configs[0]: config '64x32x4x3:maxnreg=1': maxnreg",
        "multiples of 8",
    ),
    "no config": ('description = "nothing"\n', "holds no config", "configs"),
    "empty file": ("", "holds no config", "q_tile"),
    "bad listed config": (
        'configs = ["16x16x1x1", "64x33x4x3"]', "configs[1]: config '64x33x4x3': k_tile is 33",
        "powers of two",
    ),
    "configs not a list": ('configs = "64x32x4x3"', "configs is '64x32x4x3'", "64x32x4x3"),
    "configs of numbers": ("configs = [64]", "configs is [64]", "64x32x4x3"),
    "not TOML": ("q_tile = [64,\nk_tile", "is not TOML", "Repair"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_names_the_file_the_key_and_what_is_allowed(
    name: str, tmp_path: Path
) -> None:
    text, says, hint = BROKEN[name]
    path = space_file(tmp_path, text)
    error = space_refusal(path)
    assert path in error.message
    assert says in error.message
    assert hint in error.hint or hint in error.message
    assert "\n" not in error.message + error.hint


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    missing = str(tmp_path / "absent.toml")
    error = space_refusal(missing)
    assert missing in error.message
    assert "No such file" in error.message
    (tmp_path / "folder.toml").mkdir()
    assert "Is a directory" in space_refusal(str(tmp_path / "folder.toml")).message
    (tmp_path / "bytes.toml").write_bytes(b"q_tile = [\xff]")
    assert "is not TOML" in space_refusal(str(tmp_path / "bytes.toml")).message
