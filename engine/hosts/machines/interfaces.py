"""Choice of the network interface: the one that routes to the other machine, or a named one.

It is always passed to gloo, which would otherwise resolve the host name (127.0.1.1 on Debian).
"""

from __future__ import annotations

import ipaddress
import socket

import psutil

from engine.errors import EngineError, Sentence, reason_of

CONNECT_S = 5.0
"""Timeout for connecting, in seconds."""

NOWHERE = "192.0.2.1"
"""An unassigned address (RFC 5737) that uses the default route; nothing is sent there."""


def parse_address(text: str, usual_port: int) -> tuple[str, int]:
    """Return the host and port in `HOST:PORT`, `HOST` or `[IPV6]:PORT`.

    Raises:
        EngineError: the text has none of these formats.
    """
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in host and not host.startswith("[")):
        host, port = text, str(usual_port)
    if not host or not port.isdecimal() or int(port) > 65535:
        raise EngineError("'{text}' is not an address.", "Write it as HOST:PORT.", text=text[:60])
    return host.strip("[]"), int(port)


def interface_of(address: str) -> str:
    """Return the name of this machine's interface with the given address.

    Raises:
        EngineError: no interface has it.
    """
    sought = ipaddress.ip_address(address.partition("%")[0])
    for name, found in psutil.net_if_addrs().items():
        for one in found:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                own = ipaddress.ip_interface(
                    f"{one.address.partition('%')[0]}/{one.netmask or 128}"
                    if one.family == socket.AF_INET
                    else one.address.partition("%")[0]
                )
                if own.ip == sought or (sought.is_loopback and own.ip.is_loopback):
                    return name
    raise EngineError("No interface on this machine has the address {address}.", address=address)


def address_of(interface: str) -> str:
    """Return the address of an interface, which may also be given by its address.

    Raises:
        EngineError: there is no such interface, or it has no address.
    """
    try:
        return str(ipaddress.ip_address(interface))
    except ValueError:
        pass
    found = psutil.net_if_addrs()
    if interface not in found:
        raise EngineError(
            "There is no interface {name}.",
            "Choose one of {names}.",
            name=interface,
            names=", ".join(sorted(found)),
        )
    for family in (socket.AF_INET, socket.AF_INET6):
        for one in found[interface]:
            if one.family == family:
                return one.address.partition("%")[0]
    raise EngineError("The interface {name} has no address.", name=interface)


def default_address() -> str:
    """Return this machine's address on its default route.

    Raises:
        EngineError: it has no default route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((NOWHERE, 9))
        except OSError:
            raise EngineError(
                "This machine has no default route to other machines.",
                "Specify its address with --rendezvous HOST:PORT.",
            ) from None
        return str(sock.getsockname()[0])


def own_addresses() -> list[str]:
    """Return this machine's IPv4 addresses that other machines may reach."""
    found = [
        one.address
        for addresses in psutil.net_if_addrs().values()
        for one in addresses
        if one.family == socket.AF_INET
    ]
    return [address for address in found if not ipaddress.ip_address(address).is_loopback]


def connect(host: str, port: int, interface: str = "") -> socket.socket:
    """Return a connection to a machine.

    Args:
        interface: name or address of the interface to use; "" for the one that routes there.

    Raises:
        EngineError: the machine cannot be reached, or not from that interface.
    """
    source = (address_of(interface), 0) if interface else None
    try:
        return socket.create_connection((host, port), CONNECT_S, source)
    except OSError as error:
        problem = Sentence(error.strerror or str(error) or "it does not respond")
        hint = "Is `tandem serve --nodes` running there, and is the port open in its firewall?"
        address = f"{host}:{port}"
        if source is None:
            raise EngineError(
                "{address} cannot be reached: {problem}.", hint, address=address, problem=problem
            ) from None
        raise EngineError(
            "{address} cannot be reached from {interface}: {problem}.",
            hint,
            address=address,
            interface=f"{interface} ({source[0]})",
            problem=problem,
        ) from None


def listen_for_machines(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address of this machine.

    Raises:
        EngineError: the socket cannot listen there.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen()
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise EngineError(
            "No other machine can join at {address}: {problem}.",
            "Choose another address of this machine with --rendezvous HOST:PORT.",
            address=f"{host}:{port}",
            problem=reason_of(error),
        ) from None
    return sock


def free_port(host: str, preferred: int) -> int:
    """Return a free port at an address, if possible the preferred one."""
    for port in (preferred, 0):
        try:
            with listen_for_machines(host, port) as sock:
                return int(sock.getsockname()[1])
        except EngineError:
            continue
    return preferred
