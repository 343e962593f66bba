"""Whole jobs as kubectl renders them, run as processes of this machine: no container engine, no cluster.

`Namespace` stands for the API server, the kubelet and the cluster's DNS. It finds the objects that others
name. It starts each command as a process, with the rendered variables and a folder for each volume.
"""

from __future__ import annotations

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
    name_of,
    pod,
    render,
    validate,
)

PROGRAMS = Path(sys.executable).parent
INDEX = "batch.kubernetes.io/job-completion-index"


class Namespace:
    """Objects that were applied, and the processes of their pods; none outlives the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._objects: dict[tuple[str, str], Manifest] = {}
        self._ports: dict[tuple[str, str], str] = {}  # of servers, by StatefulSet and name of the port
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def apply(self, rendered: list[Manifest]) -> dict[str, Manifest]:
        """Add a job's objects, which replace those of the same names.

        Returns:
            The objects by kind, without the config maps.
        """
        for manifest in rendered:
            self._objects[manifest["kind"], name_of(manifest)] = manifest
        return {each["kind"]: each for each in rendered if each["kind"] != "ConfigMap"}

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
        if workload["kind"] == "Job":
            variables["GC_SERVER"] = f"127.0.0.1:{self.port(self.server_of(workload), 'GC_PORT')}"
        folders = {
            each["mountPath"]: self._mounted(workload, each["name"], name)
            for each in container(workload)["volumeMounts"]
        }

        def here(text: str) -> str:
            mounted = [path for path in folders if text.startswith(f"{path}/")]
            return str(folders[mounted[0]]) + text.removeprefix(mounted[0]) if mounted else text

        program, *arguments = container(workload)["command"]
        with (self._folder / name).open("wb") as log:
            self._running[name] = subprocess.Popen(
                [PROGRAMS / program, *map(here, arguments)],
                env={**{key: here(value) for key, value in variables.items()}, "HOME": str(self._folder)},
                cwd=self._folder,
                stdout=log,
                stderr=log,
            )
        return name

    def port(self, server: Manifest, option: str) -> str:
        return self._ports.setdefault((name_of(server), option), free_port())

    def volume(self, server: Manifest) -> Path:
        """Return the folder that stands for the volume of its first pod."""
        (claim,) = server["spec"]["volumeClaimTemplates"]
        return self._mounted(server, claim["metadata"]["name"], f"{name_of(server)}-0")

    def _mounted(self, workload: Manifest, volume: str, name: str) -> Path:
        """The folder that stands for a volume of a pod. Only a claimed volume outlives the pod."""
        claims = {each["metadata"]["name"] for each in workload["spec"].get("volumeClaimTemplates", ())}
        folder = self._folder / "volumes" / f"{volume}-{name}"
        if volume not in claims:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        for each in pod(workload)["spec"]["volumes"]:
            if each["name"] == volume and "configMap" in each:
                for file, content in self.named("ConfigMap", each["configMap"]["name"])["data"].items():
                    (folder / file).write_text(content)
        return folder

    def exit_code(self, name: str) -> int:
        return self._running[name].wait(timeout=200)

    def kill(self, name: str) -> None:
        self._running[name].kill()
        self._running[name].wait()

    def stop(self, name: str) -> int:
        self._running[name].terminate()
        return self.exit_code(name)

    def log(self, name: str) -> str:
        return (self._folder / name).read_text()

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


SMALL = """
configMapGenerator:
  - name: gradwire-server
    behavior: merge
    literals: [GC_EPOCHS={epochs}, GC_MIN_WORKERS={workers}, GC_THREADS=1]
  - name: gradwire-worker
    behavior: merge
    literals: [GC_THREADS=1]
"""


@pytest.fixture
def overlays(tmp_path: Path) -> Path:
    """A folder in which overlays find the checkout, as docs/how-to/kubernetes.md has it."""
    (tmp_path / "gradwire").symlink_to(ROOT)
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


def small(base: str, *, epochs: int, workers: int, more: str = "") -> str:
    """An overlay on `base` whose job is over soon."""
    return f"resources: [../gradwire/deploy/kubernetes/{base}]\n{more}" + SMALL.format(
        epochs=epochs, workers=workers
    )


@pytest.mark.parametrize("more", ["namePrefix: second-\n", "nameSuffix: -run2\n"])
def test_jobs_of_other_names_share_nothing(more: str, namespace: Namespace, overlays: Path) -> None:
    rendered = {
        "one": render(BASE),
        "other": overlay(overlays / "other", small("base", epochs=30, workers=4, more=more)),
        "second": render(KUBERNETES / "second") if "second" in more else [],
    }
    if rendered["second"]:  # the example is the same but for the options
        assert {name_of(each) for each in rendered["second"] if each["kind"] != "ConfigMap"} <= {
            name_of(each) for each in rendered["other"]
        }
    one, other = namespace.apply(rendered["one"]), namespace.apply(rendered["other"])
    names = [{(each["kind"], name_of(each)) for each in rendered[job]} for job in ("one", "other")]
    assert not names[0] & names[1]
    for job in (one, other):
        workloads = [job["StatefulSet"], job["Job"]]
        assert namespace.server_of(job["Job"]) is job["StatefulSet"]
        assert job["StatefulSet"]["spec"]["serviceName"] == name_of(job["Service"])
        policy = job["NetworkPolicy"]["spec"]
        (peer,) = policy["ingress"][0]["from"]
        selected = {
            "service": namespace.selected(job["Service"]["spec"]["selector"]),
            "set": namespace.selected(job["StatefulSet"]["spec"]["selector"]["matchLabels"]),
            "policy": namespace.selected(policy["podSelector"]["matchLabels"]),
            "peers": namespace.selected(peer["podSelector"]["matchLabels"]),
            "monitor": namespace.selected(job["PodMonitor"]["spec"]["selector"]["matchLabels"]),
        }
        assert selected == {
            **{selector: [job["StatefulSet"]] for selector in ("service", "set", "policy")},
            "peers": [job["Job"]],
            "monitor": workloads,
        }
    assert namespace.volume(one["StatefulSet"]) != namespace.volume(other["StatefulSet"])
    assert {"app.kubernetes.io/instance", "app.kubernetes.io/component"} == set(
        one["PodMonitor"]["spec"]["podTargetLabels"]
    )


def test_a_script_and_a_second_job_train_at_the_same_time(namespace: Namespace, overlays: Path) -> None:
    """The overlay of docs/how-to/kubernetes.md for a script, and beside it `second` with a task."""
    script = (KUBERNETES / "script" / "train.py").read_text() + "print(job.done, torch.get_num_threads())\n"
    text = documented("name: gradwire-script")
    overlay(overlays / "my-script", text, **{"train.py": script})
    first = namespace.apply(
        overlay(overlays / "first", "resources: [../my-script]\n" + SMALL.format(epochs=1, workers=2))
    )
    second = namespace.apply(overlay(overlays / "other", small("second", epochs=2, workers=1)))
    pods = [
        namespace.start(first["Job"], 0),
        namespace.start(second["Job"], 0),
        namespace.start(first["Job"], 1),
    ]
    servers = [namespace.start(job["StatefulSet"]) for job in (first, second)]  # which workers wait for

    assert {name: namespace.exit_code(name) for name in pods} == dict.fromkeys(pods, Exit.DONE), (
        namespace.log(pods[0])
    )
    assert [namespace.log(pods[number]).endswith("True 1\n") for number in (0, 2)] == [True, True]
    trained = [
        load_file(namespace.volume(job["StatefulSet"]) / "parameters.safetensors") for job in (first, second)
    ]
    of_script, of_task = (each["0.weight"].shape for each in trained)
    assert of_script == (128, 64)
    assert of_task == (256, 64)
    for server, workers in zip(servers, (2, 1), strict=True):
        assert len({line for line in namespace.log(server).splitlines() if "joined" in line}) == workers


def test_a_job_outlives_its_server_and_trains_again_under_another_name(
    namespace: Namespace, overlays: Path
) -> None:
    job = namespace.apply(overlay(overlays / "my-job", small("base", epochs=2, workers=2)))
    server = namespace.start(job["StatefulSet"])
    workers = [namespace.start(job["Job"], index) for index in (0, 1)]
    while "after 1 epoch, version" not in namespace.log(server):
        time.sleep(0.05)
    namespace.kill(server)  # its node is lost, and the set starts it anew
    namespace.start(job["StatefulSet"])
    codes = {name: namespace.exit_code(name) for name in workers}

    assert codes == dict.fromkeys(workers, Exit.DONE), namespace.log(workers[0]) + namespace.log(server)
    output = namespace.volume(job["StatefulSet"]) / "parameters.safetensors"
    assert load_file(output)
    assert "resuming at version" in namespace.log(server)
    # The server stays, so that its set does not start it again, and keeps answering.
    at = f"http://127.0.0.1:{namespace.port(job['StatefulSet'], 'GC_HTTP_PORT')}"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert get(at + container(job["StatefulSet"])[probe]["httpGet"]["path"]) is not None, probe
    (endpoint,) = job["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert "gradwire_" in (get(at + endpoint["path"]) or "")

    # The Job alone, deleted and applied again, says what to do instead.
    again = namespace.start(job["Job"])
    text = small("base", epochs=1, workers=1, more="nameSuffix: -run2\n")
    anew = namespace.apply(overlay(overlays / "my-job", text))
    servers = namespace.start(anew["StatefulSet"])
    worker = namespace.start(anew["Job"])
    assert namespace.exit_code(again) == Exit.DONE
    assert "this worker has trained nothing" in namespace.log(again)
    assert "another nameSuffix" in namespace.log(again)
    assert namespace.exit_code(worker) == Exit.DONE, namespace.log(worker) + namespace.log(servers)
    assert load_file(namespace.volume(anew["StatefulSet"]) / "parameters.safetensors")
    assert output.exists()
    assert [namespace.stop(each) for each in (server, servers)] == [Exit.DONE, Exit.DONE]
