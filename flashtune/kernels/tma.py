"""What kernels that load by TMA share: a head's tensor descriptor, and what TMA can read."""

from typing import Any

import triton
import triton.language as tl

from flashtune.descriptors import TMA_ALIGNMENT


@triton.jit
def head_descriptor(
    base, rows, row_stride, D: tl.constexpr, PADDED_D: tl.constexpr, TILE_SIZE: tl.constexpr
):
    """A descriptor of one head, whose tiles are (TILE_SIZE, PADDED_D): zeros beyond (rows, D)."""
    # A single row is never stepped from, and the launcher passes 0: TMA need not accept that.
    row_stride = tl.where(rows == 1, D, row_stride)
    return tl.make_tensor_descriptor(base, [rows, D], [row_stride, 1], [TILE_SIZE, PADDED_D])


def refuse_what_tma_cannot_read(*values: Any, **named: Any) -> None:
    """Raises ValueError unless Q, K and V begin, and step from row to row and head to head, in
    multiples of 16 bytes: TMA does not fail on others, it reads something else.

    A kernel's pre-run hook: Triton calls it with a launch's arguments before it does anything. They
    are those of ``launch.arguments``, by name or in that order.
    """
    arguments = dict(zip(_NAMES, values, strict=False)) | named
    for letter, axes in (("q", "bhq"), ("k", "bhk"), ("v", "bhk")):
        tensor = arguments[f"{letter.upper()}_ptr"]
        element_bytes = 4 if str(tensor.dtype).endswith("float32") else 2
        steps = [arguments[f"stride_{letter}{axis}"] * element_bytes for axis in axes]
        off = [f"a stride of {step} bytes" for step in steps if step % TMA_ALIGNMENT]
        if tensor.data_ptr() % TMA_ALIGNMENT:
            off.append(f"address {tensor.data_ptr():#x}")
        if off:
            raise ValueError(
                f"{letter.upper()} has {' and '.join(off)}: this kernel loads through TMA, which"
                f" reads at multiples of {TMA_ALIGNMENT} bytes; v6_heads_first takes any layout"
            )


_NAMES = (
    "Q_ptr", "K_ptr", "V_ptr", "O_ptr", "L_ptr",
    "stride_qb", "stride_qh", "stride_qq", "stride_kb", "stride_kh", "stride_kk",
    "stride_vb", "stride_vh", "stride_vk",
)  # fmt: skip
