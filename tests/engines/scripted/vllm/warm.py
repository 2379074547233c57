"""Scripted servers that are forked from one process, which has imported torch and peft: 12 s of CPU for each start.

The process that asks takes the place of its server: it ends as the server does, passes SIGTERM on, and when it is
killed, so is the server.
"""

import gc
import json
import os
import select
import signal
import socket
import sys
from importlib import import_module
from pathlib import Path

_LONGEST = 2**17  # bytes of a request: the environment is most of it
_IMPORTED = ("vllm.entrypoints.openai.scripted", "transformers.models.llama.modeling_llama", "peft.tuners.lora.model")


def run_forked(path, arguments):
    """Have a server forked, wait for its end, and end in the same way."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect(path)
        content = json.dumps([str(Path.cwd()), dict(os.environ), arguments]).encode()
        socket.send_fds(line, [content], [1, 2])
        server = int(line.recv(64))
        signal.signal(signal.SIGTERM, lambda *_: os.kill(server, signal.SIGTERM))
        status = int(line.recv(64))
    if status < 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def serve(listener):
    """Fork a server for each that asks, until nobody can: the one that started this process has ended."""
    for module in _IMPORTED:
        import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a server would copy the pages of all that is shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while 0 not in select.select([0, listener], [], [])[0]:
        line, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _report(line)
        line.close()


def _report(line):
    """Start a server, tell its number and exit status, and kill it when the one that asked has ended."""
    content, output, *_ = socket.recv_fds(line, _LONGEST, 2)
    server = os.fork()
    if server == 0:
        line.close()
        _become(json.loads(content), output)
    for fd in output:
        os.close(fd)
    line.send(b"%d" % server)
    ended = os.pidfd_open(server)
    if line in select.select([line, ended], [], [])[0]:
        os.kill(server, signal.SIGKILL)
        os._exit(0)
    line.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(server, 0)[1]))
    os._exit(0)


def _become(asked, output):
    folder, environment, arguments = asked
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    sys.path[1:1] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    for source, target in zip(output, (1, 2), strict=True):
        os.dup2(source, target)
        os.close(source)
    status = 0
    try:
        import_module("vllm.entrypoints.openai.scripted").main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
