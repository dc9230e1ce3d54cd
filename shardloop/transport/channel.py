"""A line between two processes of one host, for small messages and descriptors. Floor 3.

Called by `transport.shm`. A Unix socket: a wait is bounded and sleeps, and when the other process
dies the line is closed by the system, so its peer sees it at once. No program that a rank starts
inherits a line or a file that came by one; a rank forks no child that would keep them. The sockets
have abstract names, which vanish with them.
"""

import os
import secrets
import socket
import struct

from shardloop.errors import WorkerDied, WorkerTimeout

TOKEN = struct.Struct("<q")


class Listener:
    """Where others of the same user reach this process."""

    def __init__(self, *, backlog: int, timeout_s: float) -> None:
        self.address = f"\0shardloop-{os.getpid()}-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        self._socket.bind(self.address)
        self._socket.listen(max(1, backlog))
        self._timeout_s = timeout_s

    def accept(self) -> "Channel":
        """The next line that another process of this user opens; others are turned away.

        Raises:
            WorkerTimeout: none came in time.
        """
        while True:
            try:
                line, _ = self._socket.accept()
            except TimeoutError as error:
                raise WorkerTimeout(
                    f"no other rank opened a line to shared memory within {self._timeout_s:g} s; "
                    "look at the other ranks' logs"
                ) from error
            if _user_of(line) == os.getuid():
                return Channel(line, self._timeout_s)
            line.close()

    def close(self) -> None:
        self._socket.close()


class Channel:
    """One end of a line."""

    def __init__(self, line: socket.socket, timeout_s: float) -> None:
        self._line, self._timeout_s = line, timeout_s
        line.settimeout(timeout_s)

    @classmethod
    def connect(cls, address: str, *, timeout_s: float) -> "Channel":
        """Raises WorkerDied: nobody listens there, on this host."""
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.settimeout(timeout_s)
        try:
            line.connect(address)
        except OSError as error:
            line.close()
            raise WorkerDied(
                f"no process of this host listens at {address[1:]} ({error}); shared memory joins "
                "ranks of one host only: choose the transport p2p between hosts"
            ) from error
        return cls(line, timeout_s)

    def put(self, token: int, *, what: object, descriptor: int | None = None) -> None:
        """Send a number and perhaps an open file; `what` it means is for the messages.

        Raises:
            WorkerDied, WorkerTimeout: the other end is gone, or takes nothing.
        """
        files = [] if descriptor is None else [descriptor]
        try:
            socket.send_fds(self._line, [TOKEN.pack(token)], files)
        except OSError as error:
            raise self._named(error, what) from error

    def get(self, *, what: object) -> int:
        """The next number that the other end sent."""
        return self.get_with_file(what=what)[0]

    def get_with_file(self, *, what: object) -> tuple[int, int | None]:
        """The next number, and the descriptor that came with it; the caller closes that.

        Raises:
            WorkerDied, WorkerTimeout: the other end is gone, or sends nothing in time.
        """
        data = b""
        files: list[int] = []
        while len(data) < TOKEN.size:
            try:
                more, came, _, _ = socket.recv_fds(self._line, TOKEN.size - len(data), 1)
            except OSError as error:
                raise self._named(error, what) from error
            if not more:
                raise self._named(ConnectionResetError("closed by the other rank"), what)
            for file in came:
                os.set_inheritable(file, False)  # as received, it is
            data, files = data + more, files + came
        return TOKEN.unpack(data)[0], files[0] if files else None

    def close(self) -> None:
        self._line.close()

    def _named(self, error: OSError, what: object) -> WorkerDied | WorkerTimeout:
        if isinstance(error, TimeoutError):
            return WorkerTimeout(
                f"{what}: no answer within {self._timeout_s:g} s; a rank hangs or is slower than "
                "that: look at its log, or raise workers.timeout-s, then start a new group"
            )
        return WorkerDied(f"{what}: a rank has died or given up ({error}); start a new group")


def _user_of(line: socket.socket) -> int:
    credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])
