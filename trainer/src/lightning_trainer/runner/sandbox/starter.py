"""Start a command inside a sandbox, wait for it, and end with the process that opened the sandbox.

The sandbox has no network. This program listens on a port of its loopback and passes the listening socket to the
process outside, which relays each connection to one address. It runs in images of others: any Python from 3.6, none of
our packages.
"""

import array
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import NoReturn

_ABOVE = 200  # our descriptors are moved above those that the command knows by number
_NOT_FOUND, _NOT_STARTED, _SIGNALLED, _ABANDONED = 127, 126, 128, 125  # exit statuses like a shell's


def main(path: str, port: str, numbers: str, *words: str) -> None:
    """Run `words`, with descriptors of these numbers; offer `port` by the socket at `path`, unless it is 0."""
    line = _join(path, [int(number) for number in numbers.split(",") if number])
    _offer(line, int(port))
    _make_home(os.environ["HOME"])
    try:
        command = subprocess.Popen(words, close_fds=False, start_new_session=True)  # noqa: S603 - the user's own command
    except FileNotFoundError as error:
        _end(str(error.filename) + ": not found in the sandbox", _NOT_FOUND)
    except OSError as error:
        _end(str(error), _NOT_STARTED)
    threading.Thread(target=_end_with, args=(line, command.pid), daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: _signal(command.pid, number))
    os._exit(_wait(command.pid))


def _join(path: str, numbers: "list[int]") -> socket.socket:
    """Connect to the process outside, and receive the command's file descriptors."""
    with socket.socket(socket.AF_UNIX) as opened:
        opened.connect(path)
        line = socket.socket(fileno=fcntl.fcntl(opened.fileno(), fcntl.F_DUPFD_CLOEXEC, _ABOVE))
    sent: array.array[int] = array.array("i")
    _, ancillary, _, _ = line.recvmsg(1, socket.CMSG_SPACE(len(numbers) * sent.itemsize))
    for _level, _kind, data in ancillary:
        sent.frombytes(data[: len(data) - len(data) % sent.itemsize])
    moved = [fcntl.fcntl(given, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for given in sent]
    for given in sent:
        os.close(given)
    for given, number in zip(moved, numbers):  # noqa: B905 - `strict` is newer than this program may need
        os.dup2(given, number)
    return line


def _offer(line: socket.socket, port: int) -> None:
    """Send a socket that listens in the sandbox; without a port, report that there is none."""
    if not port:
        line.sendall(b"-")
        return
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        line.sendmsg([b"+"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [listener.fileno()]))])


def _make_home(home: str) -> None:
    """Create the home folder, with an author for git."""
    os.makedirs(home, exist_ok=True)  # noqa: PTH103
    with contextlib.suppress(FileExistsError), open(os.path.join(home, ".gitconfig"), "x") as file:  # noqa: PTH118, PTH123
        file.write("[user]\n\tname = agent\n\temail = agent@localhost\n")


def _end_with(line: socket.socket, command: int) -> None:
    """Pass on the request to end, and end the whole sandbox with the process outside: a container would outlive it.

    A signal from outside would end bubblewrap, and with it the command at once.
    """
    with contextlib.suppress(OSError):
        while line.recv(1):
            _signal(command, signal.SIGTERM)
    _signal(command, signal.SIGKILL)
    os._exit(_ABANDONED)


def _signal(command: int, number: int) -> None:
    """Send a signal to the command and what it started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(command, number)


def _wait(pid: int) -> int:
    """Return the command's exit status. As the first process of a container, this one also gets the orphans."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else _SIGNALLED + os.WTERMSIG(status)


def _end(message: str, status: int) -> "NoReturn":
    sys.stderr.write(message + "\n")
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
