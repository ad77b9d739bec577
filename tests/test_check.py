"""The references are exact whatever the user tells torch, and torch is left as the user set it."""

from __future__ import annotations

import pytest
import torch

from flashtune.check import fp32_matmuls, random_inputs, references
from flashtune.records import Problem

PROBLEM = Problem(1, 2, 2, 33, 17, 32, True, "fp32")


def test_the_users_precision_can_be_read_and_changed_after_a_reference() -> None:
    """torch refuses to read a setting that was made partly by its old and partly by its new way."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    inputs = random_inputs(PROBLEM, "cpu")
    try:
        for allowed in (False, True, False, True):
            matmul.allow_tf32 = allowed
            references(PROBLEM, inputs)
            assert matmul.allow_tf32 == allowed
            assert torch.get_float32_matmul_precision() == ("high" if allowed else "highest")
    finally:
        matmul.allow_tf32 = False
        matmul.fp32_precision = before


@pytest.mark.parametrize("users", ["none", "ieee", "tf32"])
def test_the_precision_asked_for_holds_inside_and_the_users_own_again_after(users: str) -> None:
    libraries = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [library.fp32_precision for library in libraries]
    try:
        for library in libraries:
            library.fp32_precision = users
        with pytest.raises(ZeroDivisionError), fp32_matmuls("ieee"):
            assert [library.fp32_precision for library in libraries] == ["ieee", "ieee"]
            raise ZeroDivisionError
        assert [library.fp32_precision for library in libraries] == [users, users]
    finally:
        for library, own in zip(libraries, before, strict=True):
            library.fp32_precision = own
