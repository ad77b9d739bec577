"""Spaces and configs as a user writes them: what they mean, and every way to get them wrong."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
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


@given(
    st.sampled_from([16, 32, 64, 128, 256, 512]), st.sampled_from([16, 32, 64, 128, 256, 512]),
    st.sampled_from([1, 2, 4, 8, 16, 32]), st.integers(1, 10),
)  # fmt: skip
def test_a_config_is_read_as_it_is_written(q: int, k: int, warps: int, stages: int) -> None:
    config = Config(q, k, warps, stages)
    assert parse_config(str(config)) == config


@given(st.text(alphabet="0123456789x.-+ e_²", max_size=14))
def test_any_text_is_a_config_or_a_clear_error(text: str) -> None:
    try:
        config = parse_config(text)
    except FlashtuneError as error:
        assert repr(text) in error.message
        assert error.hint
        assert "\n" not in error.message + error.hint
    else:
        assert all(allowed(axis, getattr(config, axis)) for axis in AXES)


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
