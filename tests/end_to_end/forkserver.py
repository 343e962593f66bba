"""Processes forked from one that has imported torch and loaded the kernels, which takes seconds of CPU.

`Forked` starts what `python -m MODULE ARGUMENTS` would: a process with its own environment, arguments and
standard streams, which ends with the same exit code or signal. Two things differ. All share one seed of
Python's hashes; and the interpreter is not torn down after the exit handlers, which would take ten times the
CPU of the rest. `plain` starts a process without either difference.

Run as a program, this file is the process that forks. It has one thread, without which no fork would be safe,
and ends its children when the tests end.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PRELOADED = (
    "grpc.aio",
    "uvloop",
    "gradwire.server.daemon",
    "gradwire.worker.daemon",
    "gradwire.worker.script.api",
    "torch._dynamo",  # which the first optimizer of a process imports, in over a second
)
NUMBER = struct.Struct("=q")  # of a report: first the process id, then the exit code
REQUEST_BYTES = 1 << 17
POLL_S = 0.005


class Forked:
    """A running module, with as much of `subprocess.Popen` as the tests use."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        stderr: int,
        *,
        also: tuple[str, ...] = (),
    ) -> None:
        """
        Args:
            stderr: a file descriptor for standard error; the caller closes its own copy. Standard input and
                output are /dev/null.
            also: further modules that the process which forks has imported.
        """
        self.returncode: int | None = None
        self._reports, theirs = os.pipe()
        request = json.dumps([module, *arguments, os.getcwd(), dict(environ)]).encode()
        try:
            socket.send_fds(_server(also).control, [request], [stderr, theirs])
        finally:
            os.close(theirs)
        self.pid = self._report()
        os.set_blocking(self._reports, False)

    def _report(self) -> int:
        report = os.read(self._reports, NUMBER.size)
        if not report:
            raise RuntimeError("the process that forks has ended")
        number: int = NUMBER.unpack(report)[0]
        return number

    def poll(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it runs."""
        if self.returncode is None:
            with contextlib.suppress(BlockingIOError):
                self.returncode = self._report()
                os.close(self._reports)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its report is on its way
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Server:
    """The process that forks, from the side of the tests."""

    def __init__(self, also: tuple[str, ...]) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *also],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the tests, which then end this one
                # numpy's own threads would make the fork unsafe.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"},
            )

    def end(self) -> None:
        # Other children of this process, such as a DataLoader's workers, may hold the socket, too.
        self.control.shutdown(socket.SHUT_RDWR)
        self.control.close()
        self._process.wait()


def plain(
    module: str, arguments: Sequence[str], environ: Mapping[str, str], stderr: int
) -> subprocess.Popen[bytes]:
    """The same with a new interpreter."""
    command = [sys.executable, "-m", module, *arguments]
    null = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=null, stdout=null, stderr=stderr, env=environ)


_servers: dict[tuple[str, ...], _Server] = {}  # by the further modules that each has imported


def _server(also: tuple[str, ...]) -> _Server:
    if also not in _servers:
        _servers[also] = _Server(also)
    return _servers[also]


def end() -> None:
    """End the processes that fork, and all that they have started."""
    while _servers:
        _servers.popitem()[1].end()


@dataclass
class _Request:
    module: str
    arguments: list[str]
    folder: str
    environ: dict[str, str]
    stderr: int


def _preload(also: Sequence[str]) -> None:
    # As a worker's entry points do before grpc is imported: otherwise what it forks dies of grpc's threads.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    for name in (*PRELOADED, *also):
        __import__(name)
    from gradwire.compressors import warm_up

    warm_up()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a fork would lose {len(threads) - 1} threads that an import has started"
    gc.collect()
    gc.freeze()


def _serve(control: socket.socket) -> _Request:
    """Fork at every request. Returns in the children only, which then run what was asked for."""
    reports: dict[int, int] = {}  # by process id, where to write the exit code
    waking, wakes = socket.socketpair()
    waking.setblocking(False)
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, _nothing)  # it only has to wake the loop
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(waking, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if waking in ready:
                waking.recv(4096)
                _reap(reports)
            if control not in ready:
                continue
            message, fds, _, _ = socket.recv_fds(control, REQUEST_BYTES, 2)
            if not message:
                for pid in reports:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            stderr, report = fds
            module, *arguments, folder, environ = json.loads(message)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                break
            os.close(stderr)
            os.write(report, NUMBER.pack(pid))
            reports[pid] = report
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for fd in (*reports.values(), report):
        os.close(fd)
    for end in (control, waking, wakes):
        end.close()
    return _Request(module, arguments, folder, environ, stderr)


def _nothing(number: int, frame: object) -> None:
    pass


def _reap(reports: dict[int, int]) -> None:
    while reports:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            break
        report = reports.pop(pid)
        with contextlib.suppress(BrokenPipeError):  # the test has let go of it
            os.write(report, NUMBER.pack(os.waitstatus_to_exitcode(status)))
        os.close(report)


def _become(request: _Request) -> None:
    """Set up this process as a new interpreter would have for the request."""
    os.dup2(request.stderr, 2)
    os.close(request.stderr)
    os.chdir(request.folder)
    inherited = set(_python_path(os.environ))
    os.environ.clear()
    os.environ.update(request.environ)
    tempfile.tempdir = None  # what an import has found with the variables of the process that forks
    beyond = [entry for entry in sys.path[1:] if entry not in inherited]
    sys.path[:] = [request.folder, *_python_path(request.environ), *beyond]
    sys.argv[1:] = request.arguments  # the first is set by runpy


def _python_path(environ: Mapping[str, str]) -> list[str]:
    return [os.path.abspath(entry) for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _run(module: str) -> int:
    """The exit code, which is found as the interpreter does."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ending:
        if ending.code is None or isinstance(ending.code, int):
            return ending.code or 0
        print(ending.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


if __name__ == "__main__":
    _preload(sys.argv[2:])
    asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    _become(asked)
    code = _run(asked.module)
    # The end that multiprocessing gives its children.
    threading._shutdown()  # type: ignore[attr-defined]  # pyright: ignore
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    sys.stderr.flush()
    os._exit(code)
