"""Builds the application and wires its parts: the only place that knows all of them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from PySide6.QtCore import QObject, Qt, QTimer, Slot
from PySide6.QtWidgets import QApplication

from app import paths
from app.chat.conversation import Conversation
from app.chat.store import ChatStore
from app.chat_session import ChatSession
from app.device_poller import DevicePoller
from app.engine_client import EngineClient, EngineState
from app.garbage import GarbageCollector
from app.model_session import ModelSession
from app.notice import Notice
from app.settings import SettingsStore, changed_sampling
from app.theme import apply_theme, theme_signals
from app.views.main_window import MainWindow
from app.views.monitor_panel import MonitorPanel
from app.views.split_panel import SplitPanel
from engine import (
    EngineHost,
    Finished,
    HostEvent,
    ModelInfo,
    ModelLoaded,
    SamplingParams,
    ThreadHost,
    list_devices,
)

log = logging.getLogger(__name__)

SAVE_MS = 500
ENGINE_MS = 150  # the first picture comes before torch is imported


class Shell(QObject):
    """The running application: services, window and what connects them."""

    def __init__(
        self,
        app: QApplication,
        make_host: Callable[[Callable[[HostEvent], None]], EngineHost] = ThreadHost,
    ) -> None:
        super().__init__(app)
        self._app = app
        self.settings = SettingsStore(paths.settings_file())
        apply_theme(app, self.settings.current.theme)
        self.client = EngineClient(make_host, self)
        self.split, self.monitor = SplitPanel(), MonitorPanel()
        self.window = MainWindow(self.split, self.monitor)
        self.models = ModelSession(self.client, self.split.load_params, self)
        self.session = ChatSession(
            ChatStore(paths.chats_dir()), self.client, self._sampling, self._allow_shift, self
        )
        self.poller = DevicePoller(self)
        self.garbage = GarbageCollector(self._is_idle, self)
        self._save_timer = QTimer(self, singleShot=True, interval=SAVE_MS)
        self._save_timer.timeout.connect(self.settings.save)
        self._engine_timer = QTimer(self, singleShot=True, interval=ENGINE_MS)
        self._engine_timer.timeout.connect(self.client.start)
        self._is_closed = False
        self._wire_models()
        self._wire_chat()
        self._wire_answer()
        self._wire_settings()
        self._wire_window()

    def start(self) -> None:
        """Fill the window with what was there last time and show it."""
        current, window = self.settings.current, self.window
        self.split.set_devices(list_devices())
        window.sampling.set_params(current.sampling_params())
        window.sampling.set_theme(current.theme)
        window.restore_layout(current.geometry, current.window_state)
        self._show_sampling_summary()
        self._show_models()
        self.session.start(current.last_chat, current.system_prompt)
        self.poller.start()
        self.garbage.start()
        window.show()
        window.composer.setFocus()
        self._engine_timer.start()

    @Slot()
    def open_demo(self) -> None:
        path = paths.demo_model()
        if path is None:
            self._notify(Notice("This installation has no demo model.", kind="warning"))
        else:
            self.models.open(str(path))

    @Slot()
    def close(self) -> None:
        """Keep everything, end the engine; the window may go."""
        if self._is_closed:
            return
        self._is_closed = True
        self._engine_timer.stop()
        self.window.composer.flush_draft()
        self.window.sampling.flush_prompt()
        self.poller.stop()
        self.models.close()
        self.client.shutdown()
        self.session.close()
        geometry, state = self.window.layout_state()
        self.settings.update(
            geometry=geometry, window_state=state, last_chat=self.session.current.id
        )
        self._save_timer.stop()
        self.settings.save()
        self.garbage.stop()

    # wiring

    def _wire_models(self) -> None:
        models, bar, split = self.models, self.window.model_bar, self.split
        bar.open_requested.connect(self.window.pick_model)
        bar.demo_requested.connect(self.open_demo)
        bar.recent_chosen.connect(models.open)
        for source in (bar, split):
            source.load_requested.connect(models.load)
            source.cancel_requested.connect(models.cancel)
            source.eject_requested.connect(models.eject)
        start = self.window.start_view
        start.open_requested.connect(self.window.pick_model)
        start.demo_requested.connect(self.open_demo)
        start.recent_chosen.connect(models.open)
        models.selected.connect(self._on_selected)
        models.loading.connect(self._on_loading)
        models.loaded.connect(self._on_loaded)
        models.emptied.connect(self._on_emptied)
        models.noticed.connect(self._notify)
        self.client.load_progress.connect(bar.set_progress)
        self.client.load_progress.connect(split.set_progress)

    def _wire_chat(self) -> None:
        session, window = self.session, self.window
        chats, view, composer = window.chat_list, window.chat_view, window.composer
        chats.new_requested.connect(self._new_chat)
        chats.chosen.connect(self._open_chat)
        chats.renamed.connect(session.rename)
        chats.delete_requested.connect(self._delete_chat)
        session.chats_changed.connect(self._show_chats)
        session.opened.connect(self._on_opened)
        session.draft_restored.connect(composer.set_text)
        session.noticed.connect(self._notify)
        view.resend_requested.connect(session.edit)
        view.regenerate_requested.connect(session.regenerate)
        composer.sent.connect(self._send)
        composer.stop_requested.connect(session.stop)
        composer.draft_changed.connect(session.set_draft)
        composer.sampling_clicked.connect(window.toggle_settings)

    def _wire_answer(self) -> None:
        session, view, client = self.session, self.window.chat_view, self.client
        session.message_added.connect(self._on_message_added)
        session.messages_cut.connect(view.cut)
        session.answer_text.connect(view.grow)
        session.answer_closed.connect(view.close_answer)
        session.answer_closed.connect(self._show_context)
        session.busy_changed.connect(self.window.set_busy)
        client.prefill.connect(self._on_prefill)
        client.rate.connect(self._on_rate)
        client.finished.connect(self._on_finished)
        client.shifted.connect(self._on_shifted)
        client.ready.connect(self.garbage.settle)

    def _wire_settings(self) -> None:
        panel = self.window.sampling
        panel.sampling_changed.connect(self._on_sampling)
        panel.prompt_changed.connect(self.session.set_system_prompt)
        panel.prompt_default_requested.connect(self._keep_prompt)
        panel.theme_chosen.connect(self._choose_theme)
        self.split.settings_changed.connect(self._keep_plan)
        theme_signals().changed.connect(self._refresh_chat)

    def _wire_window(self) -> None:
        window = self.window
        window.model_dropped.connect(self.models.open)
        window.model_picked.connect(self.models.open)
        window.new_chat_requested.connect(self._new_chat)
        window.regenerate_requested.connect(self.session.regenerate)
        window.stop_requested.connect(self.session.stop)
        window.closing.connect(self.close)
        self.poller.snapshots.connect(self.split.set_snapshots)
        self.poller.snapshots.connect(self.monitor.add_snapshots)

    # models

    @Slot(object)
    def _on_selected(self, info: ModelInfo) -> None:
        self.split.set_model(info)
        plan = self.settings.current.plans.get(info.path)
        if isinstance(plan, dict):
            self.split.restore(plan)
        self.split.set_state("ready")
        self.window.model_bar.show_selected(info)

    @Slot(object)
    def _on_loading(self, info: ModelInfo) -> None:
        self.window.model_bar.show_loading(info)
        self.split.set_state("loading")

    @Slot(object)
    def _on_loaded(self, loaded: ModelLoaded) -> None:
        self.window.model_bar.show_loaded(loaded)
        self.split.set_state("loaded")
        self.split.set_loaded(loaded)
        self.settings.update(
            recent_models=self.settings.current.with_recent(loaded.info.path).recent_models
        )
        self._keep_plan()
        self._show_models()
        self._show_context()

    @Slot(object)
    def _on_emptied(self, info: ModelInfo | None) -> None:
        if info is None:
            self.window.model_bar.show_empty()
            self.split.set_state("empty")
        else:
            self.window.model_bar.show_selected(info)
            self.split.set_state("ready")
        self._show_models()
        self._show_context()

    def _show_models(self) -> None:
        recent = self.settings.current.recent_models
        has_demo = paths.demo_model() is not None
        self.window.model_bar.set_menu(recent, has_demo=has_demo)
        model = self.client.model
        name = model.info.name if model else ""
        self.window.start_view.show_state(name, recent=recent, has_demo=has_demo)
        self.window.setWindowTitle(f"{name} – Tandem" if name else "Tandem")

    # chats

    @Slot()
    def _new_chat(self) -> None:
        self._leave_chat()
        self.session.new_chat(self.settings.current.system_prompt)
        self.window.composer.setFocus()

    @Slot(str)
    def _open_chat(self, chat_id: str) -> None:
        self._leave_chat()
        self.session.open_chat(chat_id)

    @Slot(str)
    def _delete_chat(self, chat_id: str) -> None:
        self._leave_chat()
        self.session.delete(chat_id, self.settings.current.system_prompt)

    def _leave_chat(self) -> None:
        self.window.composer.flush_draft()
        self.window.sampling.flush_prompt()

    @Slot(str)
    def _send(self, text: str) -> None:
        self.window.sampling.flush_prompt()
        if self.session.send(text):
            self.window.composer.set_text("")

    @Slot(object)
    def _on_opened(self, chat: Conversation) -> None:
        self.window.show_chat(not chat.is_empty)
        self.window.chat_view.show_chat(chat, is_answering=self.session.is_answering_here)
        self.window.sampling.set_prompt(chat.system_prompt)
        self.settings.update(last_chat=chat.id)
        self._show_chats()
        self._show_context()

    @Slot(int)
    def _on_message_added(self, index: int) -> None:
        self.window.show_chat(True)
        self.window.chat_view.add_message(index)
        if self.session.is_busy:
            is_starting = self.client.state is EngineState.LOADING
            self.window.chat_view.set_status("Waiting for the model…" if is_starting else "…")

    @Slot()
    def _show_chats(self) -> None:
        self.window.chat_list.set_chats(self.session.chats, self.session.current.id)

    @Slot()
    def _refresh_chat(self) -> None:
        self.window.chat_view.refresh(is_answering=self.session.is_answering_here)

    # answers

    @Slot(int, int)
    def _on_prefill(self, done: int, total: int) -> None:
        if self.session.is_answering_here:
            self.window.chat_view.set_status(f"Reading the prompt · {done} of {total} tokens")

    @Slot(float)
    def _on_rate(self, tokens_per_s: float) -> None:
        self.monitor.add_rate(tokens_per_s)
        if tokens_per_s and self.session.is_answering_here:
            self.window.chat_view.set_status(f"{tokens_per_s:.1f} tok/s")

    @Slot(object)
    def _on_finished(self, finished: Finished) -> None:
        self.monitor.mark_message()
        if finished.timings.decode_per_s > 0:
            self.split.set_speed(finished.timings.decode_per_s)

    @Slot(int)
    def _on_shifted(self, n_dropped: int) -> None:
        self._notify(Notice(f"The context was full: the oldest {n_dropped} tokens are forgotten."))

    @Slot()
    def _show_context(self) -> None:
        model = self.client.model
        used = self.session.current.context_tokens
        self.window.composer.set_context(used, model.n_ctx if model else 0)

    # settings

    def _sampling(self) -> SamplingParams:
        return self.window.sampling.params

    def _allow_shift(self) -> None:
        self.window.sampling.set_field("on_overflow", "shift")

    @Slot(object)
    def _on_sampling(self, params: SamplingParams) -> None:
        self.settings.update(sampling=changed_sampling(params))
        self._show_sampling_summary()
        self._save_timer.start()

    def _show_sampling_summary(self) -> None:
        n = len(self.settings.current.sampling)
        summary = f"Sampling · {n} changed" if n else "Default sampling"
        self.window.composer.set_sampling_summary(summary)

    @Slot(str)
    def _keep_prompt(self, text: str) -> None:
        self.settings.update(system_prompt=text)
        self._save_timer.start()
        self._notify(Notice("New chats begin with this system prompt."))

    @Slot(str)
    def _choose_theme(self, choice: str) -> None:
        self.settings.update(theme=choice)
        self._save_timer.start()
        apply_theme(self._app, choice)

    @Slot()
    def _keep_plan(self) -> None:
        info = self.models.info
        if info is not None:
            plans = {**self.settings.current.plans, info.path: self.split.state()}
            self.settings.update(plans=plans)
            self._save_timer.start()

    @Slot(object)
    def _notify(self, notice: Notice) -> None:
        log.info("%s", notice.text)
        self.window.banner.show_notice(notice)

    def _is_idle(self) -> bool:
        return self.client.state not in (EngineState.GENERATING, EngineState.LOADING)


def run_window(model_path: str | None = None, demo: bool = False) -> int:
    """Open the window and stay until it closes; the exit status of the program."""
    QApplication.setHighDpiScaleFactorRoundingPolicy(
        Qt.HighDpiScaleFactorRoundingPolicy.PassThrough
    )
    app = QApplication(sys.argv[:1])
    app.setApplicationName("Tandem")
    app.setApplicationDisplayName("Tandem")
    app.setDesktopFileName("tandem")
    shell = Shell(app)
    shell.start()
    if demo:
        shell.open_demo()
    elif model_path is not None:
        shell.models.open(model_path)
    status = app.exec()
    shell.close()
    return status
