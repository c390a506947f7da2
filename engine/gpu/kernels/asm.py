"""NVIDIA's own instructions, element by element; `ASM` says whether there are such.

What has no plain form here is only for use where there are. Reads stay where they are: what is
asked for early shall be on its way early.
"""

import triton
import triton.language as tl


@triton.jit
def four_words(address, ASM: tl.constexpr):
    """Four neighbouring 32-bit words from each address on, a multiple of 16 bytes.

    They are read once only, like weights: nothing is kept for those who read them again.
    """
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            "ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l",
            [address], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
        return a, b, c, d
    else:
        at = address.to(tl.pointer_type(tl.int32))
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def two_words(address, ASM: tl.constexpr):
    """Two neighbouring 32-bit words from each address on, a multiple of 8 bytes."""
    if ASM:
        a, b = tl.inline_asm_elementwise(
            "ld.global.nc.v2.b32 {$0, $1}, [$2];", "=r,=r,l",
            [address], dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
        return a, b
    else:
        at = address.to(tl.pointer_type(tl.int32))
        return tl.load(at), tl.load(at + 1)


@triton.jit
def four_shared_words(address, ASM: tl.constexpr):
    """`four_words` of what many programs read, like activations."""
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l",
            [address], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
        return a, b, c, d
    else:
        return four_words(address, ASM)


@triton.jit
def dot_of_bytes(weights, x, total, IS_SIGNED: tl.constexpr):
    """`dp4a`: `total` plus the products of four bytes each; those of x are signed.

    Only for use where ASM is set.

    Args:
        IS_SIGNED: whether those of the weights are signed.
    """
    if IS_SIGNED:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [weights, x, total],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [weights, x, total],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def chosen_bytes(low, high, selector):
    """`prmt`: four of the eight bytes of `low` and `high`, as four bits each in `selector` say.

    The highest of the four asks for the sign of the byte in its place. Only for use where ASM is
    set.
    """
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, selector],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def one_word(address, ASM: tl.constexpr):
    """A 32-bit word from each address on, a multiple of 4 bytes."""
    if ASM:
        return tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];", "=r,l",
            [address], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return tl.load(address.to(tl.pointer_type(tl.int32)))
