"""A loaded model: loader, forward passes on all ranks, re-splits."""
