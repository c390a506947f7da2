"""Small engine packs: wheels without torch, their lock, and a program that tries them."""

import hashlib
import random
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from app.setup.engine_pack.installation import Tried, try_pack
from app.setup.engine_pack.lock import this_python, this_system
from app.setup.engine_pack.store import Pack, PackStore
from engine import make_private

SMOKE = """
import json, os, sys
sys.path.insert(0, os.environ["TANDEM_ENGINE_PACK"])
import torch
print(json.dumps({"n_tokens": torch.N_TOKENS, "version": torch.VERSION, "gpu_problem": ""}))
"""
"""Program that tries a pack, in place of the demo model's answer."""


@dataclass
class FakePack:
    """Wheels in a folder, and a lock file that names them.

    Attributes:
        wheels: folder of the wheels.
        lock: lock file.
        version: version of the wheel "torch".
    """

    wheels: Path
    lock: Path
    version: str

    def files(self) -> dict[str, bytes]:
        """Return the wheels by the paths that their addresses have."""
        return {f"/{path.name}": path.read_bytes() for path in sorted(self.wheels.iterdir())}


def make_pack(
    folder: Path, url: str = "", version: str = "9.1.0", n_bytes: int = 300_000, n_tokens: int = 8
) -> FakePack:
    """Write wheels and their lock.

    Args:
        url: address of the server that has the wheels; "" for none.
        n_bytes: size of the largest wheel.
        n_tokens: answer of the fake torch; 0 fails its trial.
    """
    wheels = folder / f"wheels-{version}"
    wheels.mkdir(parents=True)
    noise = random.Random(version).randbytes(n_bytes // 3)
    body = f"N_TOKENS = {n_tokens}\nVERSION = {version!r}\n"
    torch = {"torch/__init__.py": body.encode()}
    torch |= {f"torch/lib/part{n}.bin": noise for n in range(3)}
    packages = [
        ("torch", version, torch), ("llvmlite", "0.50.0", {"llvmlite/__init__.py": b""}),
        ("tokenizers", "0.23.0", {"tokenizers/__init__.py": b""}),
    ]  # fmt: skip
    entries, unpacked = [], 0
    for name, number, files in packages:
        path = write_wheel(wheels, name, number, files)
        place = f'url = "{url}/{path.name}"' if url else f'path = "{path.name}"'
        entries.append(
            f'[[packages]]\nname = "{name}"\nversion = "{number}"\n[[packages.wheels]]\n{place}\n'
            f"size = {path.stat().st_size}\n"
            f'hashes = {{ sha256 = "{hashlib.sha256(path.read_bytes()).hexdigest()}" }}\n'
        )
        unpacked += sum(map(len, files.values()))
    lock = folder / f"pylock.cpu-{version.replace('.', '-')}.toml"
    lock.write_text('lock-version = "1.0"\n' + "\n".join(entries) + own_table(unpacked))
    return FakePack(wheels, lock, version)


def adopt_pack(store: PackStore, version: str = "9.0.0") -> Pack:
    """Put a pack that answers into a store, without installing it."""
    make_private(store.folder)
    made = store.folder / "made"
    (made / "site" / "torch").mkdir(parents=True)
    body = f"N_TOKENS = 8\nVERSION = {version!r}\n"
    (made / "site" / "torch" / "__init__.py").write_text(body)
    return store.adopt(made, Pack("", "cpu", version, this_python(), ("site",), "0" * 64, 100))


def own_table(unpacked: int, **changes: str) -> str:
    """Return Tandem's table of a lock file for this machine."""
    values = {"backend": "cpu", "system": this_system(), "python": this_python(), **changes}
    lines = [f'{key} = "{value}"' for key, value in values.items()]
    return "\n[tool.tandem]\n" + "\n".join(lines) + f"\nunpacked-bytes = {unpacked}\n"


def write_wheel(
    folder: Path, name: str, version: str, files: Mapping[str, bytes], requires: Sequence[str] = ()
) -> Path:
    """Write a wheel; it is always the same for the same arguments."""
    path = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {line}" for line in requires]
    metadata = {
        f"{info}/METADATA": "\n".join(lines).encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    listed = [*files, *metadata, f"{info}/RECORD"]
    record = "".join(f"{name},,\n" for name in listed).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for inner, data in {**files, **metadata, f"{info}/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(inner, (2026, 1, 1, 0, 0, 0)), data)
    return path


def fake_attempt(program: str = SMOKE) -> Callable[..., Tried]:
    """Return what tries a fake pack in a child process, to which no other torch is known."""
    return partial(try_pack, command=(sys.executable, "-S", "-c", program))
