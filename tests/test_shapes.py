"""The shape sets: the real file's figures, and what a broken one says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashtune import shapes
from flashtune.config_files import config_dir, read_toml
from flashtune.errors import FlashtuneError
from flashtune.records import Problem
from flashtune.shapes import load_shapes, shape_sets

# Of each model: how wide its attention is, heads x head dimension. For Qwen3 it is not the width of
# the model: 16 heads of 128 in one that is 1,024 wide, 64 in one that is 5,120 wide.
WIDTHS = {
    "gpt-2": {768},
    "llama-3-8b": {4096},
    "llama-3-70b": {8192},
    "qwen3-0.6b": {2048},
    "qwen3-8b": {4096},
    "qwen3-32b": {8192},
    "vit-l": {1024},
    "whisper": {1280},
    "stable-diffusion": {320, 640},
}


def test_every_set_has_its_width_its_sources_and_a_title() -> None:
    assert set(shape_sets()) == set(WIDTHS)
    tables = read_toml(config_dir() / "shapes.toml")
    for name in shape_sets():
        problems = load_shapes(name, 2, "fp16")
        assert {p.H * p.D for p in problems} == WIDTHS[name]
        assert {(p.B, p.dtype) for p in problems} == {(2, "fp16")}
        assert all(p.N == p.N_k for p in problems)
        assert tables[name]["title"] and tables[name]["sources"]


def test_the_sets_of_the_articles_kind() -> None:
    assert load_shapes("whisper", 1, "bf16") == [
        Problem(1, 20, 20, 1500, 1500, 64, False, "bf16"),
    ]
    assert load_shapes("llama-3-8b", 1, "bf16") == [
        Problem(1, 32, 8, N, N, 128, True, "bf16") for N in (2048, 8192)
    ]
    # Widths double as lengths shrink by four: a level of the U-Net is half as high and wide.
    assert load_shapes("stable-diffusion", 4, "bf16") == [
        Problem(4, 8, 8, 4096, 4096, 40, False, "bf16"),
        Problem(4, 8, 8, 1024, 1024, 80, False, "bf16"),
    ]


def test_an_unknown_set_lists_those_there_are() -> None:
    with pytest.raises(FlashtuneError) as raised:
        load_shapes("llama", 4, "bf16")
    assert raised.value.message == "--shapes 'llama': no set of shapes of that name"
    assert all(name in raised.value.hint for name in WIDTHS)


@pytest.mark.parametrize(
    ("layer", "message", "hint"),
    [
        ("{ H = 8, H_kv = 8, D = 64, causal = true }", "N is missing", "list of whole numbers"),
        ("{ H = 8, H_kv = 8, D = 50, N = [1], causal = true }", "D is 50", "multiple of 8"),
        ("{ H = 8, H_kv = 3, D = 64, N = [1], causal = true }", "H_kv is 3", "divides H"),
        ("{ H = true, H_kv = 1, D = 64, N = [1], causal = true }", "H is True", "whole number"),
        ("{ H = 8, H_kv = 8, D = 64, N = [0], causal = true }", "N is [0]", "from 1"),
        ("{ H = 8, H_kv = 8, D = 64, N = [], causal = true }", "N is []", "list"),
        ("{ H = 8, H_kv = 8, D = 64, N = [1], causal = 1 }", "causal is 1", "true or false"),
        ("{ H = 8, h_kv = 8, D = 64, N = [1], causal = true }", "h_kv is unknown", "H_kv"),
        ("8", "attention[0] is 8", "H_kv"),
    ],
)
def test_a_broken_set_names_the_key_and_what_it_takes(
    layer: str, message: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shapes.toml").write_text(f"[mine]\nattention = [{layer}]\n")
    monkeypatch.setattr(shapes, "config_dir", lambda: tmp_path)
    with pytest.raises(FlashtuneError, match=re.escape("mine.attention[0]")) as raised:
        load_shapes("mine", 4, "bf16")
    assert message in raised.value.message and hint in raised.value.hint


def test_a_set_without_attention_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shapes.toml").write_text('[mine]\ntitle = "mine"\n')
    monkeypatch.setattr(shapes, "config_dir", lambda: tmp_path)
    with pytest.raises(FlashtuneError, match=r"mine\.attention is None"):
        load_shapes("mine", 4, "bf16")
