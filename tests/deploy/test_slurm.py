"""deploy/slurm between stand-ins of Slurm's commands, and, by `make check-slurm`, on a real Slurm with three
emulated nodes.

A node is a slurmd in process and mount namespaces of its own: killing the first process ends everything on
it, as the loss of a machine does.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file  # pyright: ignore[reportUnknownVariableType]

ROOT = Path(__file__).parents[2]
SBATCH = ROOT / "deploy" / "slurm" / "gradwire.sbatch"
NODES = ("n1", "n2", "n3")
PATIENCE_S = 240.0  # Slurm notices a lost node after 10 s, and requeues after a pause

ALL_HERE = os.geteuid() == 0 and all(map(shutil.which, ("slurmctld", "slurmd", "munged", "sbatch")))

CONFIGURATION = """
ClusterName=emulated
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=10
GresTypes=gpu
PartitionName=all Nodes={nodes} Default=YES MaxTime=INFINITE State=UP
"""


# 0.2 s more for a step of either job, until the test lets them hurry.
PACED = """
import dataclasses, pathlib, time
from gradwire.worker.tasks import load
def pace():
    if not pathlib.Path("hurry").exists():
        time.sleep(0.2)
def task():
    digits = load("digits")
    return dataclasses.replace(digits, loss=lambda *of: (pace(), digits.loss(*of))[1])
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Cluster:
    """Three nodes of this machine. Each has two GPUs that no driver knows, and a folder `private` of its own.

    folder: what the nodes share.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._conf = folder / "slurm.conf"
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("state", "private", *NODES):
            (folder / name).mkdir()
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o400)
        host = socket.gethostname()
        text = CONFIGURATION.format(folder=folder, host=host, port=free_port(), nodes=",".join(NODES))
        for name in NODES:
            at = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()}"
            text += f"NodeName={name} {at} CPUs=8 Gres=gpu:2\n"
        self._conf.write_text(text)
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
        files = (f"--{each}-file={folder}/munge.{each}" for each in ("pid", "log", "seed"))
        key = f"--key-file={folder}/key"
        self._start(
            "munged", "munged", "--foreground", "--force", key, f"--socket={folder}/munge.socket", *files
        )
        wait_until("munged listens", (folder / "munge.socket").exists)
        self._start("slurmctld", "slurmctld", "-D", "-c")
        for name in NODES:
            self.boot(name)
        wait_until("all nodes are idle", lambda: self.ask("sinfo", "-hN", "-o", "%t").split() == ["idle"] * 3)

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                command, env={**os.environ, "SLURM_CONF": str(self._conf)}, stdout=log, stderr=log
            )

    def boot(self, node: str) -> None:
        """Start a node whose `private` is empty."""
        start = f"mount -t tmpfs none {self.folder}/private && exec slurmd -D -N {node}"
        spaces = ("--mount", "--propagation=private", "--pid", "--mount-proc", "--fork", "--kill-child")
        self._start(node, "unshare", *spaces, "bash", "-c", start)

    def kill(self, node: str) -> None:
        self._running[node].kill()
        self._running[node].wait()

    def ask(self, *command: str, **variables: str) -> str:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environ = {"PATH": path, "HOME": str(self.folder), "SLURM_CONF": str(self._conf), **variables}
        done = subprocess.run(command, env=environ, cwd=self.folder, capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else done.stdout + done.stderr

    def submit(self, name: str, *command: str, options: str = "--nodes=3", **variables: str) -> Job:
        submit = ("sbatch", "--parsable", f"--job-name={name}", *options.split(), str(SBATCH), *command)
        said = self.ask(*submit, GC_THREADS="1", **variables)
        assert said.strip().isdigit(), said
        return Job(self, name, said.strip())

    def close(self) -> None:
        for process in reversed(self._running.values()):
            process.kill()
            process.wait()


class Job:
    def __init__(self, cluster: Cluster, name: str, number: str) -> None:
        self._cluster, self._log = cluster, cluster.folder / f"{name}-{number}.log"
        self.number, self.parameters = number, cluster.folder / "runs" / name / "parameters.safetensors"

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def field(self, name: str) -> str:
        """Return a field of `scontrol show job`."""
        found = re.search(rf"\b{name}=(\S+)", self._cluster.ask("scontrol", "show", "job", self.number))
        return found.group(1) if found else ""

    def wait_for(self, pattern: str, times: int = 1) -> None:
        """Wait until the log matches so often."""
        try:
            wait_until(pattern, lambda: len(re.findall(pattern, self.log)) >= times)
        except AssertionError as error:
            raise AssertionError(f"{error} in:\n{self.log}") from None

    def ended(self, state: str, code: int = 0) -> str:
        """Wait for the end, and return the log."""
        wait_until(
            "the end", lambda: self.field("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
        )
        assert (self.field("JobState"), self.field("ExitCode")) == (state, f"{code}:0"), self.log
        return self.log

    def tell(self, signal: str) -> None:
        """Send a signal to the batch script, as the operator or --signal does."""
        self._cluster.ask("scancel", "--batch", f"--signal={signal}", self.number)


def wait_until(what: str, holds: object) -> None:
    assert callable(holds)
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.1)


STAND_INS = {
    "srun": 'while [[ $1 == --* ]]; do shift; done; for i in 0 1; do SLURM_PROCID=$i "$@" & done; wait',
    "squeue": '[ "$OTHER" = COMPLETING ] && ! mkdir asked 2>/dev/null || echo $OTHER',
    "scontrol": 'echo "scontrol $*"',
}


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts the batch script as Slurm does for two tasks, without Slurm."""
    started: list[subprocess.Popen[str]] = []
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"JOB_ID": "7", "JOB_NAME": "one", "NTASKS": "2", "JOB_NUM_NODES": "2"}
    fixed = {
        **{"PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)},
        **{f"SLURM_{name}": value for name, value in slurm.items()},
        **{"GC_THREADS": "1", "GC_HTTP_PORT": "-1", "GC_GIVE_UP_SECONDS": "5", "OTHER": ""},
    }

    def start(*command: str, **variables: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                ["bash", str(SBATCH), *command],
                env={**fixed, **variables},
                cwd=tmp_path,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )
        return started[-1]

    yield start
    for each in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(each.pid, signal.SIGKILL)  # as Slurm ends what a job leaves
        each.wait()
        assert each.stdout is not None
        each.stdout.close()


def test_the_script_trains_and_keeps_its_name_and_its_token(
    stand_in: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    both = [stand_in(GC_EPOCHS="1", SLURM_JOB_ID=number, OTHER="RUNNING") for number in "89"]
    logs = {job.communicate()[0]: job.returncode for job in both}
    assert sorted(logs.values()) == [0, 2], logs
    assert "has the same name" in "".join(logs)
    folder = tmp_path / "runs" / "one"
    assert load_file(folder / "parameters.safetensors")
    assert {each.stat().st_mode & 0o077 for each in (folder, folder / "token")} == {0}
    job = stand_in(OTHER="COMPLETING", GC_MIN_WORKERS="4")
    assert re.search(r"is completing[\s\S]*Slurm gave 2 nodes for 2 workers", job.communicate()[0])
    assert job.returncode == 2


def test_a_job_whose_server_is_killed_is_requeued(
    stand_in: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    job = stand_in(GC_EPOCHS="10000", SLURM_RESTART_COUNT="9")  # after other losses
    assert job.stdout is not None
    assert any("joined with" in line for line in job.stdout)
    subprocess.run(["pkill", "-KILL", "-f", f"gc-server --state {tmp_path}"], check=True)
    assert "scontrol requeue 7\n" in job.stdout


def test_a_job_whose_workers_end_early_fails(
    stand_in: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    (tmp_path / "sleep").write_text("#!/bin/bash\n")  # The script would wait 90 s for the server.
    (tmp_path / "sleep").chmod(0o755)
    job = stand_in("true")
    log = job.communicate()[0]
    assert (job.returncode, "the workers ended before the job was finished" in log) == (1, True), log


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if not ALL_HERE:
        pytest.skip("needs root and Slurm (Debian: apt install slurmctld slurmd slurm-client munge)")
    found = Cluster(tmp_path_factory.mktemp("slurm"))
    yield found
    found.close()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_jobs_outlive_a_node_a_time_limit_and_an_upgrade_with_the_same_bits(cluster: Cluster) -> None:
    """The path of docs/how-to/slurm.md: two jobs train beside each other, one with a script of its own."""
    train = (ROOT / "deploy" / "kubernetes" / "script" / "train.py").read_text()
    paced = train.replace("loss.backward()", "__import__('paced').pace(); loss.backward()")
    (cluster.folder / "train.py").write_text(paced.replace("with grad", "torch.manual_seed(1)\nwith grad"))
    (cluster.folder / "paced.py").write_text(PACED)
    kept = {"GC_DURABILITY": "none", "GC_CHECKPOINT_EVERY": "10steps", "GC_EPOCHS": "60"}
    of_task = {**kept, "GC_TASK": "paced:task", "GC_ALLOW_TASK": "paced", "PYTHONPATH": str(cluster.folder)}
    task = cluster.submit("task", **of_task)
    script = cluster.submit("script", "python", "train.py", **kept)
    for job in (task, script):
        job.wait_for("after 1 epoch")
    cluster.kill("n1")
    for job in (task, script):
        wait_until("requeued", lambda job=job: job.field("Restarts") == "1")
    cluster.boot("n1")
    for job in (task, script):
        job.wait_for(r"resuming at version[\s\S]*after \d+ epoch")
    task.tell("USR1")  # as --signal does before the time limit
    script.tell("TERM")
    assert "the same sbatch command continues the job" in script.ended("FAILED", 143)
    script = cluster.submit("script", "python", "train.py", **kept)
    script.wait_for("resuming at version")
    task.wait_for("resuming at version", 2)
    (cluster.folder / "hurry").touch()
    found = {"task": task, "script": script}
    for job in found.values():
        job.ended("COMPLETED")

    undisturbed = {
        "task": cluster.submit("task-undisturbed", **of_task),
        "script": cluster.submit("script-undisturbed", "python", "train.py", **kept),
    }
    for name, job in undisturbed.items():
        assert "resuming" not in job.ended("COMPLETED")
        one, other = (load_file(each.parameters) for each in (job, found[name]))
        assert one.keys() == other.keys()
        assert all(one[key].tobytes() == other[key].tobytes() for key in one)


@pytest.mark.slow
def test_bad_input_is_named_with_its_remedy(cluster: Cluster) -> None:
    few = cluster.submit("few", GC_MIN_WORKERS="4")
    log = f"--output={cluster.folder}/%x-%j.log"
    blind = cluster.submit("blind", options=f"--nodes=3 --chdir={cluster.folder}/private {log}")
    wrong = cluster.submit("wrong", GC_MODE="sink")
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        busy = cluster.submit("busy", GC_PORT=port)
        assert f"--port {port}: cannot listen" in busy.ended("FAILED", 2)
    assert "Slurm gave 3 nodes for 3 workers; ask for more by sbatch --nodes" in few.ended("FAILED", 2)
    assert "all nodes share" in blind.ended("FAILED", 2)
    assert "unknown mode 'sink'" in wrong.ended("FAILED", 2)


@pytest.mark.slow
def test_a_name_belongs_to_one_job_and_each_worker_to_one_gpu(cluster: Cluster) -> None:
    script = "echo sees GPU $CUDA_VISIBLE_DEVICES; until [ -e go ]; do sleep 0.1; done; exit 6"
    first = cluster.submit("same", "bash", "-c", script, options="--nodes=2 --ntasks-per-node=2 --gres=gpu:2")
    first.wait_for("sees GPU", 4)
    assert f"job {first.number} has the same name" in cluster.submit("same").ended("FAILED", 2)
    (cluster.folder / "go").touch()
    log = first.ended("FAILED", 6)
    assert sorted(re.findall(r"sees GPU (\S+)", log)) == ["0", "0", "1", "1"]
    assert "all workers have ended, and the job is not finished" in log
