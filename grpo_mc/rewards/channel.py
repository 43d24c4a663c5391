"""Messages over a socket pair that never block for ever.

A message is an 8-byte length and that many bytes. Receiving keeps what has arrived of an unfinished message, so a
worker that is stopped or killed in the middle of one cannot block its reader; sending has a time limit.
"""

from __future__ import annotations

import socket
import struct

_LENGTH = struct.Struct("!Q")
_READ_BYTES = 1 << 16


class ChannelClosed(Exception):
    """The other end is gone."""


class Channel:
    """One end of the connection. Not thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray()

    def fileno(self) -> int:
        """The descriptor, for select."""
        return self._socket.fileno()

    def send(self, message: bytes, timeout_s: float | None = None) -> None:
        """Send one message.

        Raises:
            ChannelClosed: the other end is gone, or did not take the message within `timeout_s`.
        """
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(_LENGTH.pack(len(message)) + message)
        except OSError as error:  # TimeoutError and BrokenPipeError among them
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout_s: float | None = 0.0) -> list[bytes]:
        """The messages that are complete; [] when none is within `timeout_s` (None waits for ever).

        Raises:
            ChannelClosed: the other end is gone and every message that it completed has been returned.
        """
        messages = self._take_complete()
        if messages:
            return messages
        self._socket.settimeout(timeout_s)
        try:
            data = self._socket.recv(_READ_BYTES)
        except (BlockingIOError, TimeoutError):
            return []
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if not data:
            raise ChannelClosed("the other end closed the connection")
        self._buffer += data
        return self._take_complete()

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _take_complete(self) -> list[bytes]:
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(bytes(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
        return messages
