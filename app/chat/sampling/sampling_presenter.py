"""Presenter for the sampling panel: values for one chat or all chats, presets, and notes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from PySide6.QtCore import QObject, Signal, Slot

import engine
from app.chat.conversation import Conversation
from app.chat.sampling import presets
from app.chat.sampling.panel import SamplingPanel
from app.chat.sampling.presets import Chosen, FormCheck, params_of
from app.chat.session import ChatSession
from app.core.engine_client import EngineClient
from app.core.notice import Notice
from app.core.settings import Settings, SettingsStore, changed_sampling
from app.core.translation import tr, tr_n, translated
from engine import ModelLoaded, SamplingParams

TITLES = {spec.name: str(spec.metadata["title"]) for spec in fields(SamplingParams)}


class SamplingPresenter(QObject):
    """Connects the sampling panel with the open chat, the settings and the loaded model.

    A chat without custom values uses the values in the settings.

    Args:
        keep: stores and saves settings.
    """

    noticed = Signal(object)  # Notice
    summary_changed = Signal(str)

    def __init__(
        self, panel: SamplingPanel, session: ChatSession, client: EngineClient,
        settings: SettingsStore, keep: Callable[[Settings], None], parent: QObject,
    ) -> None:  # fmt: skip
        super().__init__(parent)
        self._panel, self._session, self._client = panel, session, client
        self._settings, self._keep = settings, keep
        self._recommended = SamplingParams()
        self._form_check = FormCheck(self)
        self._form_check.checked.connect(panel.set_form_problem)
        panel.chosen_changed.connect(self._on_chosen)
        panel.own_toggled.connect(self.set_own)
        panel.prompt.changed.connect(session.set_system_prompt)
        panel.prompt.default_requested.connect(self._keep_prompt)
        panel.presets.chosen.connect(self.use_preset)
        panel.presets.save_requested.connect(self.save_preset)
        panel.presets.rename_requested.connect(self.rename_preset)
        panel.presets.delete_requested.connect(self.delete_preset)
        panel.presets.for_all_requested.connect(self.use_for_all)
        session.opened.connect(self._on_opened)
        client.loaded.connect(self._on_loaded)
        client.unloaded.connect(self._show_facts)

    def params_for(self, chat: Conversation) -> SamplingParams:
        """Return the sampling parameters for a chat's next answer."""
        return params_of(self._chosen_of(chat), self._recommended)

    def close(self) -> None:
        """Wait for the check of the structured output options."""
        self._form_check.close()

    def flush(self) -> None:
        """Store a typed system prompt now, before another chat opens or a message is sent."""
        self._panel.prompt.flush()

    @Slot(bool)
    def set_own(self, is_own: bool) -> None:
        """Give the open chat its own copy of the shared values, or remove its own values."""
        chat = self._session.current
        before = chat.sampling
        if is_own == (before is not None):
            return
        self._session.set_sampling(dict(self._settings.current.sampling) if is_own else None)
        self._show()
        if before:
            text = tr("This chat now uses the shared values.")
            self._offer_undo(text, lambda: self._put_back(chat, before, was_own=True))

    @Slot(str)
    def use_preset(self, name: str) -> None:
        """Apply a preset; a notice offers to undo the change."""
        found = next((preset for preset in self._presets() if preset.name == name), None)
        if found is None:
            return
        chat, before = self._session.current, dict(self._chosen_of(self._session.current))
        is_named = presets.matching(self._presets(), before, self._recommended) is not None
        was_own = chat.sampling is not None
        self._store(dict(found.chosen))
        self._show()
        if not is_named:
            text = tr("“{name}” is in use.").format(name=name)
            self._offer_undo(text, lambda: self._put_back(chat, before, was_own=was_own))

    @Slot(str)
    def save_preset(self, name: str) -> None:
        """Save the current values as a preset."""
        own = self._settings.current.presets
        if problem := presets.name_problem(name, own):
            self.noticed.emit(Notice(problem, tr("Choose another name."), "warning"))
            return
        chosen = self._chosen_of(self._session.current)
        self._keep_presets(presets.with_preset(own, name, chosen))

    @Slot(str, str)
    def rename_preset(self, name: str, new: str) -> None:
        own = self._settings.current.presets
        if problem := presets.name_problem(new, own, name):
            self.noticed.emit(Notice(problem, tr("Choose another name."), "warning"))
            return
        self._keep_presets(presets.with_new_name(own, name, new))

    @Slot(str)
    def delete_preset(self, name: str) -> None:
        """Delete a preset; a notice offers to undo the deletion."""
        before = self._settings.current.presets
        self._keep_presets(presets.without_preset(before, name))
        text = tr("The preset “{name}” was deleted.").format(name=name)
        self._offer_undo(text, lambda: self._keep_presets(before))

    @Slot()
    def use_for_all(self) -> None:
        """Use the open chat's values for all chats that have none of their own."""
        before = dict(self._settings.current.sampling)
        self._set_all(dict(self._chosen_of(self._session.current)))
        text = tr("All chats without their own values now use these.")
        self._offer_undo(text, lambda: self._set_all(before))

    def _chosen_of(self, chat: Conversation) -> Chosen:
        return self._settings.current.sampling if chat.sampling is None else chat.sampling

    def _presets(self) -> list[presets.Preset]:
        return presets.all_presets(self._settings.current.presets)

    def _store(self, chosen: Mapping[str, Any]) -> None:
        chat = self._session.current
        old = self._chosen_of(chat)
        kept = {name: value for name, value in old.items() if name not in TITLES}
        if chat.sampling is None:
            self._set_all({**kept, **chosen})
        else:
            self._session.set_sampling({**kept, **chosen})

    def _set_all(self, chosen: Chosen) -> None:
        self._keep(replace(self._settings.current, sampling=chosen))
        self._show()

    def _put_back(self, chat: Conversation, chosen: Chosen, *, was_own: bool) -> None:
        if was_own:
            self._session.set_sampling(dict(chosen), chat)
        else:
            self._set_all(chosen)
        self._show()

    def _keep_presets(self, own: Mapping[str, Any]) -> None:
        self._keep(replace(self._settings.current, presets=own))
        self._show_facts()

    def _offer_undo(self, text: str, undo: Callable[[], None]) -> None:
        self.noticed.emit(Notice(text, action=tr("Undo"), on_action=undo))

    @Slot(object)
    def _on_chosen(self, chosen: dict[str, Any]) -> None:
        self._store(chosen)
        self._show_facts()

    @Slot(object)
    def _on_opened(self, chat: Conversation) -> None:
        self._panel.prompt.set_text(chat.system_prompt)
        self._show()

    @Slot(object)
    def _on_loaded(self, loaded: ModelLoaded) -> None:
        self._recommended = SamplingParams(**dict(loaded.info.sampling))  # type: ignore[arg-type]
        self._show()

    @Slot(str)
    def _keep_prompt(self, text: str) -> None:
        self._keep(replace(self._settings.current, system_prompt=text))
        self.noticed.emit(Notice(tr("New chats will start with this system prompt.")))

    def _show(self) -> None:
        self._panel.show_values(self._chosen_of(self._session.current), self._recommended)
        self._show_facts()

    @Slot()
    def _show_facts(self) -> None:
        chat, found = self._session.current, self._presets()
        is_own = chat.sampling is not None
        used = presets.matching(found, self._chosen_of(chat), self._recommended)
        name = used.name if used else ""
        self._panel.set_scope(is_own=is_own)
        self._panel.presets.set_presets(found, name, is_own=is_own)
        n = len(changed_sampling(self.params_for(chat), self._recommended))
        summary = name or tr_n("{n} changed", "{n} changed", n)
        self.summary_changed.emit(f"{tr('Sampling')} · {summary}")
        self._panel.set_host_note(*self._host_note(self.params_for(chat)))
        self._form_check.look_at(self.params_for(chat))

    def _host_note(self, params: SamplingParams) -> tuple[str, list[str]]:
        loaded = self._client.model
        if loaded is None or "cpu" in loaded.params.all_devices:  # always sampled on the CPU
            return "", []
        facts = loaded.info.n_vocab, len(loaded.params.all_devices)
        why = engine.why_sampled_on_host(params, *facts)
        if not why:
            return "", []
        plain = SamplingParams(temperature=params.temperature)
        names = [
            name
            for name, value in changed_sampling(params).items()
            if engine.why_sampled_on_host(replace(plain, **{name: value}), *facts)
        ]
        because = ", ".join(tr(TITLES[name]) for name in names) or translated(why)
        note = tr("Sampled on the CPU, which is slower than on the GPUs: {why}.")
        return note.format(why=because), names
