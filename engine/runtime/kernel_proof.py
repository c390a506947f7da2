"""Check of our kernels on the GPUs that a model will use, before it is planned."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engine.hardware.backend_choice import kernels_for, refuse_kernels, refused_kernels


def prove_kernels(names: Iterable[str]) -> tuple[str, ...]:
    """Check that our kernels compute correctly on GPUs; refuse them where they do not.

    Args:
        names: ids of devices; "cpu" is skipped.

    Returns:
        A sentence for each GPU whose kernels are refused; it computes with the torch reference.
    """
    found = []
    for name in dict.fromkeys(names):
        if name != "cpu" and kernels_for(name):
            from engine.gpu.self_test import problem_of  # needs Triton

            if problem := problem_of(torch.device(name)):
                refuse_kernels(name, problem)
        if why := refused_kernels().get(name):
            found.append(f"{name} computes with PyTorch's kernels, which are slower: {why}.")
    return tuple(found)
