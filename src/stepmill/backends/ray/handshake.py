"""Both ends of a new connection prove that they have the node's key before either end unpickles anything.

    node ──► pool   a nonce
    pool ──► node   a nonce, MAC("pool", both nonces)
    node ──► pool   MAC("node", both nonces)

The port of a node that has ended may belong to another program, and any program can connect to a node. The key is made
for one actor and reaches it through Ray; only MACs (HMAC-SHA256) of it are sent here. The nonces make a proof useless
for other connections, and the role makes it useless for the other direction. Later messages have no MAC, because a
program that can change them on the way can also read and change those of Ray.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time

KEY_BYTES = NONCE_BYTES = 32
HANDSHAKE_S = 5.0  # how long the other end may take
POOL, NODE = b"pool", b"node"


def join_node(connection: socket.socket, key: bytes) -> None:
    """Prove to a node that this is its pool, and check that the other end is the node.

    Raises:
        OSError: it is not, or it was too slow.
    """
    deadline = time.monotonic() + HANDSHAKE_S
    own = secrets.token_bytes(NONCE_BYTES)
    nonces = _receive(connection, NONCE_BYTES, deadline) + own
    connection.sendall(own + _mac(key, POOL, nonces))
    _check(connection, _mac(key, NODE, nonces), deadline)


def admit_pool(connection: socket.socket, key: bytes) -> None:
    """Check that the other end is the pool, and then prove that this is its node.

    Raises:
        OSError: it is not, or it was too slow.
    """
    deadline = time.monotonic() + HANDSHAKE_S
    own = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(own)
    nonces = own + _receive(connection, NONCE_BYTES, deadline)
    _check(connection, _mac(key, POOL, nonces), deadline)
    connection.sendall(_mac(key, NODE, nonces))


def _mac(key: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, role + nonces, "sha256")


def _check(connection: socket.socket, expected: bytes, deadline: float) -> None:
    if not hmac.compare_digest(_receive(connection, len(expected), deadline), expected):
        raise PermissionError("another program has this port, and not the key of the node")


def _receive(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    data = b""
    while len(data) < num_bytes:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"no proof of the key came within {HANDSHAKE_S:g} s")
        connection.settimeout(left_s)
        part = connection.recv(num_bytes - len(data))
        if not part:
            raise ConnectionResetError("the other end has closed the connection without a proof of the key")
        data += part
    return data
