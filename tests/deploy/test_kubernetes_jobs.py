"""Whole jobs as kubectl renders them, run as processes of this machine: no container engine, no cluster.

`Namespace` stands for the API server, the kubelet and the cluster's DNS. It finds the objects that others
name. It starts each command as a process, with the rendered variables, user, read-only root, and a folder for
each volume.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

from gradwire.common.addresses import parse_address
from gradwire.common.exits import Exit

from .manifests import (
    BASE,
    KUBERNETES,
    ROOT,
    VERSIONS,
    Manifest,
    container,
    documented,
    kustomize,
    name_of,
    pod,
    render,
    validate,
)

PROGRAMS = Path(sys.executable).parent
INDEX = "batch.kubernetes.io/job-completion-index"


# Runs a command with a read-only root, but for a folder and the compiled kernels, without capabilities.
BOX = """
mount --bind "$0" "$0" && mount --bind "$1" "$1" && mount -o remount,bind,ro / || exit 99
shift && exec setpriv --inh-caps=-all --ambient-caps=-all --bounding-set=-all --no-new-privs "$@"
"""
KERNELS = ROOT / "compressors" / "kernels" / "__pycache__"


def box(folder: Path, uid: int) -> list[str]:
    """Return what stands before a command to run it with a pod's user and rights; nothing where the machine
    lets a process have no namespaces."""
    spaces = ("--user", f"--map-user={uid}", f"--map-group={uid}", "--mount", "--keep-caps")
    prefix = ["unshare", *spaces, "bash", "-c", BOX, str(folder), str(KERNELS)]
    try:
        return prefix if subprocess.run([*prefix, "true"], capture_output=True).returncode == 0 else []
    except FileNotFoundError:
        return []


class Namespace:
    """Objects that were applied, and the processes of their pods; none outlives the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._objects: dict[tuple[str, str], Manifest] = {}
        self._ports: dict[tuple[str, str], str] = {}  # of first pods, by Job and option
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def apply(self, rendered: list[Manifest]) -> dict[str, Manifest]:
        """Add a job's objects, which replace those of the same names.

        Returns:
            The objects by kind, Jobs by component, without the config maps.
        """
        for manifest in rendered:
            self._objects[manifest["kind"], name_of(manifest)] = manifest
        return {
            each["metadata"]["labels"]["app.kubernetes.io/component"]
            if each["kind"] == "Job"
            else each["kind"]: each
            for each in rendered
            if each["kind"] != "ConfigMap"
        }

    def named(self, kind: str, name: str) -> Manifest:
        return self._objects[kind, name]

    def selected(self, selector: Mapping[str, str]) -> list[Manifest]:
        """Those whose pods have these labels."""
        return [
            each
            for each in self._objects.values()
            if "template" in each["spec" if "spec" in each else "metadata"]
            and selector.items() <= pod(each)["metadata"]["labels"].items()
        ]

    def variables(self, workload: Manifest, index: int = 0) -> dict[str, str]:
        """The environment of its container, as it is rendered."""
        found: dict[str, str] = {}
        for source in container(workload)["envFrom"]:
            found |= self.named("ConfigMap", source["configMapRef"]["name"])["data"]
        for each in container(workload)["env"]:
            if "valueFrom" in each:
                assert each["valueFrom"] == {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
                found[each["name"]] = str(index)
            else:
                found[each["name"]] = each["value"]
        return found

    def server_of(self, workers: Manifest) -> Manifest:
        """Return the server whose pod answers at the address that a worker dials."""
        host, _, port = parse_address(self.variables(workers)["GC_SERVER"]).rpartition(":")
        service = self.named("Service", host)
        (server,) = self.selected(service["spec"]["selector"])
        (answered,) = service["spec"]["ports"]
        assert port == str(answered["port"]) == self.variables(server)["GC_PORT"]
        return server

    def start(self, workload: Manifest, index: int = 0) -> str:
        """Start a pod. Returns its name."""
        name = f"{name_of(workload)}-{index}"
        variables = self.variables(workload, index)
        del variables["NUMBA_CACHE_DIR"]  # the kernels that the tests have compiled serve as well
        for option in ("GC_PORT", "GC_HTTP_PORT"):  # a pod has an address of its own, a process has not
            if option in variables:
                variables[option] = self.port(workload, option) if index == 0 else free_port()
        if "GC_SERVER" in variables:
            variables["GC_SERVER"] = f"127.0.0.1:{self.port(self.server_of(workload), 'GC_PORT')}"
        folders = {
            each["mountPath"]: self._mounted(workload, each["name"], name)
            for each in container(workload)["volumeMounts"]
        }

        def here(text: str) -> str:
            mounted = [path for path in folders if text == path or text.startswith(f"{path}/")]
            return str(folders[mounted[0]]) + text.removeprefix(mounted[0]) if mounted else text

        program, *arguments = container(workload)["command"]
        sealed = box(self.folder, pod(workload)["spec"]["securityContext"]["runAsUser"])
        with (self.folder / name).open("ab") as log:
            self._running[name] = subprocess.Popen(
                [*sealed, PROGRAMS / program, *map(here, arguments)],
                env={key: here(value) for key, value in variables.items()},
                cwd=self.folder,
                stdout=log,
                stderr=log,
            )
        return name

    def port(self, server: Manifest, option: str) -> str:
        return self._ports.setdefault((name_of(server), option), free_port())

    def volume(self, server: Manifest) -> Path:
        """Return the folder that stands for the volume of a server."""
        return self._mounted(server, "data", "")

    def _mounted(self, workload: Manifest, volume: str, name: str) -> Path:
        """The folder that stands for a volume of a pod. Only a claimed volume outlives the pod."""
        (found,) = [each for each in pod(workload)["spec"]["volumes"] if each["name"] == volume]
        if "persistentVolumeClaim" in found:
            claim = found["persistentVolumeClaim"]["claimName"]
            folder = self.folder / "volumes" / name_of(self.named("PersistentVolumeClaim", claim))
        else:
            folder = self.folder / "volumes" / f"{volume}-{name}"
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        if "configMap" in found:
            for file, content in self.named("ConfigMap", found["configMap"]["name"])["data"].items():
                (folder / file).write_text(content)
        return folder

    def exit_code(self, name: str) -> int:
        return self._running[name].wait(timeout=400)

    def wait_for(self, name: str, words: str, times: int = 1) -> None:
        while self.log(name).count(words) < times:
            assert self._running[name].poll() is None, self.log(name)
            time.sleep(0.05)

    def kill(self, name: str) -> None:
        self._running[name].kill()
        self._running[name].wait()

    def stop(self, name: str) -> int:
        self._running[name].terminate()
        return self.exit_code(name)

    def log(self, name: str) -> str:
        return (self.folder / name).read_text()

    def close(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()


@pytest.fixture
def namespace(tmp_path: Path) -> Iterator[Namespace]:
    (tmp_path / "pods").mkdir()
    found = Namespace(tmp_path / "pods")
    yield found
    found.close()


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def get(url: str) -> str | None:
    """The body of a 200, None for any other answer or none."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            body: bytes = answer.read()
            return body.decode()
    except OSError:  # includes HTTP errors
        return None


# 0.5 s more for a step, until the test lets the job hurry.
PACED = """
import dataclasses, pathlib, time
from gradwire.worker.tasks import load
def pace():
    if not pathlib.Path("hurry").exists():
        time.sleep(0.5)
def task():
    digits = load("digits")
    return dataclasses.replace(digits, loss=lambda *of: (pace(), digits.loss(*of))[1])
"""

SMALL = """
namePrefix: {name}-
configMapGenerator:
  - name: gradwire-server
    behavior: merge
    literals: [GC_EPOCHS={epochs}, GC_MIN_WORKERS={workers}, GC_THREADS=1{server}]
  - name: gradwire-worker
    behavior: merge
    literals: [GC_COMPRESSOR=none, GC_THREADS=1{worker}]
"""


@pytest.fixture
def overlays(tmp_path: Path, namespace: Namespace) -> Path:
    """A folder in which overlays find the checkout, as docs/how-to/kubernetes.md has it."""
    (tmp_path / "gradwire").symlink_to(ROOT)
    (namespace.folder / "paced.py").write_text(PACED)
    return tmp_path


def overlay(folder: Path, text: str, **files: str) -> list[Manifest]:
    """Write an overlay and render it."""
    folder.mkdir(exist_ok=True)
    for name, content in {"kustomization.yaml": text, **files}.items():
        (folder / name).write_text(content)
    found = render(folder)
    for manifest in found:
        validate(manifest, VERSIONS[-1])
    return found


@pytest.mark.parametrize("more", ["namePrefix: second-\n", "nameSuffix: -run2\n"])
def test_jobs_of_other_names_share_nothing(more: str, namespace: Namespace, overlays: Path) -> None:
    base = "resources: [../gradwire/deploy/kubernetes/base]\n"
    rendered = [render(BASE), overlay(overlays / "other", base + more)]
    names = [{(each["kind"], name_of(each)) for each in job} for job in rendered]
    assert not names[0] & names[1]
    one, other = map(namespace.apply, rendered)
    for job in (one, other):
        assert namespace.server_of(job["worker"]) is job["server"]
        assert namespace.selected(job["Service"]["spec"]["selector"]) == [job["server"]]
    assert namespace.volume(one["server"]) != namespace.volume(other["server"])


def test_a_process_has_the_user_and_the_rights_of_its_pod(tmp_path: Path) -> None:
    """Where this is left out, `test_the_path_of_an_operator` runs with the rights of the tests."""
    sealed = box(tmp_path, 65532)
    if not sealed:
        pytest.skip(
            "needs unshare and user namespaces: the processes of pods run without uid and read-only root"
        )
    ask = f"id -u; touch {tmp_path}/here /there; grep CapBnd: /proc/self/status"
    done = subprocess.run([*sealed, "sh", "-c", ask], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == ["65532", "CapBnd:", "0" * 16]
    assert "Read-only" in done.stderr
    assert (tmp_path / "here").exists()


@pytest.mark.timeout(600)  # five starts after each other
def test_the_path_of_an_operator(namespace: Namespace, overlays: Path) -> None:
    """The path of docs/how-to/kubernetes.md: two jobs, one with a script of one's own; a server
    that is killed; an upgrade; a backup that is restored, with the same bits; training again."""

    def digits(name: str, *, more: str = "") -> dict[str, Manifest]:
        of_task = SMALL.format(
            **{"name": name, "epochs": 60, "workers": 1},
            **{"server": ', "GC_TASK=paced:task", GC_BATCH_SIZE=256', "worker": ", GC_ALLOW_TASK=paced"},
        )
        base = "resources: [../gradwire/deploy/kubernetes/base]\n"
        return namespace.apply(overlay(overlays / name, base + of_task + more))

    script = (KUBERNETES / "script" / "train.py").read_text() + "print(job.done, torch.get_num_threads())\n"
    overlay(overlays / "my-script", documented("name: gradwire-script"), **{"train.py": script})
    of_script = SMALL.format(name="mine", epochs=1, workers=2, server="", worker="")
    other = namespace.apply(overlay(overlays / "mine", f"resources: [../my-script]\n{of_script}"))
    job = digits("digits")
    workers = [namespace.start(other["worker"], 0), namespace.start(other["worker"], 1)]
    worker, server = namespace.start(job["worker"]), namespace.start(job["server"])
    others = namespace.start(other["server"])  # which its workers wait for

    namespace.wait_for(server, "after 1 epoch")
    twin = namespace.start(job["server"], 1)  # of another job by this name
    assert namespace.exit_code(twin) == Exit.USAGE
    assert "another gc-server uses this folder" in namespace.log(twin)
    at = f"http://127.0.0.1:{namespace.port(job['server'], 'GC_HTTP_PORT')}"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert get(at + container(job["server"])[probe]["httpGet"]["path"]) is not None, probe

    namespace.kill(server)  # its node is lost, and the Job makes the next pod
    namespace.start(job["server"])
    namespace.wait_for(server, "resuming at version")
    namespace.wait_for(server, "accuracy", namespace.log(server).count("accuracy") + 1)
    codes = {name: namespace.exit_code(name) for name in (*workers, others)}  # the server ends with its job
    assert codes == dict.fromkeys(codes, Exit.DONE), namespace.log(workers[0]) + namespace.log(others)
    assert [namespace.log(each).endswith("True 1\n") for each in workers] == [True, True]

    # As upgrade.sh does it. Meanwhile the state is copied to the volume of another job.
    assert [namespace.stop(each) for each in (server, worker)] == [128 + 15, 128 + 15]
    copy = digits("copy")
    shutil.copytree(namespace.volume(job["server"]), namespace.volume(copy["server"]), dirs_exist_ok=True)
    job = digits("digits", more="images: [{name: gradwire, newTag: 0.2.1}]\n")
    again = digits("digits", more="nameSuffix: -run2\n")
    (namespace.folder / "hurry").touch()
    jobs = (job, copy, again)
    pods = [namespace.start(each[part]) for each in jobs for part in ("server", "worker")]
    pods.append(namespace.start(other["server"]))
    codes = {name: namespace.exit_code(name) for name in pods}
    assert codes == dict.fromkeys(codes, Exit.DONE), "".join(map(namespace.log, pods))
    assert namespace.log(server).count("resuming at version") == 2
    assert "is finished. To train again" in namespace.log(others)
    one, restored, _ = (
        load_file(namespace.volume(each["server"]) / "parameters.safetensors") for each in jobs
    )
    assert all(one[key].equal(restored[key]) for key in one)


# Stands for kubectl, but for rendering: notes each call and the names that it reads; refuses that in REFUSED.
STAND_IN = """#!/bin/bash
[ "$1" != kubectl ] || shift
[ "$1" != kustomize ] || exec {kustomize} "${@:2}"
[ "${@: -1}" != - ] || read=$(sed -n 's/^  name: / /p' | tr -d '\\n')
echo "$*$read" >> calls
case "$*" in
    *"$REFUSED"*) echo "Error from server (Invalid)" >&2; exit 1 ;;
    create*) printf '%s\n' "Warning: it is old" "Error from server (AlreadyExists)" >&2; exit 1 ;;
esac
"""


PLAIN = ["Job/digits-gradwire-server", "Job/digits-gradwire-worker"]
LAYERS = {"jobset": ["JobSet/digits-gradwire-server"], "trainer": ["TrainJob/digits-gradwire-server"]}


@pytest.mark.parametrize(
    ("refused", "layer"),
    [
        ("none", None),
        ("create", None),
        (f"delete -n training {PLAIN[1]}", None),
        *(("none", x) for x in LAYERS),
    ],
)
def test_an_upgrade_stops_the_server_first_and_nothing_that_would_be_refused(
    refused: str, layer: str | None, overlays: Path
) -> None:
    """Where the API server would refuse a Job, nothing is stopped; half-way it says so."""
    base = "resources: [../gradwire/deploy/kubernetes/base]\nnamePrefix: digits-\n"
    overlay(
        overlays / "job", base + (f"components: [../gradwire/deploy/kubernetes/{layer}]\n" if layer else "")
    )
    jobs = LAYERS[layer] if layer else PLAIN
    (overlays / "kubectl").write_text(STAND_IN.replace("{kustomize}", " ".join(kustomize())))
    (overlays / "kubectl").chmod(0o755)
    done = subprocess.run(
        [KUBERNETES / "upgrade.sh", "job", "-n", "training"],
        env={"PATH": f"{overlays}:{os.environ['PATH']}", "REFUSED": refused},
        cwd=overlays,
        capture_output=True,
        text=True,
    )
    calls = (overlays / "calls").read_text().splitlines()
    checks, stops = calls[:2], calls[2:]
    assert [call.split(" ")[0] for call in checks] == ["apply", "create"]
    assert all("--dry-run=server" in call for call in checks)
    assert "digits-gradwire-data" in checks[0]
    assert checks[1].endswith(" ".join(["-", *(each.partition("/")[2] for each in jobs)]))
    order = [f"delete -n training {each}" for each in jobs]
    expected = {"none": [*order, "apply -n training -k job"], "create": []}.get(refused, order)
    assert [call.split(" --ignore")[0] for call in stops] == expected
    assert (done.returncode == 0) is (refused == "none"), done.stderr
    assert ("nothing was changed" in done.stderr) is (refused == "create")
    assert ("run this again" in done.stderr) is refused.startswith("delete")
