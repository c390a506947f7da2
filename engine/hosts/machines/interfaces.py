"""Which network interface machines use: the one that routes to the other machine, or a named one.

gloo would look up the machine's own name, which Debian maps to 127.0.1.1, so it is always told.
"""

from __future__ import annotations

import ipaddress
import socket

import psutil

from engine.errors import EngineError

CONNECT_S = 5.0
"""Seconds in which a machine must answer."""

NOWHERE = "192.0.2.1"
"""An address of no machine (RFC 5737), to which the default route leads; nothing is sent there."""


def parse_address(text: str, usual_port: int) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`, `HOST` or `[IPV6]:PORT`.

    Raises:
        EngineError: it is none of them.
    """
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in host and not host.startswith("[")):
        host, port = text, str(usual_port)
    if not host or not port.isdecimal() or int(port) > 65535:
        raise EngineError(f"'{text[:60]}' is no address.", "Write it as HOST:PORT.")
    return host.strip("[]"), int(port)


def interface_of(address: str) -> str:
    """Return the name of the interface with an address of this machine.

    Raises:
        EngineError: none has it.
    """
    wanted = ipaddress.ip_address(address.partition("%")[0])
    for name, found in psutil.net_if_addrs().items():
        for one in found:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                own = ipaddress.ip_interface(
                    f"{one.address.partition('%')[0]}/{one.netmask or 128}"
                    if one.family == socket.AF_INET
                    else one.address.partition("%")[0]
                )
                if own.ip == wanted or (wanted.is_loopback and own.ip.is_loopback):
                    return name
    raise EngineError(f"No interface of this machine has the address {address}.")


def address_of(interface: str) -> str:
    """Return the address of an interface, which may be named by that address itself.

    Raises:
        EngineError: there is no such interface, or it has none.
    """
    try:
        return str(ipaddress.ip_address(interface))
    except ValueError:
        pass
    found = psutil.net_if_addrs()
    if interface not in found:
        raise EngineError(
            f"There is no interface {interface}.", f"Choose one of {', '.join(sorted(found))}."
        )
    for family in (socket.AF_INET, socket.AF_INET6):
        for one in found[interface]:
            if one.family == family:
                return one.address.partition("%")[0]
    raise EngineError(f"The interface {interface} has no address.")


def default_address() -> str:
    """Return this machine's address on its default route.

    Raises:
        EngineError: it has none.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((NOWHERE, 9))
        except OSError:
            raise EngineError(
                "This machine has no default route to other machines.",
                "Name its address with --rendezvous HOST:PORT.",
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
        EngineError: it cannot be reached, or not from that interface.
    """
    source = (address_of(interface), 0) if interface else None
    try:
        return socket.create_connection((host, port), CONNECT_S, source)
    except OSError as error:
        why = error.strerror or str(error) or "it does not answer"
        through = f" from {interface} ({source[0]})" if source else ""
        raise EngineError(
            f"{host}:{port} cannot be reached{through}: {why}.",
            "Is `tandem serve --nodes` running there, and the port open in its firewall?",
        ) from None


def listen_for_machines(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address of this machine.

    Raises:
        EngineError: it cannot.
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
            f"No other machine can join at {host}:{port}: {error.strerror or error}.",
            "Choose another address of this machine with --rendezvous HOST:PORT.",
        ) from None
    return sock


def free_port(host: str, wanted: int) -> int:
    """Return a port of an address that is free: the wanted one, or any."""
    for port in (wanted, 0):
        try:
            with listen_for_machines(host, port) as sock:
                return int(sock.getsockname()[1])
        except EngineError:
            continue
    return wanted
