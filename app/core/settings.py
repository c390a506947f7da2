"""Settings that survive a restart: one frozen dataclass in one JSON file.

Reading never fails: values of the wrong type revert to their defaults, a broken file is renamed,
and keys from newer versions are kept unchanged. A field created by `_shown` becomes a row on the
settings page without further code; fields created by `_option` are internal to the window.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_type_hints

from app.core.translation import reason_of, tr_later
from engine import EngineError, SamplingParams, WrongValue, read_file, read_value, replace_json

log = logging.getLogger(__name__)

SCHEMA = 1
MAX_RECENT = 10

MAX_BYTES = 4 << 20
"""Maximum size of the file."""

Takes = Literal["at once", "next load", "next start"]
"""When a change takes effect: immediately, on the next model load, or on the next start."""

SECTIONS = (
    tr_later("Appearance"), tr_later("Chats"), tr_later("Models"), tr_later("Downloads"),
    tr_later("Tools"), tr_later("Engine"), tr_later("Notifications"), tr_later("Updates"),
    tr_later("Privacy"),
)  # fmt: skip
"""Sections of the settings page, in order; empty ones are not shown."""


@dataclass(frozen=True, slots=True)
class ShownSetting:
    """A setting as the settings page shows it; texts are translated when shown.

    Args:
        help: one or two sentences on its effect.
        section: one of `SECTIONS`.
        choices: labels by allowed value; {} if any value is allowed.
        least, most: smallest and largest allowed number.
        step: increment of the arrow buttons.
        unit: unit of a number, such as "GiB".
        words: search terms.
        takes: when a change takes effect.
        hint: placeholder for a text or path field.
        is_long: whether a text may have several lines.
    """

    title: str
    help: str
    section: str
    choices: Mapping[str, str] = field(default_factory=dict)
    least: int = 0
    most: int = 0
    step: int = 1
    unit: str = ""
    words: str = ""
    takes: Takes = "at once"
    hint: str = ""
    is_long: bool = False


def _option(default: object, title: str) -> Any:
    if isinstance(default, dict):
        return field(default_factory=dict, metadata={"title": title})
    return field(default=default, metadata={"title": title})


def _shown(default: object, title: str, help: str, section: str, **more: Any) -> Any:  # noqa: A002
    """Return a field for a setting on the settings page; for `more`, see `ShownSetting`."""
    assert section in SECTIONS
    return field(default=default, metadata={"shown": ShownSetting(title, help, section, **more)})


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings.

    Attributes:
        sampling: fields of `SamplingParams` that differ from the default, by name.
        pinned_models: paths of the models listed first on the models page.
        plans: split settings by model path, in the format of `app.devices.split`.
        speeds: tokens per second of the last answer, by model path.
        chat_cache_gib: maximum disk space for the chats' KV caches, in GiB; 0 for no caches.
        unload_after_min: idle minutes after which a model is unloaded; 0 for never.
        presets: user-defined sampling presets by name, with values as in `sampling`.
        geometry, window_state: Qt's window layout, in base64.
        releases_checked: time of the last check for a new release, in seconds since 1970.
        newest_release: the release that this check found.
        dismissed_release: version whose notice was dismissed.
        servers: addresses of remote model servers, most recently used first, without API keys.
        unknown: entries written by other versions, saved back unchanged.
    """

    theme: str = _shown(
        "system", tr_later("Theme"), tr_later("Light or dark."), "Appearance",
        choices={
            "system": tr_later("Follow system"), "light": tr_later("Light"),
            "dark": tr_later("Dark"),
        },
        words=tr_later("theme appearance night mode"),
    )  # fmt: skip
    language: str = _shown(
        "system", tr_later("Language"),
        tr_later("Language of the window. The command line is always English."),
        "Appearance",
        choices={"system": tr_later("Follow system"), "en": "English", "de": "Deutsch"},
        words=tr_later("English German translation"), takes="next start",
    )  # fmt: skip
    zoom: int = _shown(
        100, tr_later("Size"), tr_later("Size of text, icons and controls."),
        "Appearance", least=70, most=200, step=10, unit="%",
        words=tr_later("zoom scale font larger smaller"),
    )  # fmt: skip
    system_prompt: str = _shown(
        "", tr_later("System prompt for new chats"),
        tr_later("Instructions before the first message. Existing chats keep theirs."),
        "Chats", is_long=True, hint=tr_later("You are a helpful assistant."),
        words=tr_later("instructions role persona"),
    )  # fmt: skip
    sampling: Mapping[str, Any] = _option({}, "Sampling")
    recent_models: tuple[str, ...] = _option((), "Recent models")
    model_folders: tuple[str, ...] = _shown(
        (), tr_later("Model folders"),
        tr_later("The models page also searches these folders and their subfolders."),
        "Models", words=tr_later("directory path library gguf"),
    )  # fmt: skip
    pinned_models: tuple[str, ...] = _option((), "Pinned models")
    plans: Mapping[str, Any] = _option({}, "Split of each model")
    chat_cache_gib: int = _shown(
        4, tr_later("Disk space for chat caches"),
        tr_later("Chats with a KV cache on disk continue without recomputation. 0 keeps none."),
        "Chats", least=0, most=1000, unit="GiB", takes="next start",
        words=tr_later("kv cache memory storage"),
    )  # fmt: skip
    download_folder: str = _shown(
        "", tr_later("Download folder"),
        tr_later("Models are saved as publisher/name in this folder."),
        "Downloads",
        words=tr_later("hugging face path directory disk save"),
        hint=tr_later("Tandem's own folder"),
    )  # fmt: skip
    opens_downloads: bool = _shown(
        False, tr_later("Open a model when its download finishes"),
        tr_later("While an answer is being written, a notice offers to open the model."),
        "Downloads",
        words=tr_later("hugging face load start automatic"),
    )  # fmt: skip
    last_chat: str = _option("", "Chat that was open")
    geometry: str = _option("", "Window geometry")
    window_state: str = _option("", "Window layout")
    presets: Mapping[str, Any] = _option({}, "Presets of sampling")
    unload_after_min: int = _shown(
        0, tr_later("Unload an unused model after"),
        tr_later("Frees its memory; the next message loads it again. 0 keeps it loaded."),
        "Models", least=0, most=1440, unit=tr_later("min"),
        words=tr_later("idle memory free eject time"),
    )  # fmt: skip
    tray: bool = _shown(
        False, tr_later("Tray icon"),
        tr_later("Clicking it brings the window to the front or minimises it."),
        "Notifications", words=tr_later("system tray status bar background"),
    )  # fmt: skip
    notifications: bool = _shown(
        False, tr_later("Desktop notifications"),
        tr_later("Notify me when an answer or download finishes in the background."),
        "Notifications", words=tr_later("notification sound alert"),
    )  # fmt: skip
    unknown: Mapping[str, Any] = _option({}, "Kept for other versions")
    monitor_graphs: tuple[str, ...] = _option(("memory", "load", "rate"), "Graphs of the monitor")
    speeds: Mapping[str, Any] = _option({}, "Measured speed of each model")
    pending_engine: str = _option("", "Engine being installed")
    monitor_overview: bool = _option(False, "Whether the monitor shows the overview")
    server_port: int = _option(11435, "Port of the server")
    server_needs_key: bool = _option(False, "Whether the server asks for a key")
    server_on_network: bool = _option(False, "Whether other machines reach the server")
    server_for_pages: bool = _option(False, "Whether web pages may use the server")
    server_pages: tuple[str, ...] = _option((), "Web pages that may use the server")
    server_at_start: bool = _option(False, "Whether the server starts with the window")

    auto_titles: bool = _shown(
        True, tr_later("Let the model title new chats"),
        tr_later(
            "After its first answer, the model writes a short title while it is idle. Titles that"
            " you set are kept."
        ),
        "Chats", words=tr_later("title automatic rename summary"),
    )  # fmt: skip
    servers: tuple[str, ...] = _option((), "Servers of remote models")
    checks_releases: bool = _shown(
        False, tr_later("Check for a new release once a day"),
        tr_later(
            "Checks the address below and shows a notice. Nothing is downloaded or changed."
        ),
        "Updates", words=tr_later("update upgrade version new internet network"),
    )  # fmt: skip
    release_address: str = _shown(
        "", tr_later("Release address"),
        tr_later("Its response names the newest release. The server sees your IP address."),
        "Updates", words=tr_later("update url server internet network"),
        hint=tr_later("Tandem's default"),
    )  # fmt: skip
    releases_checked: int = _option(0, "When releases were checked")
    newest_release: Mapping[str, Any] = _option({}, "Newest release")
    dismissed_release: str = _option("", "Dismissed release")

    def with_recent(self, path: str) -> Settings:
        """Return a copy with `path` as the most recent model."""
        others = tuple(p for p in self.recent_models if p != path)
        return replace(self, recent_models=(path, *others)[:MAX_RECENT])

    def with_server(self, url: str) -> Settings:
        """Return a copy with `url` as the most recently used server."""
        others = tuple(server for server in self.servers if server != url)
        return replace(self, servers=(url, *others)[:MAX_RECENT])

    def with_plan(self, path: str, plan: Mapping[str, Any]) -> Settings:
        """Return a copy with a new split for the model at `path`."""
        return replace(self, plans={**self.plans, path: plan})

    def with_speed(self, path: str, tokens_per_s: float) -> Settings:
        """Return a copy with a new measured speed for the model at `path`."""
        return replace(self, speeds={**self.speeds, path: round(tokens_per_s, 2)})

    def sampling_params(self) -> SamplingParams:
        """Return the stored sampling parameters, without values that the engine rejects."""
        return SamplingParams(**accepted_sampling(self.sampling))


def accepted_sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that `SamplingParams` accepts."""
    with suppress(EngineError, TypeError):  # the usual case: one check instead of many
        whole = SamplingParams(**values)
        return {name: getattr(whole, name) for name in values}
    accepted: dict[str, Any] = {}
    for name, value in values.items():
        try:
            accepted[name] = getattr(SamplingParams(**{name: value}), name)
        except (EngineError, TypeError):
            log.info("stored sampling value dropped: %s", name)
    return accepted


def changed_sampling(
    params: SamplingParams, default: SamplingParams | None = None
) -> dict[str, Any]:
    """Return the fields that differ from `default`, or from the engine's defaults."""
    default = default or SamplingParams()
    names = (spec.name for spec in fields(SamplingParams))
    return {n: getattr(params, n) for n in names if getattr(params, n) != getattr(default, n)}


def parse_settings(data: Mapping[str, Any]) -> Settings:
    """Return settings from JSON data; invalid values revert to their defaults."""
    known = {spec.name: spec for spec in fields(Settings) if spec.name != "unknown"}
    hints, values = get_type_hints(Settings), dict[str, Any]()
    for name, spec in known.items():
        with suppress(WrongValue):
            value = read_value(hints[name], data.get(name))
            if _is_allowed(value, spec.metadata.get("shown")):
                values[name] = value
    others = {k: v for k, v in data.items() if k not in known and k != "schema"}
    return Settings(**values, unknown=others)


def shown_settings() -> dict[str, ShownSetting]:
    """Return the settings on the settings page by name, in declaration order."""
    found = {spec.name: spec.metadata.get("shown") for spec in fields(Settings)}
    return {name: shown for name, shown in found.items() if shown is not None}


def _is_allowed(value: object, shown: ShownSetting | None) -> bool:
    if shown is None:
        return True
    if isinstance(value, int) and shown.most:
        return shown.least <= value <= shown.most
    return not shown.choices or value in shown.choices


class SettingsStore:
    """The current settings and their file; `save` is thread-safe.

    Args:
        unsaved: names of settings that change only in memory; the file keeps its values.

    Attributes:
        problem: why the last `save` failed, or "".
    """

    def __init__(self, path: Path, unsaved: Collection[str] = ()) -> None:
        self._path, self._unsaved = path, unsaved
        self.problem = ""
        self._writing = threading.Lock()
        self.current = self._saved = self._read()

    def put(self, settings: Settings) -> None:
        """Replace the current settings; `save` writes them."""
        self.current = settings

    def save(self) -> bool:
        """Write the file if anything changed; return whether the settings are on disk."""
        with self._writing:
            return self._save()

    def _save(self) -> bool:
        kept = {name: getattr(self._saved, name) for name in self._unsaved}
        settings = replace(self.current, **kept)
        if settings == self._saved:
            return True
        data = asdict(settings)
        unknown = data.pop("unknown")
        try:
            values = unknown | {"schema": SCHEMA} | data
            replace_json(self._path, values, ensure_ascii=False)
        except (OSError, TypeError, ValueError) as error:
            log.info("settings were not saved: %s", error)
            self.problem = reason_of(error)
            return False
        self.problem = ""
        self._saved = settings
        return True

    def _read(self) -> Settings:
        try:
            text = read_file(self._path, MAX_BYTES).decode(errors="surrogatepass")
            data = json.loads(text)
            if not isinstance(data, dict):
                raise ValueError("not a JSON object")
        except FileNotFoundError:
            return Settings()
        except (OSError, ValueError, RecursionError) as error:
            log.info("settings could not be read and were set aside: %s", error)
            self._set_aside()
            return Settings()
        return parse_settings(data)

    def _set_aside(self) -> None:
        try:
            self._path.replace(self._path.with_name(self._path.name + ".broken"))
        except OSError as error:
            log.info("the broken settings file stays in place: %s", error)
