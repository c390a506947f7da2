"""The output of `bench`: a table, JSON or CSV, with one row per test."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from app.cli.bench.tables import BenchRow, kernel_tables, timeline, timeline_table
from app.cli.output import fallback_fields, percent, size, table
from engine import LoadParams, ModelInfo, TokenWork, kv_types, list_devices

if TYPE_CHECKING:
    from engine import BenchResult, DeviceSpeed, ProductSpeed


HEADERS = (
    "DEVICES", "SPLIT", "MODE", "KV", "THREADS", "BATCH", "TEST", "T/S", "OVERHEAD", "HOST",
    "REACHED",
)  # fmt: skip
RIGHT = frozenset({4, 5, 7, 8, 9})

FALLBACK = "FALLBACK"  # header of the second-to-last column, if any GPU was slower than possible


@dataclass(frozen=True)
class Reached:
    """The speed that a test reached, and its fraction of its devices' measured speed.

    Attributes:
        bytes_per_s: for generation, rate at which the file's weight bytes were read.
        flop_per_s: for a prompt, rate of floating-point operations in matrix products.
        fraction: fraction of the devices' measured speed; None if unknown.
        copy_fraction: `bytes_per_s` as a fraction of the GPUs' copy rate (reads and writes), only
            for generation on GPUs.
    """

    bytes_per_s: float | None = None
    flop_per_s: float | None = None
    fraction: float | None = None
    copy_fraction: float | None = None


class Report:
    """Formatter for a benchmark's rows.

    Args:
        info: header of the model file.
        work: bytes and operations per token.
        speeds: measured speeds by device id.
        has_timeline: whether to show how each rank spends the time per token.
        has_kernels: whether to show times for GPU kernels and for matrix products on the CPU.

    Attributes:
        products: measurements of matrix products on the CPU.
    """

    def __init__(
        self,
        info: ModelInfo,
        work: TokenWork,
        speeds: dict[str, DeviceSpeed],
        *,
        has_timeline: bool = False,
        has_kernels: bool = False,
    ) -> None:
        self._info = info
        self._has_kernels = has_kernels
        self.products: list[ProductSpeed] = []
        self._has_timeline = has_timeline
        self._work = work
        self._speeds = speeds
        self._names = {device.id: device.name for device in list_devices()}

    def reached(self, row: BenchRow) -> Reached:
        """Compare a row with its devices' speed; all None for a prompt followed by generation."""
        test, result = row.test, row.result
        if result is None or (test.n_prompt and test.n_gen):
            return Reached()
        used = set(row.params.all_devices)
        speeds = [self._speeds[d] for d in used if d in self._speeds]
        is_known = len(speeds) == len(used)
        if test.n_gen:
            n_bytes = self._work.n_bytes * result.avg_ts
            if not is_known:
                return Reached(bytes_per_s=n_bytes)
            copied = [s.copy_bytes_per_s or 0.0 for s in speeds]
            return Reached(
                bytes_per_s=n_bytes,
                fraction=n_bytes / sum(s.bytes_per_s for s in speeds),
                copy_fraction=n_bytes / sum(copied) if all(copied) else None,
            )
        flop = self._work.prompt_flop(test.n_prompt)
        flop *= result.avg_ts / test.n_prompt
        limit = sum(s.flop_per_s for s in speeds)
        return Reached(flop_per_s=flop, fraction=flop / limit if is_known else None)

    def document(self, rows: Sequence[BenchRow]) -> dict[str, Any]:
        """Return the JSON document."""
        machine = [{"name": self._names.get(d, d), **asdict(s)} for d, s in self._speeds.items()]
        results = [self._fields(row) for row in rows]
        if self._has_timeline:
            for fields, row in zip(results, rows, strict=True):
                fields["timeline"] = [asdict(rank) for rank in timeline(row)]
        if self._has_kernels:
            for fields, row in zip(results, rows, strict=True):
                fields["gpu"] = row.result and row.result.gpu
            products = [asdict(speed) for speed in self.products]
            return {"machine": machine, "results": results, "cpu_products": products}
        return {"machine": machine, "results": results}

    def csv(self, rows: Sequence[BenchRow]) -> str:
        """Return CSV with a header and one row per test, without individual repetitions."""
        text = io.StringIO()
        records = [{**self._fields(row), "fallbacks": _kinds(row)} for row in rows]
        names = [name for name in records[0] if name != "samples_ts"]
        writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for record in records:
            writer.writerow({name: _csv_cell(value) for name, value in record.items()})
        return text.getvalue().rstrip("\n")

    def table(self, rows: Sequence[BenchRow]) -> str:
        """Return the model, the machine, and a table with one row per test."""
        head = f"{self._model_type()}, {size(self._info.n_bytes)}, {self._info.name}"
        headers: tuple[str, ...] = HEADERS
        cells = [self._row(row) for row in rows]
        if reasons := list[str](dict.fromkeys(f.sentence for row in rows for f in row.fallbacks)):
            headers = _with_fallbacks(HEADERS, FALLBACK)
            cells = [
                _with_fallbacks(cell, ", ".join(_kinds(row)) or "-")
                for cell, row in zip(cells, rows, strict=True)
            ]
            reasons = ["", "Slower than possible:", *reasons]
        parts = [head, *self.machine(), "", table(headers, cells, RIGHT), *reasons]
        if self._has_timeline:
            parts += ["", timeline_table(rows, [shares(row.split) for row in rows])]
        if self._has_kernels:
            parts += ["", kernel_tables(rows, self.products)]
        return "\n".join(parts).rstrip()

    def machine(self) -> list[str]:
        """Describe each device's measured speed, one line per device."""
        return [
            f"{device} ({self._names.get(device, device)})"
            + (f", {speed.n_threads} threads" if speed.n_threads else "")
            + f": reads {_giga(speed.bytes_per_s)}B/s, multiplies "
            f"{_giga(speed.f32_flop_per_s)}FLOP/s in F32, "
            f"{_giga(speed.bf16_flop_per_s)}FLOP/s in BF16"
            + (f", copies {_giga(speed.copy_bytes_per_s)}B/s" if speed.copy_bytes_per_s else "")
            for device, speed in self._speeds.items()
        ]

    def _row(self, row: BenchRow) -> tuple[str, ...]:
        params, result = row.params, row.result
        n_threads = "" if row.n_threads is None else str(row.n_threads)
        setting = (
            ",".join(params.devices), shares(row.split), _mode_cell(params), params.kv_type,
            n_threads, "" if row.n_batch is None else str(row.n_batch), str(row.test),
        )  # fmt: skip
        if result is None:
            return (*setting, "-", "-", "-", row.error)
        rate = f"{result.avg_ts:.2f} ± {result.stddev_ts:.2f}"
        times = _overhead_cell(result), _host_cell(result)
        return (*setting, rate, *times, _reached_cell(self.reached(row)))

    def _fields(self, row: BenchRow) -> dict[str, Any]:
        """Return a row's fields for JSON and CSV, with llama-bench's names where possible."""
        params, test, result, info = row.params, row.test, row.result, self._info
        samples_ts = result.samples_ts if result else ()
        types = kv_types(params.kv_type)
        return {
            "model_filename": info.path,
            "model_type": self._model_type(),
            "model_size": info.n_bytes,
            "model_n_params": info.n_params,
            "devices": params.devices,
            "split": row.split,
            "split_mode": params.split_mode,
            "groups": params.group_sizes,
            "n_cpu_blocks": params.n_cpu_blocks,
            "n_cpu_moe": params.n_cpu_moe,
            "kv_on_host": params.kv_on_host,
            "p2p": params.p2p,
            "fast_prompts": params.fast_prompts,
            "overrides": tuple(f"{pattern}={target}" for pattern, target in params.overrides),
            "type_k": types.k,
            "type_v": types.v,
            "n_threads": row.n_threads,
            "n_batch": row.n_batch,
            "storage": row.storage or None,
            "load_s": row.loaded and row.loaded.seconds,
            "load_bytes_per_s": row.loaded and row.loaded.read_bytes_per_s,
            "n_prompt": test.n_prompt,
            "n_gen": test.n_gen,
            "n_depth": test.n_depth,
            "test_time": row.test_time,
            "avg_ts": result.avg_ts if result else None,
            "stddev_ts": result.stddev_ts if result else None,
            "samples_ts": samples_ts,
            "overhead_s": result.overhead_s if result else None,
            "overhead": result.overhead if result else None,
            "host_us": 1e6 * result.host_s if result and result.host_s is not None else None,
            **asdict(self.reached(row)),
            "fallbacks": fallback_fields(row.fallbacks),
            "error": f"{row.error} {row.hint}".strip() or None,
        }

    def _model_type(self) -> str:
        info, n_params = self._info, self._info.n_params
        count = f"{n_params / 1e9:.2f}B" if n_params >= 1e9 else f"{n_params / 1e6:.2f}M"
        return f"{info.architecture} {count} {info.quant}"


def _kinds(row: BenchRow) -> tuple[str, ...]:
    return tuple(dict.fromkeys(fallback.kind for fallback in row.fallbacks))


def _with_fallbacks(cells: tuple[str, ...], cell: str) -> tuple[str, ...]:
    return (*cells[:-1], cell, cells[-1])


def shares(split: Sequence[float]) -> str:
    """Return a split in command-line syntax."""
    return ",".join(f"{share:g}" for share in split)


def _mode_cell(params: LoadParams) -> str:
    mode = f"{params.split_mode} {shares(params.group_sizes)}".rstrip()
    moved = (
        (params.n_cpu_blocks, f"{params.n_cpu_blocks} blocks on CPU"),
        (params.n_cpu_moe, f"experts of {params.n_cpu_moe} on CPU"),
        (params.kv_on_host, "KV on host"),
        (params.p2p != "auto", f"P2P {params.p2p}"),
        (params.fast_prompts, "fast prompts"),
    )
    return "; ".join([mode, *(text for is_so, text in moved if is_so)])


def _csv_cell(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    return ",".join(item if isinstance(item, str) else f"{item:g}" for item in value)


def _giga(number: float) -> str:
    return f"{number / 1e9:.4g} G"


def _overhead_cell(result: BenchResult) -> str:
    if result.overhead_s is None or result.overhead is None:
        return "-"
    return f"{1000 * result.overhead_s:.2f} ms ({percent(result.overhead)})"


def _host_cell(result: BenchResult) -> str:
    return "-" if result.host_s is None else f"{1e6 * result.host_s:.0f} µs"


def _reached_cell(reached: Reached) -> str:
    if reached.bytes_per_s is not None:
        text = f"{_giga(reached.bytes_per_s)}B/s"
    elif reached.flop_per_s is not None:
        text = f"{_giga(reached.flop_per_s)}FLOP/s"
    else:
        return "-"
    parts = [] if reached.fraction is None else [percent(reached.fraction)]
    if reached.copy_fraction is not None:
        parts.append(f"{percent(reached.copy_fraction)} of copying")
    return f"{text} ({', '.join(parts)})" if parts else text
