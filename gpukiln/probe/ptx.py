"""The two kernels that every GPU runs, as PTX text, and the expected result of the first one.

The driver itself compiles PTX (libnvidia-ptxjitcompiler), so that no CUDA toolkit is needed. ISA 7.0 and
target sm_50 are read by every driver branch from 450 on and run on every GPU from Maxwell on (PTX ISA,
"Release Notes"). Runs on the machine that is verified, see gpukiln/probe/gather.py.
"""

from __future__ import annotations

import struct

TILE = 1024  # the hash starts from the element's index modulo this, so that the host can compute all of them
ROUNDS = 256
_WORD = 0xFFFFFFFF

# gpukiln_hash: out[i] = hash(i % 1024) ^ (i / 1024), see `hashed`. gpukiln_add: into[i] += from[i].
PTX = """\
.version 7.0
.target sm_50
.address_size 64

.visible .entry gpukiln_hash(
    .param .u64 hash_out,
    .param .u32 hash_count,
    .param .u32 hash_rounds
)
{
    .reg .pred %p<3>;
    .reg .f32 %f<4>;
    .reg .b32 %r<13>;
    .reg .b64 %rd<4>;

    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.u32 %r4, %r1, %r2, %r3;
    ld.param.u32 %r5, [hash_count];
    setp.ge.u32 %p1, %r4, %r5;
    @%p1 bra hash_end;
    ld.param.u32 %r6, [hash_rounds];
    and.b32 %r7, %r4, 1023;
hash_round:
    setp.eq.u32 %p2, %r6, 0;
    @%p2 bra hash_store;
    mad.lo.u32 %r7, %r7, 1664525, 1013904223;
    shr.u32 %r8, %r7, 16;
    xor.b32 %r7, %r7, %r8;
    and.b32 %r9, %r7, 0x7fffff;
    or.b32 %r9, %r9, 0x3f800000;
    shr.u32 %r10, %r7, 9;
    or.b32 %r10, %r10, 0x3f800000;
    mov.b32 %f1, %r9;
    mov.b32 %f2, %r10;
    fma.rn.f32 %f3, %f1, %f2, %f1;
    mov.b32 %r11, %f3;
    xor.b32 %r7, %r7, %r11;
    sub.u32 %r6, %r6, 1;
    bra hash_round;
hash_store:
    shr.u32 %r12, %r4, 10;
    xor.b32 %r7, %r7, %r12;
    ld.param.u64 %rd1, [hash_out];
    cvta.to.global.u64 %rd2, %rd1;
    mul.wide.u32 %rd3, %r4, 4;
    add.u64 %rd2, %rd2, %rd3;
    st.global.u32 [%rd2], %r7;
hash_end:
    ret;
}

.visible .entry gpukiln_add(
    .param .u64 add_into,
    .param .u64 add_from,
    .param .u32 add_count
)
{
    .reg .pred %p<2>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<6>;

    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.u32 %r4, %r1, %r2, %r3;
    ld.param.u32 %r5, [add_count];
    setp.ge.u32 %p1, %r4, %r5;
    @%p1 bra add_end;
    ld.param.u64 %rd1, [add_into];
    ld.param.u64 %rd2, [add_from];
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    mul.wide.u32 %rd5, %r4, 4;
    add.u64 %rd3, %rd3, %rd5;
    add.u64 %rd4, %rd4, %rd5;
    ld.global.u32 %r6, [%rd3];
    ld.global.u32 %r7, [%rd4];
    add.u32 %r8, %r6, %r7;
    st.global.u32 [%rd3], %r8;
add_end:
    ret;
}
"""


def hash_word(start: int, rounds: int = ROUNDS) -> int:
    """The hash that the kernel computes: integer multiply-add, shifts, and a fused multiply-add of floats.

    Both floats lie in [1, 2), so a * b + a has at most 49 significant bits: exact as Python's float, and
    rounded once, to a 32-bit float, by struct; as fma.rn.f32 does it.

    Args:
        start: Index of the element modulo `TILE`.
        rounds: The number of rounds.

    Returns:
        32 bits.
    """
    word = start
    for _ in range(rounds):
        word = (word * 1664525 + 1013904223) & _WORD
        word ^= word >> 16
        a = 1 + (word & 0x7FFFFF) / 0x800000
        b = 1 + (word >> 9) / 0x800000
        word ^= int(struct.unpack("<I", struct.pack("<f", a * b + a))[0])
    return word


def expected_result(tiles: int, rounds: int = ROUNDS) -> bytes:
    """The complete result of gpukiln_hash; takes about 0.3 s for any number of tiles.

    Args:
        tiles: How many times `TILE` elements of 32 bits.
        rounds: The kernel's argument.

    Returns:
        The elements, little-endian: the hash of the index modulo `TILE`, xor the tile's number.
    """
    first = int.from_bytes(struct.pack(f"<{TILE}I", *(hash_word(i, rounds) for i in range(TILE))), "little")
    ones = int.from_bytes(b"\1\0\0\0" * TILE, "little")
    return b"".join((first ^ ones * tile).to_bytes(4 * TILE, "little") for tile in range(tiles))
