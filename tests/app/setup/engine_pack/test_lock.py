"""Tandem's own lock files are what pyproject.toml allows; damaged ones are a sentence."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from making.locks import pack_names, read_source
from packaging.requirements import Requirement
from packaging.tags import Tag
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from app.setup.engine_pack.lock import HOSTS, BadLock, Lock, find_locks, locks_dir, read_lock
from app.setup.engine_pack.store import TITLES
from engine.util.pack import LIBRARIES
from tests.helpers.fake_pack import FakePack, make_pack, own_table

ROOT = Path(__file__).parents[4]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OWN = sorted(locks_dir().glob("pylock.*.toml"))
TAGS = {
    "linux-x86_64": r"manylinux_2_\d+_x86_64|any",
    "linux-aarch64": r"manylinux_2_\d+_aarch64|any",
    "windows-x86_64": r"win_amd64|any", "macos-aarch64": r"macosx_1[0-4]_\d_(arm64|universal2)|any",
}  # fmt: skip


def bounds() -> dict[str, Requirement]:
    """Return what pyproject.toml demands of the engine's own libraries."""
    lines = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["gpu"]]
    lines += [line for line in PROJECT["optional-dependencies"]["dev"] if "triton" in line]
    return {Requirement(line).name: Requirement(line) for line in lines}


@pytest.fixture(params=OWN, ids=lambda path: path.name)
def own(request: pytest.FixtureRequest) -> tuple[Path, Lock]:
    return request.param, read_lock(request.param)


def test_linux_windows_and_macos_have_a_pack() -> None:
    systems = {read_lock(path).system for path in OWN}
    assert systems >= {"linux-x86_64", "windows-x86_64", "macos-aarch64"}


def test_a_lock_is_one_of_the_table(own: tuple[Path, Lock]) -> None:
    path, lock = own
    name = path.name.removeprefix("pylock.").removesuffix(".toml")
    assert name == f"{lock.backend}-{lock.system}"
    assert name in pack_names()
    assert lock.backend in TITLES
    python = tomllib.loads((ROOT / "packaging" / "python.toml").read_text())["version"]
    assert python.startswith(f"{lock.python}."), "it is for the Python of the packages"
    assert read_source(name).python == lock.python


def test_a_lock_has_what_pyproject_allows(own: tuple[Path, Lock]) -> None:
    versions = {wheel.name: Version(wheel.version) for wheel in own[1].wheels}
    allowed = bounds()
    assert set(LIBRARIES) <= set(versions)
    for name, version in versions.items():
        if name in allowed:
            assert version in allowed[name].specifier, f"run packaging/lock for {name}"
    window = {name for name in allowed if name not in LIBRARIES and "triton" not in name}
    assert not window & set(versions), "the window has these"
    if own[1].backend in ("cuda13", "cuda12"):
        assert {"triton", "triton-windows"} & set(versions)


def test_a_lock_names_public_servers_and_fitting_wheels(own: tuple[Path, Lock]) -> None:
    path, lock = own
    hosts = {urlsplit(url).netloc for url in re.findall(r"\w+://[^\s\"]+", path.read_text())}
    assert hosts <= set(HOSTS)
    for wheel in lock.wheels:
        assert wheel.file.url.startswith("https://")
        name, version, _, tags = parse_wheel_filename(wheel.file.name)
        assert (name, version) == (wheel.name, Version(wheel.version))
        assert any(fits(tag, lock) for tag in tags), wheel.file.name
    assert lock.unpacked_bytes > lock.n_bytes > 100_000_000


def fits(tag: Tag, lock: Lock) -> bool:
    """Return whether a wheel with a tag can be used on the system of a lock."""
    minor = lock.python.replace(".", "")
    older = tag.abi in ("abi3", "none") and tag.interpreter.startswith(("cp3", "py3"))
    is_python = tag.interpreter in (f"cp{minor}", "py3", "py2") or older
    platform = tag.platform.replace("manylinux2014", "manylinux_2_17")
    platform = platform.replace("manylinux1", "manylinux_2_5")
    return is_python and re.fullmatch(TAGS[lock.system], platform) is not None


@pytest.fixture
def pack(tmp_path: Path) -> FakePack:
    return make_pack(tmp_path)


def test_locks_for_this_system_are_found(pack: FakePack) -> None:
    folder = pack.lock.parent
    other = folder / "pylock.other.toml"
    other.write_text(pack.lock.read_text().partition("[tool")[0] + own_table(1, system="plan9"))
    (lock,) = find_locks(folder)
    assert (lock.version, lock.is_for_here) == ("9.1.0", True)
    assert not read_lock(other).is_for_here
    assert lock.n_bytes == sum(path.stat().st_size for path in pack.wheels.iterdir())
    assert not lock.is_complete, "its wheels have no addresses"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[[packages]]", "[[packs]]"),
        ("size = ", "size = -"),
        ('sha256 = "', 'sha256 = "x'),
        ('path = "', 'path = "../../'),
        ('path = "', 'url = "file:///'),
        (".whl", ".tar.gz"),
        ('name = "torch"', 'name = "touch"'),
        ('name = "torch"', 'name = "../torch"'),
        ("[tool.tandem]", "[tool.other]"),
        ("unpacked-bytes = ", "unpacked-bytes = 0.5 # "),
        ("=", "= ="),
    ],
)
def test_a_damaged_lock_is_a_sentence(pack: FakePack, old: str, new: str) -> None:
    text = pack.lock.read_text()
    assert old in text
    pack.lock.write_text(text.replace(old, new))
    with pytest.raises(BadLock, match="is not an engine lock file"):
        read_lock(pack.lock)


def test_a_lock_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadLock, match="cannot be read: No such file"):
        read_lock(tmp_path / "pylock.toml")
