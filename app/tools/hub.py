"""All tool servers, their tools, and calls to them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from app.core.translation import error_text, tr
from app.tools.results import BETWEEN, server_prefixes
from app.tools.server_store import ServerTool, ToolLimits, ToolResult, ToolServer, ToolServerState
from engine import EngineError

if TYPE_CHECKING:
    from app.tools.connection import ToolConnection

HeadersOf = Callable[[ToolServer], Mapping[str, str]]


class ServerKeeper:
    """One server and its connection; used only on the hub's thread.

    Args:
        prefix: the server's prefix in the tool names that models see.
        headers_of: returns headers with secrets; called on another thread.
        on_change: called after each change of `state`.
    """

    def __init__(
        self,
        server: ToolServer,
        prefix: str,
        headers_of: HeadersOf,
        limits: ToolLimits,
        on_change: Callable[[], None],
    ) -> None:
        self.state = ToolServerState(server, "starting")
        self.prefix = prefix
        self._headers_of, self._limits, self._on_change = headers_of, limits, on_change
        self._connection: ToolConnection | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_settled = asyncio.Event()  # ready or failed

    def rename(self, server: ToolServer) -> None:
        """Replace the server's configuration without reconnecting."""
        self.state = replace(self.state, server=server)

    def start(self) -> None:
        """Connect unless already connected."""
        if self._task is None or self._task.done():
            self._is_settled.clear()
            self._set_state(ToolServerState(self.state.server, "starting"))
            self._task = asyncio.get_running_loop().create_task(self._live())

    async def stop(self) -> None:
        """Close the connection and stop the program."""
        if self._connection is not None:
            self._connection.stop()
        elif self._task is not None:
            self._task.cancel()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Call a tool, restarting the server if it has stopped."""
        self.start()
        await self._is_settled.wait()
        connection = self._connection
        if connection is None or self.state.status != "ready":
            return ToolResult(self.state.problem, is_error=True)
        result = await connection.call(name, arguments)
        if result is None:  # the connection has ended; wait for the reason
            assert self._task is not None, "there was a connection"
            await asyncio.wait([self._task])
            stopped = tr("{name} was stopped.").format(name=self.state.server.name)
            return ToolResult(self.state.problem or stopped, is_error=True)
        return result

    async def _live(self) -> None:
        server = self.state.server
        try:
            problem = await self._connected(server)
        except EngineError as error:
            problem = error_text(error)
        finally:
            self._connection = None
            self._is_settled.set()
        self._set_state(ToolServerState(self.state.server, "failed", problem))

    async def _connected(self, server: ToolServer) -> str:
        headers = await asyncio.to_thread(self._headers_of, server) if server.headers else {}
        from app.tools.connection import ToolConnection  # imported late: `mcp` takes a second

        self._connection = ToolConnection(
            server, headers, self.prefix, self._limits, self._on_tools
        )
        return await self._connection.run()

    def _on_tools(self, tools: tuple[ServerTool, ...]) -> None:
        self._set_state(ToolServerState(self.state.server, "ready", tools=tools))
        self._is_settled.set()

    def _set_state(self, state: ToolServerState) -> None:
        if state != self.state:
            self.state = state
            self._on_change()


T = TypeVar("T")


class LoopThread:
    """An asyncio loop on its own thread, started by the first `post`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    def post(self, work: Callable[[], None]) -> bool:
        """Run `work` on the thread; return False if it is closed."""
        with self._lock:
            if self._is_closed:
                return False
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._loop.call_soon_threadsafe(work)
            return True

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task; must be called on the thread."""
        assert self._loop is not None, "called from a loop that runs"
        task = self._loop.create_task(work)
        self._tasks.add(task)  # the loop keeps only weak references
        task.add_done_callback(self._tasks.discard)
        return task

    def close(self, last: Callable[[], Coroutine[Any, Any, None]], timeout_s: float) -> bool:
        """Run `last` on the thread and then stop the thread; return whether it stopped in time."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return True
        if not was_closed:
            loop.call_soon_threadsafe(lambda: self.spawn(self._end(last())))
        thread.join(timeout_s)
        return not thread.is_alive()

    async def _end(self, last: Coroutine[Any, Any, None]) -> None:
        assert self._loop is not None, "runs in it"
        try:
            await last
        finally:
            self._loop.stop()

    def _run(self) -> None:
        loop = self._loop
        assert loop is not None, "made before the thread"
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            loop.run_until_complete(self._cancel_rest())
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            loop.close()

    async def _cancel_rest(self) -> None:
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


class ToolHub:
    """Connections to tool servers, on a thread that starts with the first enabled server.

    Methods return immediately, except for `close`.

    Args:
        on_change: called on that thread after `states` has changed.
        headers_of: returns a server's headers with secrets; called on another thread.
    """

    def __init__(
        self,
        on_change: Callable[[], None],
        headers_of: HeadersOf = lambda server: server.headers,
        limits: ToolLimits = ToolLimits(),  # noqa: B008 frozen, so one shared default is safe
    ) -> None:
        self._on_change, self._headers_of, self._limits = on_change, headers_of, limits
        self._thread = LoopThread("tandem-tools")
        self._lock = threading.Lock()
        self._servers: tuple[ToolServer, ...] = ()
        self._states: dict[str, ToolServerState] = {}  # by server
        self._keepers: dict[str, ServerKeeper] = {}  # on the thread
        self._endings: set[asyncio.Task[None]] = set()  # on the thread

    def set_servers(self, servers: Sequence[ToolServer]) -> None:
        """Replace the servers and connect to the enabled ones."""
        with self._lock:
            had_any = any(server.is_on for server in self._servers)
            self._servers = tuple(servers)
            has_any = any(server.is_on for server in self._servers)
        if had_any or has_any:
            new = tuple(servers)
            self._thread.post(lambda: self._apply(new))

    def states(self) -> tuple[ToolServerState, ...]:
        """Return the state of each server, in the order of `set_servers`."""
        with self._lock:
            return tuple(self._state(server) for server in self._servers)

    def offered(self) -> tuple[ServerTool, ...]:
        """Return the tools for models: those on ready servers, except hidden ones."""
        return tuple(
            tool for state in self.states() for tool in state.tools
            if tool.name not in state.server.hidden
        )  # fmt: skip

    def call(
        self, tool_name: str, arguments: Mapping[str, Any], on_done: Callable[[ToolResult], None]
    ) -> RunningCall:
        """Call a tool, restarting its server if that has stopped. Errors are results, too.

        Args:
            tool_name: the name that models see.
            on_done: called once with the result, on the hub's thread, or here if the hub is closed.
        """
        call = RunningCall(self._thread, on_done)
        is_begun = self._thread.post(lambda: call.begin(self._called(tool_name, arguments)))
        if not is_begun:
            on_done(ToolResult(tr("Tandem is closing."), is_error=True))
        return call

    def restart(self, name: str) -> None:
        """Reconnect to a server."""
        self._thread.post(lambda: self._restart(name))

    def close(self, timeout_s: float = 8.0) -> bool:
        """Stop all calls, connections and programs; return whether they stopped in time."""
        return self._thread.close(self._stop_all, timeout_s)

    def _state(self, server: ToolServer) -> ToolServerState:
        state = self._states.get(server.name) if server.is_on else None
        if state is None or not state.server.connects_like(server):
            return ToolServerState(server, "starting" if server.is_on else "off")
        return ToolServerState(server, state.status, state.problem, state.tools)

    # on the hub's thread

    def _apply(self, servers: tuple[ToolServer, ...]) -> None:
        prefixes = server_prefixes([server.name for server in servers])
        wanted = {server.name: server for server in servers if server.is_on}
        for name, keeper in tuple(self._keepers.items()):
            server = wanted.get(name)
            is_same = server is not None and keeper.state.server.connects_like(server)
            if server is None or not is_same or keeper.prefix != prefixes[name]:
                self._drop(name)
            else:
                keeper.rename(server)
        for name, server in wanted.items():
            if name not in self._keepers:
                self._keepers[name] = self._kept(server, prefixes[name])
        self._changed()

    def _kept(self, server: ToolServer, prefix: str) -> ServerKeeper:
        keeper = ServerKeeper(server, prefix, self._headers_of, self._limits, self._changed)
        keeper.start()
        return keeper

    def _drop(self, name: str) -> None:
        task = self._thread.spawn(self._keepers.pop(name).stop())
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    def _restart(self, name: str) -> None:
        keeper = self._keepers.get(name)
        if keeper is not None:
            self._drop(name)
            self._keepers[name] = self._kept(keeper.state.server, keeper.prefix)
            self._changed()

    def _changed(self) -> None:
        states = {name: keeper.state for name, keeper in self._keepers.items()}
        with self._lock:
            self._states = states
        self._on_change()

    async def _called(self, tool_name: str, arguments: Mapping[str, Any]) -> ToolResult:
        prefix = tool_name.partition(BETWEEN)[0]
        for keeper in self._keepers.values():
            if keeper.prefix == prefix:
                return await keeper.call(tool_name, arguments)
        return ToolResult(tr("There is no tool {name}.").format(name=tool_name), is_error=True)

    async def _stop_all(self) -> None:
        for name in tuple(self._keepers):
            self._drop(name)
        if self._endings:
            await asyncio.wait(self._endings)


class RunningCall:
    """A tool call on the hub's thread, with exactly one result."""

    def __init__(self, thread: LoopThread, on_done: Callable[[ToolResult], None]) -> None:
        self._thread, self._on_done = thread, on_done
        self._task: asyncio.Task[ToolResult] | None = None

    def cancel(self) -> None:
        """Cancel the call, which makes its result an error; does nothing once it has a result."""
        self._thread.post(self._cancel)

    # on the hub's thread

    def begin(self, work: Coroutine[Any, Any, ToolResult]) -> None:
        """Start the call."""
        self._task = self._thread.spawn(work)
        self._task.add_done_callback(self._on_ended)

    def _cancel(self) -> None:
        assert self._task is not None, "begun before"
        self._task.cancel()

    def _on_ended(self, task: asyncio.Task[ToolResult]) -> None:
        if task.cancelled():
            self._on_done(ToolResult(tr("The call was stopped."), is_error=True))
        else:
            self._on_done(task.result())
