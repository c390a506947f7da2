"""Inline PTX, applied to each element; `ASM` says whether the target supports it.

Functions without a branch for other targets may only be used if ASM is set. Loads are marked as
impure, so that the compiler does not delay a load that was issued early.
"""

import triton
import triton.language as tl
from triton.language.target_info import current_target

THREADS = tl.constexpr(1024)  # maximum number of threads in a program


@triton.constexpr_function
def is_before_volta():
    """Return whether kernels are compiled for an NVIDIA GPU before Volta.

    These have neither memory orders nor hints for the L1 cache.
    """
    target = None if triton.knobs.runtime.interpret else current_target()
    return target is not None and target.backend == "cuda" and target.arch < 70


@triton.constexpr_function
def load_once():
    """Return the instruction that loads four words, bypassing the L1 cache if the target can."""
    hint = "" if is_before_volta() else ".L1::no_allocate"
    return f"ld.global.nc{hint}.v4.b32 {{$0, $1, $2, $3}}, [$4];"


@triton.constexpr_function
def store_pair():
    """Return code that stores {$2, $4} and {$3, $4} at [$1] if $5 is set, bypassing all caches."""
    how = "volatile" if is_before_volta() else "relaxed.sys"
    return (
        "{ .reg .pred p; .reg .b64 a, b; setp.ne.s32 p, $5, 0; mov.b64 a, {$2, $4}; "
        f"mov.b64 b, {{$3, $4}}; @p st.{how}.global.v2.b64 [$1], {{a, b}}; mov.u32 $0, 0; }}"
    )


@triton.constexpr_function
def ordered_add(is_ordered):
    """Return code that adds $2 to [$1] if $3 is set, for GPUs before Volta.

    Their atomics order nothing, so a fence goes before a release and after an acquire.
    """
    fence = "@p membar.gl; " if is_ordered else ""
    return (
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; mov.u32 $0, 0; "
        f"{fence}@p atom.global.add.u32 $0, [$1], $2; {fence}}}"
    )


@triton.jit
def atomic_add(address, n, SEM: tl.constexpr):
    """Add n to the int32 at one address and return the old value.

    Args:
        SEM: "relaxed" or "acq_rel"; see `tl.atomic_add`.
    """
    if is_before_volta():  # Triton always writes a memory order
        is_first = tl.arange(0, THREADS) == 0  # one thread: no two hold the same element
        found = tl.inline_asm_elementwise(
            ordered_add(SEM == "acq_rel"), "=r,l,r,r", [address, n, is_first.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        return tl.sum(found)
    else:
        return tl.atomic_add(address, n, sem=SEM)


@triton.jit
def four_words(address, ASM: tl.constexpr):
    """Return the four 32-bit words at each address, which is a multiple of 16 bytes.

    For data that is read once, for example weights: it is not kept in the L1 cache.
    """
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            load_once(), "=r,=r,=r,=r,l",
            [address], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
        return a, b, c, d
    else:
        at = address.to(tl.pointer_type(tl.int32))
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def two_words(address, ASM: tl.constexpr):
    """Return the two 32-bit words at each address, which is a multiple of 8 bytes."""
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
    """Return `four_words` for data that many programs read, for example activations."""
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
    """Return `total` plus the dot product of two groups of four bytes (`dp4a`); only if ASM is set.

    The bytes in x are signed; IS_SIGNED says whether the weights are too.
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
    """Return four of the eight bytes in `low` and `high`, each selected by four bits (`prmt`).

    If the highest of the four bits is set, copies of the byte's sign replace it; only for ASM.
    """
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, selector],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def one_word(address, ASM: tl.constexpr):
    """Return the 32-bit word at each address, which is a multiple of 4 bytes."""
    if ASM:
        return tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];", "=r,l",
            [address], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return tl.load(address.to(tl.pointer_type(tl.int32)))
