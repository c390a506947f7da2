"""The proof of the archive: a Debian of another version, a person without root, and no network.

packaging/prove-tarball ARCHIVE [--shots FOLDER] [--base ROOT] [--suite trixie]

Needs root, debootstrap and apt's mirrors. Each step asserts what it says, prints one line, and
leaves a picture; nothing stays mounted or running, however it ends. On a system whose C library is
too old (--suite bullseye), install.sh has to say so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from making.desktop import APP_ID
from proving.desktop import PACKAGES, Desktop
from proving.root import Root, enter_namespaces, leave_network
from proving.steps import run_steps, say

LIBRARIES = (
    "libegl1", "libgl1", "libfontconfig1", "libxkbcommon-x11-0", "libgssapi-krb5-2", "libglib2.0-0",
    "libdbus-1-3", "libxcb-glx0", "libxcb-xkb1", "libxcb-shape0", "libwayland-cursor0",
    "desktop-file-utils", "shared-mime-info", "xdg-utils", "xz-utils", "ca-certificates",
)  # fmt: skip
"""Packages of libraries that every desktop has; those of xcb-util are not among them."""

FOLDER = "Down loads"
PREFIX = "my own apps"


class Proof:
    """Proof of the archive: its steps, in their order."""

    def __init__(self, archive: Path, root: Root, shots: Path) -> None:
        self.archive = archive
        self.root = root
        self.desktop = Desktop(root, shots)
        self.log = shots / "tandem.log"

    def prepare(self) -> None:
        """Install a desktop and unpack the archive as the person."""
        self.root.run("apt-get", "update", "-q")
        self.root.run("apt-get", "install", "-qy", *LIBRARIES, *PACKAGES, timeout=1800)
        leave_network()
        folder = self.root.home / FOLDER
        folder.mkdir()
        subprocess.run(["tar", "-xf", str(self.archive), "-C", str(folder)], check=True)
        self.root.run("chown", "-R", "anna:anna", f"/home/anna/{FOLDER}")
        (self.unpacked,) = (f"{FOLDER}/{path.name}" for path in folder.iterdir())
        self.before = self.files()
        say(f"{self.archive.name} is unpacked in a folder with a space; there is no network")

    def refuse(self) -> None:
        """Run install.sh on a system that is too old."""
        try:
            self.root.run_as_person(f"./{self.unpacked}/install.sh")
        except AssertionError as error:
            said = str(error).splitlines()[-1]
            assert "needs the GNU C library" in said, said
            assert self.files() == self.before
            say(f"it is refused, and nothing is changed: {said}")
            return
        raise AssertionError("it was installed on a system that is too old")

    def start_in_place(self) -> None:
        """Start the AppDir where it was unpacked."""
        self.desktop.start()
        self.open_and_close(f"./{self.unpacked}/Tandem.AppDir/AppRun", "in-place")
        say("AppRun opens the window without any installation")

    def install(self) -> None:
        """Install for the person, and again over it."""
        for _ in range(2):
            said = self.root.run_as_person(f"./{self.unpacked}/install.sh")
        assert "is installed" in said, said
        assert "lacks" not in said, said
        self.check_entry("/home/anna/.local/bin/tandem")
        self.open_and_close("/home/anna/.local/bin/tandem", "installed")
        say(f"install.sh, twice: {said.splitlines()[0]}")

    def uninstall(self) -> None:
        """Remove it, and look for what is left."""
        said = self.root.run_as_person("/home/anna/.local/lib/tandem/install.sh", "--uninstall")
        left = {path for path in self.files() - self.before if "/Tandem/" not in path}
        assert not left, sorted(left)
        assert (self.root.home / ".config/Tandem/settings.json").is_file(), said
        say("--uninstall leaves the person's data, and nothing else")

    def install_elsewhere(self) -> None:
        """Install into a folder with spaces, and remove it again."""
        self.root.run_as_person(f"./{self.unpacked}/install.sh", "--prefix", PREFIX)
        program = f"/home/anna/{PREFIX}/bin/tandem"
        self.check_entry(program)
        self.open_and_close(program, "with-spaces")
        self.root.run_as_person(f"./{self.unpacked}/install.sh", "--prefix", PREFIX, "--uninstall")
        assert not [path for path in self.files() if path.startswith(f"{PREFIX}/")]
        say(f"--prefix {PREFIX!r} works, and is empty after --uninstall")

    def check_entry(self, program: str) -> None:
        """Check that the menu entry starts a program, and model files open with it."""
        entry = self.root.home / ".local/share/applications" / f"{APP_ID}.desktop"
        path = f"/{entry.relative_to(self.root.folder)}"
        self.root.run_as_person("desktop-file-validate", path)
        assert f'Exec="{program}" %f\n' in entry.read_text()
        model = self.root.home / "a model.gguf"
        model.write_bytes(b"GGUF\x03\0\0\0")
        kind = self.root.run_as_person("xdg-mime", "query", "filetype", model.name).strip()
        default = self.root.run_as_person("xdg-mime", "query", "default", kind).strip()
        model.unlink()
        assert (kind, default) == ("application/x-gguf", f"{APP_ID}.desktop"), (kind, default)
        started = self.root.start_as_person(
            self.log, "gio", "launch", f"/{entry.relative_to(self.root.folder)}"
        )
        window = self.desktop.wait_for_window()
        assert started.wait(20) == 0
        self.desktop.close(window)

    def open_and_close(self, program: str, name: str) -> None:
        """Start a program, take a picture, and end it."""
        tandem = self.root.start_as_person(self.log, program)
        window = self.desktop.wait_for_window()
        time.sleep(4)
        self.desktop.shoot(name)
        self.desktop.close(window)
        tandem.wait(60)

    def files(self) -> set[str]:
        """Return the files in the person's home, without other programs' caches."""
        home = self.root.home
        names = {str(path.relative_to(home)) for path in home.rglob("*") if not path.is_dir()}
        return {name for name in names if not name.startswith(".cache/")}


def main() -> None:
    parser = argparse.ArgumentParser(description="Prove the archive in a clean root.")
    parser.add_argument("archive", type=Path)
    parser.add_argument("--shots", type=Path, default=Path("dist/proof"), help="folder of pictures")
    parser.add_argument("--base", type=Path, help="a root of debootstrap, to be copied")
    parser.add_argument("--suite", default="trixie")
    args = parser.parse_args()
    enter_namespaces([sys.executable, *sys.argv])
    archive, shots = args.archive.absolute(), args.shots.absolute()
    with tempfile.TemporaryDirectory(prefix="tandem-proof-") as name:
        root = Root(Path(name))
        proof = Proof(archive, root, shots)
        steps = [proof.prepare]
        if args.suite == "bullseye":
            steps += [proof.refuse]
        else:
            steps += [proof.start_in_place, proof.install, proof.uninstall, proof.install_elsewhere]
        run_steps(steps, root, proof.desktop, args.suite, args.base)


if __name__ == "__main__":
    main()
