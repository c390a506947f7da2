"""Sizes at which GPUs change how they exchange values; planning predicts time by them."""

MOST_IN_F32 = 8 << 10
"""Most elements of a value that GPUs exchange in F32 (32 KiB); larger ones are rounded to BF16."""

MOST_ONE_SHOT = 64 << 10
"""Most elements of a value that goes by a one-shot all-reduce: 8 rows of 8192. Its packets take as
many bytes as F32 (256 KiB), about 20 us on a link of 12 GB/s; beyond it the latency of copies is
small beside their speed."""
