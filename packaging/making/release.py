"""A release: every package that this system can build, hashes, components, licences and news.

tandem_VERSION_ARCH.deb, …                what people install
tandem-VERSION-PLATFORM.cdx.json          all components (CycloneDX 1.6)
tandem-VERSION-PLATFORM-licences.txt      their licences in full
release.json                              what an installed Tandem asks for, if a page is given
SHA256SUMS                                hashes of all of these; `sha256sum --check` reads it
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from making.cpython import fetch_python, this_platform
from making.files import hash_of
from making.licences import check_parts, licences_text, shipped_parts
from making.project import ROOT, Project
from making.sbom import write_sbom

PROGRAMS = {
    "linux": {
        "deb": ("dpkg-deb", "dpkg-shlibdeps", "patchelf"), "tarball": ("xz", "patchelf"),
        "windows": ("makensis", "7z", "x86_64-w64-mingw32-gcc"),
    },
    "macos": {"macos": ("hdiutil", "codesign", "cc")},
}  # fmt: skip
"""Targets that each system can build, and the programs that they need."""

TREES = {
    "windows": ("windows-x86_64", "windows/Tandem"),
    "macos": ("macos-aarch64", "macos/Tandem.app/Contents/Resources"),
}
"""Platform and place of the trees of targets that need not be built on their own system.

They hold the CPython of packaging/python.toml."""

SUMS = "SHA256SUMS"
NEWS = "release.json"
MAX_NEWS = 8000


def main() -> None:
    parser = argparse.ArgumentParser(description="Build what this system can of a release.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "release")
    parser.add_argument(
        "--python", type=Path, help="prefix of the CPython; fetched if none is given"
    )
    parser.add_argument("--targets", nargs="+", help="instead of all that this system can build")
    parser.add_argument("--page", default="", help="https address of the page with the downloads")
    parser.add_argument("--effort", type=int, default=6, help="how hard to compress, 0 to 9")
    parser.add_argument("--twice", action="store_true", help="build again, and compare the bytes")
    args = parser.parse_args()
    out, project, platform = args.out.absolute(), Project.read(), this_platform()
    work = out / "work"
    targets = args.targets or buildable(platform.partition("-")[0])
    build = Build(targets, args.python, args.effort)
    out.mkdir(parents=True, exist_ok=True)
    results = [write_news(out / NEWS, project.version, args.page)] if args.page else []
    packages = build.run(work / "first")
    if args.twice:
        compare(packages, build.run(work / "second"))
    results += [Path(shutil.copy2(package, out)) for package in packages]
    for built_for, tree in sorted({TREES.get(target, (platform, "tandem")) for target in targets}):
        results += describe(work / "first" / tree, out, project, built_for)
    write_sums(out / SUMS, results)
    sys.stdout.write("".join(f"{path}\n" for path in (*results, out / SUMS)))


def buildable(system: str) -> list[str]:
    """Return the targets that a system can build with the programs that it has.

    Raises:
        SystemExit: it can build none; the programs that it lacks are named.
    """
    missing: set[str] = set()
    found = []
    for target, programs in PROGRAMS.get(system, {}).items():
        lacked = {name for name in programs if shutil.which(name) is None}
        missing |= lacked
        if lacked:
            sys.stderr.write(f"{target} is left out: {', '.join(sorted(lacked))} not found.\n")
        else:
            found.append(target)
    if not found:
        raise SystemExit(
            f"Nothing can be built here without {', '.join(sorted(missing)) or system}."
        )
    return found


@dataclass(frozen=True, slots=True)
class Build:
    """Calls of `packaging/build` for some targets.

    Attributes:
        python: prefix of the CPython for this system; None for that of packaging/python.toml.
        effort: how hard archives are compressed, 0 to 9.
    """

    targets: Sequence[str]
    python: Path | None
    effort: int

    def run(self, out: Path) -> list[Path]:
        """Build all of them in a fresh folder; return the packages.

        Raises:
            SystemExit: one of them fails.
        """
        shutil.rmtree(out, ignore_errors=True)
        own = [target for target in self.targets if target not in TREES]
        others = [target for target in self.targets if target in TREES]
        packages = []
        if own:
            prefix = self.python or fetch_python(this_platform(), out.with_name("python"))
            packages += self._call(own, out, "--python", str(prefix))
        return packages + (self._call(others, out) if others else [])

    def _call(self, targets: Sequence[str], out: Path, *more: str) -> list[Path]:
        program = str(ROOT / "packaging" / "making" / "main.py")
        options = ("--out", str(out), "--effort", str(self.effort), *more)
        done = subprocess.run(
            [sys.executable, program, *targets, *options],
            cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"packaging/build {' '.join(targets)} has failed.")
        return [Path(line) for line in done.stdout.splitlines()[-len(targets) :]]


def compare(first: Iterable[Path], second: Iterable[Path]) -> None:
    """Refuse packages whose bytes differ between two builds.

    Raises:
        SystemExit: some do.
    """
    differing = [a.name for a, b in zip(first, second, strict=True) if hash_of(a) != hash_of(b)]
    if differing:
        raise SystemExit(f"Two builds differ: {', '.join(differing)}.")


def describe(tree: Path, out: Path, project: Project, platform: str) -> list[Path]:
    """Write the list of components and their licences; return both files."""
    parts = shipped_parts(tree, project)
    check_parts(parts)
    name = f"tandem-{project.version}-{platform}"
    components, licences = out / f"{name}.cdx.json", out / f"{name}-licences.txt"
    write_sbom(components, parts, project, platform)
    licences.write_text(licences_text(parts), encoding="utf-8")
    return [components, licences]


def write_news(path: Path, version: str, page: str) -> Path:
    """Write what an installed Tandem asks for, with the news of the changelog.

    Raises:
        SystemExit: it would not be understood.
    """
    from app.setup.updates.release import parse_release
    from engine import EngineError

    news = changes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    text = json.dumps({"version": version, "page": page, "news": news}, ensure_ascii=False)
    try:
        parse_release(text.encode())
    except EngineError:
        raise SystemExit(f"{page!r} is no page that an installed Tandem would open.") from None
    path.write_text(text + "\n", encoding="utf-8")
    return path


def changes(changelog: str, version: str) -> str:
    """Return a version's section of a changelog as plain text, else that of what is unreleased."""
    sections = dict(re.findall(r"^## \[?([\w.-]+).*?\n(.*?)(?=^## |\Z)", changelog, re.M | re.S))
    text = sections.get(version, sections.get("Unreleased", "")).strip()
    text = re.sub(r"\n  (?=\S)", " ", text)  # lines of one entry
    lines = re.sub(r"^#+ |[*`]|\]\([^)]*\)|\[", "", text, flags=re.M)
    return lines[:MAX_NEWS].rpartition("\n")[0] if len(lines) > MAX_NEWS else lines


def write_sums(path: Path, files: Iterable[Path]) -> None:
    """Write the hashes of files, by name."""
    lines = [f"{hash_of(file)}  {file.name}\n" for file in sorted(files, key=lambda f: f.name)]
    path.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
