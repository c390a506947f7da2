"""Sizes at which GPUs change how they exchange values; planning predicts time by them."""

MOST_IN_F32 = 8 << 10
"""Largest value that GPUs exchange in F32, in elements (32 KiB); larger ones go in BF16."""

MOST_ONE_SHOT = 64 << 10
"""Largest value that goes by a one-shot all-reduce, in elements: 8 rows of 8192. Its packets take
as many bytes as F32 (256 KiB), about 20 us on a link of 12 GB/s; for larger values the latency of
copies is small beside the time of the transfer."""
