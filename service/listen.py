"""The sockets that the REST service listens on."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket


def listen(host: str, port: int) -> list[socket.socket]:
    """Listening sockets on every address of `host`; port 0 is any free one. OSError where that cannot be.

    They are opened here so that a taken port is found before anything is loaded, and because uvicorn leaves Nagle's
    algorithm on where it opens them for several workers: with it, every answer waits 40 ms for the client's
    acknowledgement.
    """
    found = list(dict.fromkeys(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)))
    opened: list[socket.socket] = []
    for family, _, _, _, address in found:
        if opened and port == 0:  # the same port on every address
            address = (address[0], opened[0].getsockname()[1], *address[2:])
        try:
            opened.append(_open(family, address))
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) and len(found) > 1:
                continue  # the IPv6 address of a name, on a machine without IPv6
            for one in opened:
                one.close()
            raise
    if not opened:
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    return opened


def _open(family: int, address: tuple[object, ...]) -> socket.socket:
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind(address)
        one.listen()  # at once: two sockets may be bound to one address, but only one may listen
    except BaseException:
        one.close()
        raise
    return one


def adopt(fd: int) -> socket.socket:
    """The TCP socket that this process was started with as file descriptor `fd`. OSError where it is none."""
    one = socket.socket(fileno=fd)
    if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
        one.detach()
        raise OSError(errno.EINVAL, "must be a TCP socket")
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a service on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
