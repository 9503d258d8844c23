"""Ports on which nobody listens, for proxies and for servers that are down."""

from __future__ import annotations

import random
import socket

HOST = "127.0.0.1"
# Below the range from which Linux takes ports for outgoing connections.
PORTS = range(20_000, 32_000)


def is_free(port: int) -> bool:
    """Whether the loopback port is free to listen on."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def free_ports(count: int) -> list[int]:
    """`count` different free ports, at random, so that runs at the same time choose different ones."""
    chosen: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        if len(chosen) == count:
            break
        if is_free(port):
            chosen.append(port)
    return chosen
