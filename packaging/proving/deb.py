"""The proof of the Debian package: a clean Debian, a person at a desktop, and no network.

packaging/prove-deb PACKAGE [--wheels FOLDER] [--shots FOLDER] [--base ROOT] [--suite bookworm]

Needs root, debootstrap and apt's mirrors. Each step asserts what it says, prints one line, and
leaves a picture; nothing stays mounted or running, however it ends. --wheels names a folder with
torch, llvmlite, tokenizers and what they require (`pip download`); without it, the steps that
compute are left out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from making.desktop import APP_ID
from proving.desktop import PACKAGES, Desktop, wait_for
from proving.root import Root, enter_namespaces, leave_network
from proving.steps import run_steps, say

PACK = "cpu-linux-x86_64"
QUESTION = "What is tensor parallelism?"
IGNORED = ("dev", "proc", "run", "sys", "tmp", "home", "root", "var/cache", "var/log", "var/lib")
"""Folders in which systems and people write by themselves."""

PACKAGING = Path(__file__).parents[1]


class Proof:
    """Proof of the Debian package: its steps, in their order."""

    def __init__(self, package: Path, wheels: Path | None, root: Root, shots: Path) -> None:
        self.package = package
        self.wheels = wheels
        self.root = root
        self.desktop = Desktop(root, shots)
        self.log = shots / "tandem.log"
        self.tandem: subprocess.Popen[bytes] | None = None

    def install(self) -> None:
        """Install the package with what it depends on."""
        shutil.copy(self.package, self.root.folder / "root" / self.package.name)
        assert not shutil.which("python3", path=f"{self.root.folder}/usr/bin")
        self.root.run("apt-get", "update", "-q")
        self.root.run("apt-get", "install", "-qy", f"/root/{self.package.name}", timeout=1800)
        version = self.field("Version")
        assert self.root.run_as_person("tandem", "--version").strip() == f"tandem {version}"
        say(f"apt installs {self.package.name}; `tandem --version` answers {version}")

    def find_libraries(self) -> None:
        """Look for libraries that no package has brought."""
        script = (
            "find /usr/lib/tandem -type f \\( -name '*.so*' -o -path '*/bin/*' \\) -print0"
            " | xargs -0 ldd 2>/dev/null | grep 'not found' | sort -u || true"
        )
        missing = self.root.run("sh", "-c", script)
        assert not missing, f"libraries that no dependency brings:\n{missing}"
        say("every library that a file loads is there")

    def install_desktop(self) -> None:
        """Install a desktop, and note which files there are without Tandem."""
        self.root.run("apt-get", "install", "-qy", *PACKAGES, timeout=1800)
        self.root.run("apt-get", "purge", "-qy", "tandem")
        self.before = self.files()
        leave_network()
        self.root.run("apt-get", "install", "-qy", f"/root/{self.package.name}")
        for path in (
            "/usr/share/applications/mimeinfo.cache", "/usr/share/mime/globs2",
        ):  # fmt: skip
            text = (self.root.folder / path.lstrip("/")).read_text()
            assert "x-gguf" in text, f"{path} does not know the type"
        say("menu and file types are registered by triggers; from here on there is no network")

    def open_window(self) -> None:
        """Start Tandem and look at its first window."""
        self.desktop.start()
        self.start()
        self.desktop.shoot("first-window")
        say("the window opens")

    def install_engine(self) -> None:
        """Install the engine from a folder of wheels."""
        assert self.wheels is not None
        self.quit()
        folder = self.root.home / "wheels"
        folder.mkdir()
        subprocess.run(["mount", "-o", "bind,ro", str(self.wheels), str(folder)], check=True)
        lock = self.root.home / "engine.lock.toml"
        command = [str(PACKAGING / "lock"), PACK, "--wheels", str(self.wheels), "--out", str(lock)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        self.root.run_as_person(
            "tandem", "engine", "install", "--lock", lock.name, "--wheels", "wheels", timeout=1800
        )
        say("`tandem engine install` takes the engine from a folder of wheels")

    def generate(self) -> None:
        """Ask the bundled model in the terminal."""
        answer = self.root.run_as_person(
            "tandem", "generate", "demo", "-p", QUESTION, "--temp", "0", "--devices", "cpu"
        )
        assert "tensor" in answer.lower(), answer
        assert len(answer.split()) > 10, answer
        say(f"`tandem generate demo` answers: {answer.strip().splitlines()[0][:60]}")

    def chat(self) -> None:
        """Ask the bundled model in the window."""
        self.start("--demo")
        wait_for(lambda: "Demo" in self.desktop.title(self.window), 180, "the loaded model")
        self.desktop.type(QUESTION)
        self.desktop.press("Return")
        wait_for(lambda: len(self.answers()) == 1, 180, "an answer in the window")
        self.desktop.shoot("answer")
        say(f"the window answers: {self.answers()[0][:60]}")

    def double_click(self) -> None:
        """Open a model file as a file manager does, while a window is open."""
        source = self.root.folder / "usr/lib/tandem/src/resources/demo/tandem-demo.gguf"
        model = self.root.home / "my own model.gguf"
        model.write_bytes(source.read_bytes().replace(b"Tandem Demo", b"Anna's Demo", 1))
        self.root.run("chown", "anna:anna", f"/home/anna/{model.name}")
        kind = self.root.run_as_person("xdg-mime", "query", "filetype", model.name).strip()
        assert kind == "application/x-gguf", kind
        program = self.root.run_as_person("xdg-mime", "query", "default", kind).strip()
        assert program == f"{APP_ID}.desktop", program
        n_windows = len(self.desktop.windows())
        self.root.run_as_person("gio", "open", model.name)
        wait_for(lambda: "Anna's" in self.desktop.title(self.window), 120, "the model")
        assert len(self.desktop.windows()) == n_windows
        time.sleep(2)
        self.desktop.shoot("double-click")
        say("a .gguf file that is opened in a file manager goes to the window that is open")

    def start_again(self) -> None:
        """Start Tandem a second time."""
        said = self.root.run_as_person("tandem", timeout=60)
        assert "open already" in said, said
        assert len(self.desktop.windows()) == 1
        say(f"a second start hands over: {said.strip()}")

    def upgrade(self) -> None:
        """Install a higher version over this one."""
        self.quit()
        kept = self.person_files()
        newer = self.make_newer()
        self.root.run("apt-get", "install", "-qy", f"/root/{newer.name}")
        assert self.field("Version").endswith("+newer")
        assert self.person_files() == kept
        self.start()
        time.sleep(3)
        self.desktop.shoot("after-upgrade")
        self.quit()
        say(f"version {self.field('Version')} keeps the chat: {self.chats()[0]['title']}")

    def remove(self) -> None:
        """Remove the package, which leaves nothing to purge."""
        kept = self.person_files()
        self.root.run("apt-get", "remove", "-qy", "tandem")
        assert "tandem" not in self.root.run("dpkg-query", "-W", "-f=${Package}\\n").split()
        after = self.files()
        assert not after - self.before, sorted(after - self.before)[:20]
        assert not self.before - after, sorted(self.before - after)[:20]
        assert self.person_files() == kept
        say(f"removed: the system has its {len(after)} files of before; {len(kept)} at home stay")

    def start(self, *options: str) -> None:
        """Start Tandem and wait for its window."""
        self.tandem = self.root.start_as_person(self.log, "tandem", *options)
        self.window = self.desktop.wait_for_window()
        time.sleep(4)  # lists and devices arrive behind the first picture

    def quit(self) -> None:
        """Close Tandem as a logout does."""
        if self.tandem is None:
            return
        self.tandem.terminate()  # chroot, env and the launcher have each become the next program
        self.tandem.wait(60)
        self.tandem = None

    def field(self, name: str) -> str:
        """Return a field of the installed package."""
        return self.root.run("dpkg-query", "-W", f"-f=${{{name}}}", "tandem").strip()

    def make_newer(self) -> Path:
        """Return the same package with a higher version."""
        folder, name = self.root.folder / "root" / "newer", "newer.deb"
        subprocess.run(["dpkg-deb", "-R", str(self.package), str(folder)], check=True)
        control = folder / "DEBIAN" / "control"
        lines = control.read_text().splitlines(keepends=True)
        newer = [f"{x.strip()}+newer\n" if x.startswith("Version:") else x for x in lines]
        control.write_text("".join(newer))
        package = self.root.folder / "root" / name
        command = ["dpkg-deb", "-Zgzip", "-z1", "--build", str(folder), str(package)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        shutil.rmtree(folder)
        return package

    def files(self) -> set[str]:
        """Return the files of the system, without those that it writes by itself."""
        words = [f"-path ./{name} -prune -o" for name in IGNORED]
        script = f"cd / && find . {' '.join(words)} -print"
        return set(self.root.run("sh", "-c", script).splitlines())

    def person_files(self) -> set[str]:
        """Return the chats, models and the engine's files of the person."""
        folder = self.root.home / ".local/share/Tandem"
        return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}

    def chats(self) -> list[dict[str, Any]]:
        """Return the person's chats as they are stored."""
        folder = self.root.home / ".local/share/Tandem/chats"
        return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]

    def answers(self) -> list[str]:
        """Return the answers that are stored in chats."""
        messages = [message for chat in self.chats() for message in chat["messages"]]
        return [
            one["content"] for one in messages if one["role"] == "assistant" and one.get("stats")
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Prove the Debian package in a clean root.")
    parser.add_argument("package", type=Path)
    parser.add_argument("--wheels", type=Path, help="folder with the engine's wheels")
    parser.add_argument("--shots", type=Path, default=Path("dist/proof"), help="folder of pictures")
    parser.add_argument("--base", type=Path, help="a root of debootstrap, to be copied")
    parser.add_argument("--suite", default="bookworm")
    args = parser.parse_args()
    enter_namespaces([sys.executable, *sys.argv])
    package, shots = args.package.absolute(), args.shots.absolute()
    wheels = args.wheels and args.wheels.absolute()
    with tempfile.TemporaryDirectory(prefix="tandem-proof-") as name:
        root = Root(Path(name))
        proof = Proof(package, wheels, root, shots)
        steps = [proof.install, proof.find_libraries, proof.install_desktop, proof.open_window]
        if wheels:
            steps += [proof.install_engine, proof.generate, proof.chat, proof.double_click]
        steps += [proof.start_again, proof.upgrade, proof.remove]
        run_steps(steps, root, proof.desktop, args.suite, args.base)


if __name__ == "__main__":
    main()
