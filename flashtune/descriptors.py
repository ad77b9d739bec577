"""When each buffer of a kernel that loads through tensor descriptors is live.

TMA copies a tile, however small, and then signals a barrier. So every tile in flight has a barrier
beside it, and nothing is too small or too crooked to be copied ahead. Tiles lie in the swizzle that
the tensor cores read, but these read fp32 only along the keys: V is turned round into a buffer of
its own. The order was read off modules that Triton 3.6 and 3.9 had lowered. The notation is that of
shared.py; ``T`` is V turned round, ``full`` the barriers of tiles that are copied ahead, ``k`` the
one of a K that is not, ``map`` where a descriptor is put together.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashtune.gpu import GpuSpec
from flashtune.tensor_cores import Instructions

TMA_SINCE = 90  # compute capability 9.0
TMA_ALIGNMENT = 16  # bytes, of addresses and strides
MAP_BYTES = 128  # of a descriptor

_MAPS = "map! map! map!"
_START = {
    Instructions.MMA: f"{_MAPS} Q+ q! Q-",  # on into registers
    Instructions.WGMMA: f"{_MAPS} Q+ q!",
    Instructions.TCGEN05: f"{_MAPS} Q+ q!",
}
_LOOPS = {  # by (instructions, copied ahead, V turned round)
    (Instructions.MMA, True, False): "K+ V+ full+ full'+ {softmax} full'- full- V- K-",
    (Instructions.MMA, False, False): "K+ k! K- V+ v! {softmax} V-",
    # K and V are waited for together, and share their barriers.
    (Instructions.WGMMA, True, False): "K+ V+ full+ Q- full- V- K-",
    (Instructions.WGMMA, True, True): "K+ V+ full+ full'+ T+ Q- T- full'- full- V- K-",
    (Instructions.WGMMA, False, False): "K+ k! V+ v! Q- K- V-",
    (Instructions.WGMMA, False, True): "K+ k! V+ v! V- T+ Q- K- T-",
    (Instructions.TCGEN05, True, False): (
        "bar+ bar'+ K+ V+ full+ full'+ {first} {between} {beside} Q- {last}"
        " full'- full- V- K- bar'- bar-"
    ),
    (Instructions.TCGEN05, True, True): (
        "bar+ bar'+ K+ V+ full+ full'+ T+ {first} {between} T'+ {beside} Q- {last} T'- T-"
        " full'- full- V- K- bar'- bar-"
    ),
    (Instructions.TCGEN05, False, False): "K+ k! V+ v! s+ K- Q- s- {single} s'+ V- s'-",
    (Instructions.TCGEN05, False, True): "K+ k! V+ v! V- T+ s+ K- Q- s- {single} s'+ T- s'-",
}


def has_tma(gpu: GpuSpec) -> bool:
    """Whether the card copies by descriptors. For one that does not, Triton emulates them."""
    return gpu.cc_number >= TMA_SINCE


def schedule(
    kind: Instructions, ahead: bool, turned: bool, loops: int, scratch: Mapping[str, str]
) -> str:
    """The kernel as a line of events. ``ahead``: tiles are copied ahead of their use; ``turned``:
    V is turned round; ``scratch``: what the loop's other operations need, by their place in it."""
    loop = _LOOPS[kind, ahead, turned].format_map(scratch)
    first = [loop.replace(" Q-", "")] * (loops - 1)
    return " ".join([_START[kind], *first, loop])


def tiles_ahead(kind: Instructions, stages: int, turned: bool) -> tuple[int, int]:
    """Tiles of K and of V that are in shared memory at once, with ``stages`` of two or more.

    wgmma reads in place, so that a tile stays while the next one comes in already; not so a V that
    is turned round first.
    """
    if kind is Instructions.MMA:
        return stages - 1, stages - 1
    return stages, stages - 1 if turned and kind is Instructions.WGMMA else stages
