"""Workers on machines that ssh reaches, and units of systemd: with a stand-in for ssh, and, by `make
check-machines`, on five emulated machines.

A machine is an sshd in network, process and mount namespaces of its own, with its own home.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"
SCRIPT = DEPLOY / "ssh" / "workers.sh"
BIN = Path(sys.executable).parent
PATIENCE_S = 120.0
# Its machines are folders: the homes of the hosts.
SSH = """#!/bin/bash
while [[ $1 == -* ]]; do [ "$1" = -o ] && shift; shift; done
[ -d "$HOMES/$1" ] || { echo "ssh: connect to host $1 port 22: Connection timed out" >&2; exit 255; }
HOME=$HOMES/$1; shift; exec env -i HOME="$HOME" PATH="$PATH" "$@"
"""


class Machines:
    """The script on the operator's machine, with a list of hosts. environ: variables of the operator."""

    def __init__(self, folder: Path, hosts: list[str], **environ: str) -> None:
        self.folder, self.environ = folder, {**os.environ, "VENV": str(BIN.parent), **environ}
        self.hosts = folder / "hosts"
        self.hosts.write_text("# of the job\n" + "\n".join(hosts) + "\n")

    def ask(self, action: str, job: str, *command: str, **variables: str) -> tuple[int, str]:
        """Exit code and output of the script."""
        done = subprocess.run(
            [SCRIPT, action, job, self.hosts, *command],
            env={**self.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode, done.stdout

    def wait_for(self, job: str, pattern: str, times: int) -> str:
        """Ask until so many lines of the list match."""
        deadline = time.monotonic() + PATIENCE_S
        while len(re.findall(pattern, (said := self.ask("list", job)[1]), re.M)) < times:
            assert time.monotonic() < deadline, said
            time.sleep(0.2)
        return said


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    hosts = ["one", "me@two"]
    for host in hosts:
        (tmp_path / host).mkdir()
    path = f"{tmp_path}:{os.environ['PATH']}"
    found = Machines(tmp_path, hosts, PATH=path, HOMES=str(tmp_path), GC_SERVER="server.example:7")
    yield found
    for pid in tmp_path.glob("*/gradwire/*/pid"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(pid.read_text()), signal.SIGKILL)


COMMAND = ("bash", "-c", 'echo "$GC_WORKER_ID of $GC_SERVER, $(<"$GC_TOKEN_FILE"), $GC_STATE"; sleep 600')


def test_workers_are_started_listed_and_stopped(machines: Machines, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a token of 'quotes'\n")
    with ThreadPoolExecutor() as pool:  # each host is started by one of two calls
        asked = [
            pool.submit(machines.ask, "start", "digits", *COMMAND, GC_TOKEN_FILE=str(token)) for _ in range(2)
        ]
    said = "".join(each.result()[1] for each in asked)
    refused = "job digits runs here already; stop it, or choose another name"
    assert (said.count("started as"), said.count(refused)) == (2, 2), said
    said = machines.wait_for("digits", "runs; w", 2)
    for host, name in (("one", "w0"), ("me@two", "w1")):
        home = tmp_path / host / "gradwire" / "digits"
        assert f"{host}: runs; {name} of server.example:7, a token of 'quotes', {home}/state" in said
        assert (home / "GC_TOKEN_FILE").stat().st_mode & 0o077 == 0
    machines.hosts.write_text("one\nme@two\none\n")
    code, said = machines.ask("stop", "digits")
    assert (code, "hosts: one: a host has one worker of a job" in said) == (2, True), said
    pid = tmp_path / "one" / "gradwire" / "digits" / "pid"
    known = pid.read_text()
    pid.write_text("999999999")
    machines.hosts.write_text("one\n")
    code, said = machines.ask("stop", "digits")
    pid.write_text(known)
    assert (code, "one: still runs; see pid and log" in said, "ended" in said) == (2, True, False), said
    machines.hosts.write_text("one\nme@two\nthree\n")
    code, said = machines.ask("stop", "digits")
    assert (code, said.count("ended")) == (2, 2), said
    assert "three: ssh: connect to host three port 22: Connection timed out" in said
    assert "1 of 3 hosts failed, see above: three" in said
    machines.wait_for("digits", "does not run", 2)


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (("begin", "digits"), {}, "expected start, list or stop"),
        (("start", "a/b"), {}, "JOB a/b: expected letters"),
        (("start", "digits"), {"GC_SERVER": ""}, "GC_SERVER is not set"),
        (("start", "digits"), {"GC_TOKEN_FILE": "/none"}, "GC_TOKEN_FILE=/none cannot be read"),
        (("start", "digits"), {"VENV": "/none"}, "/none/bin has no gc-worker; install it, or set VENV"),
    ],
)
def test_bad_input_is_named(
    machines: Machines, arguments: tuple[str, str], variables: dict[str, str], message: str
) -> None:
    code, said = machines.ask(*arguments, **{"PATH": f"{machines.folder}:/usr/bin:/bin", **variables})
    assert (code, message in said) == (2, True), said


@pytest.mark.parametrize("name", ["server", "worker@"])
def test_units_are_valid_and_name_options_that_exist(name: str, tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / f"gc-{name}.service").read_text().replace("/opt/gradwire", str(BIN.parent))
    given = dict(
        word.split("=") for line in re.findall("^Environment=(.*)", text, re.M) for word in line.split()
    )
    options = {name: value.replace("%S/gradwire", str(tmp_path)) for name, value in given.items()}
    command = str(BIN / f"gc-{name.strip('@')}")
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    options |= {"GC_TOKEN_FILE": str(token), "GC_WORKER_ID": "w0", "GC_SERVER": "host"}
    shown = subprocess.run(
        [command, "--print-config"], env={**os.environ, **options}, capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    if shutil.which("systemd-analyze"):
        (tmp_path / f"gc-{name}.service").write_text(text)
        unit = tmp_path / f"gc-{name}.service"
        verified = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
        assert (verified.returncode, verified.stderr) == (0, "")


TOGETHER = os.geteuid() == 0 and all(map(shutil.which, ("sshd", "ip", "unshare")))
SSHD = """
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
SetEnv HOME={folder}/home{number}
StrictModes no
UsePAM no
PidFile none
"""
# Steps that stop at version 3 until the file `continue` is there.
TRAIN = """
import pathlib, time
import torch
import gradwire

here = pathlib.Path(__file__).parent
with gradwire.connect() as job:
    net = torch.nn.Linear(4, 1)
    model, optimizer = job.attach(net, torch.optim.SGD(net.parameters(), 0.1))
    for (inputs,) in job.batches(torch.utils.data.TensorDataset(torch.ones(64, 4))):
        print("at version", job.version, flush=True)
        while job.version == 3 and not (here / "continue").exists():
            time.sleep(0.02)
        model(inputs).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
print("trained", flush=True)
"""


class Emulated:
    """Machines 10.77.0.1 to .5, the operator's 10.77.0.6, and a switch."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._prefix = folder, f"gw{os.getpid()}"
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key"], check=True)
        self._ip(f"netns add {self.name(0)}", f"-n {self.name(0)} link add switch type bridge")
        self._ip(f"-n {self.name(0)} link set switch up")
        for number in range(1, 7):
            name = self.name(number)
            self._ip(
                f"netns add {name}", f"link add p{number} netns {self.name(0)} type veth peer e0 netns {name}"
            )
            self._ip(f"-n {self.name(0)} link set p{number} master switch up", f"-n {name} link set lo up")
            self._ip(f"-n {name} addr add 10.77.0.{number}/24 dev e0", f"-n {name} link set e0 up")
        Path("/run/sshd").mkdir(exist_ok=True)
        for number in range(1, 6):
            (folder / f"home{number}").mkdir()
            (folder / f"sshd{number}").write_text(SSHD.format(folder=folder, number=number))
            sshd = (str(shutil.which("sshd")), "-D", "-e", "-f", str(folder / f"sshd{number}"))
            spaces = ("--pid", "--mount-proc", "--fork", "--kill-child")
            self.running[number] = self.start(number, "unshare", *spaces, *sshd)
        known = "-o LogLevel=ERROR -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
        ssh = f"ip netns exec {self.name(6)} {shutil.which('ssh')} -i {folder}/key {known}"
        (folder / "ssh").write_text(f'#!/bin/bash\nexec {ssh} "$@"\n')
        (folder / "ssh").chmod(0o755)

    def name(self, number: int) -> str:
        return f"{self._prefix}-{number}"

    def _ip(self, *commands: str) -> None:
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True)

    def start(self, number: int, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{number}.log").open("ab") as log:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name(number), *command], stdout=log, stderr=log
            )

    def lose(self, number: int) -> None:
        """End a machine: it does not answer any more."""
        self._ip(f"-n {self.name(0)} link set p{number} down")
        self.running[number].kill()
        self.running[number].wait()

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()
        for number in range(7):
            subprocess.run(["ip", "netns", "del", self.name(number)])


@pytest.fixture
def emulated(tmp_path: Path) -> Iterator[Emulated]:
    if not TOGETHER:
        pytest.skip("needs root, sshd and ip (Debian: apt install openssh-server iproute2)")
    found = Emulated(tmp_path)
    yield found
    found.close()


@pytest.mark.slow
def test_a_job_on_five_machines_outlives_one_of_them(emulated: Emulated) -> None:
    """The path of docs/how-to/machines.md."""
    folder = emulated.folder
    (folder / "train.py").write_text(TRAIN)
    (folder / "token").write_text("0123456789abcdef")
    token = ("--token-file", str(folder / "token"))
    length = ("--epochs", "0", "--max-steps", "8", "--batch-size", "2", "--http-port", "-1")
    serve = (str(BIN / "gc-server"), "--script", "--insecure", "--min-workers", "4", *token, *length)
    emulated.running[0] = server = emulated.start(1, *serve)
    path = f"{folder}:{os.environ['PATH']}"
    variables = {
        "GC_SERVER": "10.77.0.1",
        "GC_TOKEN_FILE": token[1],
        "GC_CONNECT_SECONDS": str(int(PATIENCE_S)),
    }
    machines = Machines(folder, [f"10.77.0.{number}" for number in range(2, 6)], PATH=path, **variables)
    deadline = time.monotonic() + PATIENCE_S
    command = ("python", str(folder / "train.py"))
    while (said := machines.ask("start", "digits", *command))[0]:  # until every sshd listens
        assert time.monotonic() < deadline, said
        time.sleep(0.5)
    machines.wait_for("digits", "at version 3", 4)
    emulated.lose(5)
    (folder / "continue").touch()
    assert server.wait(PATIENCE_S) == 0, (folder / "1.log").read_text()
    listed = machines.wait_for("digits", "does not run; trained", 3)
    assert re.search(r"10\.77\.0\.5: ssh: connect to host .*\n[\s\S]*1 of 4 hosts failed", listed), listed
