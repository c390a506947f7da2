"""The private CPython of packages: fetched as packaging/python.toml names it, checked, unpacked.

packaging/python [PLATFORM] --out FOLDER     prints the prefix to give to `packaging/build --python`
packaging/python --renew RELEASE VERSION     writes another release and its hashes into the table
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
import tarfile
import tomllib
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.parse import quote

from making.files import hash_of

TABLE = Path(__file__).resolve().parents[1] / "python.toml"
SYSTEMS = {"Linux": "linux", "Darwin": "macos", "Windows": "windows"}
MACHINES = {"x86_64": "x86_64", "AMD64": "x86_64", "arm64": "aarch64", "aarch64": "aarch64"}
WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Build:
    """A CPython of python-build-standalone for one platform.

    Attributes:
        file: name of its archive.
        url: address of the archive.
        sha256: hash of the archive.
    """

    version: str
    file: str
    url: str
    sha256: str


def this_platform() -> str:
    """Return the name that this computer has in the table, such as "linux-x86_64"."""
    system, machine = platform.system(), platform.machine()
    return f"{SYSTEMS.get(system, system)}-{MACHINES.get(machine, machine)}"


def read_build(name: str, table: Path = TABLE) -> Build:
    """Return what the table says of a platform.

    Raises:
        SystemExit: it says nothing of it, or names no hash.
    """
    known = tomllib.loads(table.read_text(encoding="utf-8"))
    target, sha256 = known["targets"].get(name), known["sha256"].get(name, "")
    if target is None or not re.fullmatch("[0-9a-f]{64}", sha256):
        raise SystemExit(
            f"{table.name} names no CPython with a SHA-256 for {name}. "
            f"`packaging/python --renew RELEASE VERSION` writes them."
        )
    file = _file(known["version"], known["release"], target)
    return Build(known["version"], file, _url(known["address"], known["release"], file), sha256)


def fetch_python(name: str, folder: Path, table: Path = TABLE) -> Path:
    """Fetch and unpack the CPython of a platform; one that has arrived before is checked again.

    Returns:
        The prefix, a folder below `folder`.

    Raises:
        SystemExit: it cannot be fetched, or is not what the table names.
    """
    build = read_build(name, table)
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / build.file
    if not archive.is_file() or hash_of(archive) != build.sha256:
        archive.write_bytes(_get(build.url))
    found = hash_of(archive)
    if found != build.sha256:
        archive.unlink()
        raise SystemExit(f"{build.url} has the SHA-256 {found}, not {build.sha256}.")
    prefix = folder / name
    with tarfile.open(archive) as packed:
        packed.extractall(prefix, filter="data")
    return prefix / "python"


def renew(release: str, version: str, table: Path = TABLE) -> None:
    """Write another release into the table, with the hashes that it publishes.

    Raises:
        SystemExit: it publishes none for one of the platforms.
    """
    text = table.read_text(encoding="utf-8")
    known = tomllib.loads(text)
    sums = _get(_url(known["address"], release, "SHA256SUMS")).decode()
    published = {name: sha256 for sha256, name in re.findall(r"^(\w{64}) [ *](\S+)$", sums, re.M)}
    text = re.sub(r'^version = ".*"', f'version = "{version}"', text, flags=re.M)
    text = re.sub(r'^release = ".*"', f'release = "{release}"', text, flags=re.M)
    head, _, _ = text.partition("[sha256]\n")
    lines = []
    for name, target in known["targets"].items():
        file = _file(version, release, target)
        if file not in published:
            raise SystemExit(f"The release {release} has no {file}.")
        lines.append(f'{name} = "{published[file]}"\n')
    table.write_text(f"{head}[sha256]\n{''.join(lines)}", encoding="utf-8")


def _file(version: str, release: str, target: str) -> str:
    return f"cpython-{version}+{release}-{target}-install_only_stripped.tar.gz"


def _url(address: str, release: str, file: str) -> str:
    return f"{address}/{release}/{quote(file)}"


def _get(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            data: bytes = answer.read()
    except (URLError, OSError) as error:
        raise SystemExit(f"{url} cannot be fetched: {error}") from None
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch the CPython that a package holds.")
    parser.add_argument("platform", nargs="?", default=this_platform())
    parser.add_argument("--out", type=Path, default=Path("dist") / "python")
    parser.add_argument("--renew", nargs=2, metavar=("RELEASE", "VERSION"))
    args = parser.parse_args()
    if args.renew:
        renew(*args.renew)
    else:
        sys.stdout.write(f"{fetch_python(args.platform, args.out).resolve()}\n")


if __name__ == "__main__":
    main()
