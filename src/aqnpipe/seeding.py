"""Keyed randomness: (seed, stream, counters...) determine every random draw, so draws do not depend on history."""

import hashlib
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def derive_seed(seed: int, stream: str, *counters: int) -> int:
    """Return a 63-bit seed that is a pure function of its arguments.

    `stream` names the purpose of the numbers ("rollout", "mask", ...); `counters` are step, layer, call and so on.
    Different arguments give unrelated seeds (BLAKE2b).
    """
    name = stream.encode()
    packed = struct.pack(f"<qI{len(name)}s{len(counters)}q", seed, len(name), name, *counters)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def keyed_generator(device: "torch.device | str", seed: int, stream: str, *counters: int) -> "torch.Generator":
    """Return a fresh torch generator on `device`, seeded by `derive_seed`."""
    import torch

    generator = torch.Generator(device=device)
    generator.manual_seed(derive_seed(seed, stream, *counters))
    return generator
