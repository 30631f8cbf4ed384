"""Processes of a federation: one that ends with its parent, and one that does the work of a site."""

import ctypes
import os
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable

from protofed.stop_signals import leave_to_parent

_SIGNAL_WHEN_PARENT_ENDS = 1
_LENGTH = struct.Struct(">q")
NO_ANSWER = -1
CHUNK = 2**20


class WorkerDied(Exception):
    """The process that did the work has ended before it had an answer."""


class OutOfTime(Exception):
    """The work took longer than this site gives it."""


def end_with_parent(parent: int) -> None:
    """This process is killed when its parent ends, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SIGNAL_WHEN_PARENT_ENDS, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


class Worker:
    """A forked process that answers one message after another with `handle`. It can be ended in the middle of one, and
    another takes its place: what it knew beyond its files is then gone."""

    def __init__(self, handle: Callable[[bytes], bytes | None], beat: Callable[[], None], beats: float = 1.0) -> None:
        self._handle, self._beat, self._beats = handle, beat, beats
        self._pid = 0
        self._socket: socket.socket | None = None

    def answer(self, data: bytes, seconds: float) -> bytes | None:
        """The answer to a message. Meanwhile `beat` is called again and again."""
        if self._pid and os.waitpid(self._pid, os.WNOHANG)[0]:  # guard: idle-worker-that-died-replaced
            self._forget()
        if self._socket is None:
            self._start()
        assert self._socket is not None
        end = time.monotonic() + seconds
        try:
            self._send(self._socket, _LENGTH.pack(len(data)), end)
            self._send(self._socket, data, end)
            return self._received(self._socket, end)
        except ConnectionError as error:
            raise WorkerDied(f"the process that did the work died ({self._ended()})") from error
        except BaseException:  # it is in the middle of something that nobody waits for any more
            self.close()  # guard: federation-hanging-worker-ended
            raise

    def close(self) -> None:
        """Ends the process, whatever it is at."""
        if self._pid:
            self._ended()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if not self._pid:
            try:
                end_with_parent(parent)
                leave_to_parent()
                ours.close()
                self._serve(theirs)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        theirs.close()
        self._socket = ours

    def _serve(self, connection: socket.socket) -> None:
        while True:
            answer = self._handle(_exactly(connection, _LENGTH.unpack(_exactly(connection, _LENGTH.size))[0]))
            connection.sendall(_LENGTH.pack(NO_ANSWER if answer is None else len(answer)))
            connection.sendall(answer or b"")

    def _send(self, connection: socket.socket, data: bytes, end: float) -> None:
        left = memoryview(data)
        connection.settimeout(self._beats)
        while left:
            try:
                left = left[connection.send(left[:CHUNK]) :]
            except TimeoutError:
                self._wait_on(end)  # guard: worker-that-takes-nothing-ended

    def _received(self, connection: socket.socket, end: float) -> bytes | None:
        (size,) = _LENGTH.unpack(self._waited(connection, _LENGTH.size, end))
        return None if size == NO_ANSWER else self._waited(connection, size, end)

    def _waited(self, connection: socket.socket, size: int, end: float) -> bytes:
        data = bytearray()
        connection.settimeout(self._beats)
        while len(data) < size:
            try:
                piece = connection.recv(min(CHUNK, size - len(data)))
            except TimeoutError:
                self._wait_on(end)
                continue
            if not piece:
                raise ConnectionError("it has ended")
            data += piece
        return bytes(data)

    def _wait_on(self, end: float) -> None:
        self._beat()
        if time.monotonic() > end:
            raise OutOfTime from None

    def _forget(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._pid = 0

    def _ended(self) -> str:
        os.kill(self._pid, signal.SIGKILL)  # what has ended by itself keeps its status until it is waited for
        _, status = os.waitpid(self._pid, 0)
        self._forget()
        code = os.waitstatus_to_exitcode(status)
        return f"signal {-code}" if code < 0 else f"exit code {code}"


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(CHUNK, size - len(data)))
        if not piece:
            os._exit(0)  # the parent has closed it
        data += piece
    return bytes(data)
