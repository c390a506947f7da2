"""The Flatpak: a manifest around the archive, built where Flatpak's runtime is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from making.desktop import APP_ID
from making.files import hash_of
from making.project import ROOT, Project
from making.tarball import build_tarball

MANIFEST = ROOT / "packaging" / "flatpak" / f"{APP_ID}.yml"


def build_flatpak(tree: Path, out: Path, project: Project) -> Path:
    """Write the manifest for a tree, and the bundle where it can be built.

    Returns:
        The path of the bundle, or of the manifest on a machine that cannot build it.

    Raises:
        SystemExit: flatpak-builder cannot read the manifest, or fails.
    """
    archive = build_tarball(tree, out, project)
    folder = out / "flatpak"
    folder.mkdir(exist_ok=True)
    manifest = folder / MANIFEST.name
    text = MANIFEST.read_text().replace("@ARCHIVE@", f"../{archive.name}")
    manifest.write_text(text.replace("@SHA256@", hash_of(archive)))
    if shutil.which("flatpak-builder") is None:
        sys.stderr.write("There is no flatpak-builder here, so the bundle is not built.\n")
        return manifest
    _run(folder, "flatpak-builder", "--show-manifest", manifest.name, quiet=True)
    if not _has_runtime():
        sys.stderr.write("The runtime is not installed here, so the bundle is not built. Run:\n")
        sys.stderr.write(f"  {_install_runtime()}\n")
        return manifest
    _run(folder, "flatpak-builder", "--force-clean", "--repo=repo", "build", manifest.name)
    bundle = out / f"tandem-{project.version}.flatpak"
    _run(folder, "flatpak", "build-bundle", "repo", str(bundle), APP_ID)
    return bundle


def _runtime() -> tuple[str, str]:
    """Return name and version of the runtime in the manifest."""
    lines = MANIFEST.read_text().splitlines()
    fields = dict(line.split(": ", 1) for line in lines if line.startswith("runtime"))
    return fields["runtime"], fields["runtime-version"].strip("'")


def _has_runtime() -> bool:
    name, version = _runtime()
    done = subprocess.run(["flatpak", "info", f"{name}//{version}"], capture_output=True)
    return done.returncode == 0


def _install_runtime() -> str:
    name, version = _runtime()
    sdk = name.replace(".Platform", ".Sdk")
    return f"flatpak install --user flathub {name}//{version} {sdk}//{version}"


def _run(folder: Path, *command: str, quiet: bool = False) -> None:
    stdout = subprocess.DEVNULL if quiet else sys.stderr
    done = subprocess.run(command, cwd=folder, stdout=stdout, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:2])} has failed with status {done.returncode}.")
