"""Faults planted in copies of the v6 kernel, each of which a sweep must find.

Every fault is a text replacement in the kernel's own source, so that it is the shipped kernel but
for that one thing. Under ``LENGTHS`` each shows on every config that a sweep would try, in the
interpreter's small problem and on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flashtune.kernels import KERNELS

BASE = "v6_heads_first"

LENGTHS = ("--N", "1100", "--N-k", "900", "--both")
"""Ragged for every tile; and with queries beyond the last key, so that the causal mask too has a
ragged last key tile."""


@dataclass(frozen=True)
class PlantedFault:
    """``replacements`` in the kernel's source end every row that they touch in ``status``."""

    name: str
    replacements: tuple[tuple[str, str], ...]
    status: str
    reason: str  # a regular expression that the rows' reason matches
    causal_only: bool = False  # without the mask the kernel is right
    options: tuple[str, ...] = ()  # of ``flashtune sweep``: the dtype in which it shows

    def write(self, folder: Path) -> Path:
        """The faulty copy in ``folder``, a FILE.py for ``--kernel``."""
        source = KERNELS[BASE].path.read_text()
        for sound, faulty in self.replacements:
            assert source.count(sound) == 1, f"{self.name}: {sound!r} is not once in {BASE}"
            source = source.replace(sound, faulty)
        path = folder / f"{self.name}.py"
        path.write_text(f'{source}\nBASED_ON = "{BASE}"\n')
        return path


FAULTS = (
    # Keys past N_k load as zeros, score 0 and vote. Where they are few among many, O stays within
    # its tolerance; SDPA's own error shows them in 16 bits, and L in every dtype.
    PlantedFault(
        "phantom_keys",
        (("visible = real_keys[None, :]", "visible = (k_rows >= 0)[None, :]"),),
        "wrong",
        r"O('s error| is off)|L is off",
    ),
    # What was added up under an older maximum keeps its old scale.
    PlantedFault(
        "rescale_left_out",
        (("acc=O_acc * alpha[:, None])", "acc=O_acc)"),),
        "wrong",
        r"O is off SDPA's by more than",
    ),
    # Each query sees one key of its future. The opposite slip hides the diagonal, and row 0 then
    # sees nothing at all.
    PlantedFault(
        "diagonal_one_too_far",
        (("k_rows[None, :] <= q_rows[:, None]", "k_rows[None, :] <= q_rows[:, None] + 1"),),
        "wrong",
        r"O is off SDPA's by more than",
        causal_only=True,
    ),
    PlantedFault(
        "diagonal_hidden",
        (("k_rows[None, :] <= q_rows[:, None]", "k_rows[None, :] < q_rows[:, None]"),),
        "wrong",
        r"O is not finite at \[0, 0, 0, 0\]",
        causal_only=True,
    ),
    PlantedFault(
        "L_in_log2_units",
        ((" * 0.6931471805599453", ""),),
        "wrong",
        r"L is off logsumexp",
    ),
    # The ragged last tile goes through the loop that checks nothing. It reads keys past the
    # tensor's end, or the next head's; whatever is there gets a vote.
    PlantedFault(
        "no_boundary_check",
        (
            (
                "unmasked_stop = N_KEYS // K_TILE_SIZE * K_TILE_SIZE",
                "unmasked_stop = (N_KEYS + K_TILE_SIZE - 1) // K_TILE_SIZE * K_TILE_SIZE",
            ),
        ),
        "wrong",
        r"O('s error| is)",
    ),
    # V's rows past N_k are not checked: P is 0 there, but 0 times what lies behind V may be NaN.
    PlantedFault(
        "no_check_on_V",
        (
            (
                "tile_offsets(k_rows, stride_vk, PADDED_D, WIDE),\n"
                "                        real_keys, D, PADDED_D, CHECK_ROWS=MASKED)",
                "tile_offsets(k_rows, stride_vk, PADDED_D, WIDE),\n"
                "                        real_keys, D, PADDED_D, CHECK_ROWS=False)",
            ),
        ),
        "wrong",
        r"O is not finite",
    ),
    # The store writes the padded rows too, over whatever lies behind O.
    PlantedFault(
        "no_check_on_the_store",
        (("               N_QUERIES, D, PADDED_D", "               N_QUERIES + 8, D, PADDED_D"),),
        "wrong",
        r"O was written past its last row",
    ),
    # P stays fp32 while V is bf16: a GPU's multiply takes one dtype, and the compiler says so.
    PlantedFault(
        "P_not_cast",
        (("tl.dot(P_ij.to(V_j.dtype), V_j", "tl.dot(P_ij, V_j"),),
        "compile_failed",
        r"fp32.*bf16",
    ),
    # O is carried from tile to tile in bf16. Only the comparison with SDPA's own error is sure to
    # find it: in fp16 it is ten times that. In bf16 it can stay under twice, for a causal row of
    # few keys has few roundings and the largest values.
    PlantedFault(
        "O_accumulated_in_16_bits",
        (
            (
                "V_j, acc=O_acc * alpha[:, None])",
                "V_j, acc=O_acc * alpha[:, None]).to(tl.bfloat16).to(tl.float32)",
            ),
        ),
        "wrong",
        r"O('s error| is off)",
        options=("--dtype", "fp16"),
    ),
)
