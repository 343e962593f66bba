"""The manifests in deploy/kubernetes/base: what kubectl renders is valid, and its parts agree.

A schema knows each object alone. What an API server, a kubelet or Prometheus would find out later is
checked here too: a probe at a port that does not exist, a selector that selects nothing, a variable that is
no option. `test_kubernetes_jobs` runs what is rendered.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from gradwire.common.addresses import parse_address
from gradwire.common.exits import Exit
from gradwire.common.version import __version__

from .manifests import (
    BASE,
    KUBERNETES,
    ROOT,
    VERSIONS,
    Manifest,
    by_kind,
    container,
    documented,
    pod,
    render,
    validate,
)

FILES = ("GC_TLS_CERT", "GC_TLS_KEY", "GC_TLS_CA", "GC_TOKEN_FILE")  # options that name one


@pytest.fixture(scope="session")
def rendered() -> list[Manifest]:
    return render(BASE)


@pytest.fixture
def manifests(rendered: list[Manifest]) -> dict[str, Manifest]:
    """Copies of the rendered objects by kind; config maps by name, without the hash."""
    return by_kind(copy.deepcopy(rendered))


def ports(manifest: Manifest) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(manifest)["ports"]}


def test_renders_what_a_job_needs(manifests: dict[str, Manifest]) -> None:
    assert manifests.keys() == {
        *("Service", "StatefulSet", "Job", "NetworkPolicy", "PodMonitor"),
        *("gradwire-server", "gradwire-worker"),
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(version: str, rendered: list[Manifest]) -> None:
    for manifest in rendered:
        validate(manifest, version)


def _misspell(manifest: Manifest, name: str, wrong: str) -> None:
    manifest[wrong] = manifest.pop(name)


def test_the_overlay_in_the_documentation_builds(tmp_path: Path) -> None:
    (tmp_path / "my-job").mkdir()
    (tmp_path / "my-job" / "kustomization.yaml").write_text(documented("GC_MIN_WORKERS=8"))
    (tmp_path / "gradwire").symlink_to(ROOT)

    manifests = {manifest["kind"]: manifest for manifest in render(tmp_path / "my-job")}
    for manifest in manifests.values():
        validate(manifest, VERSIONS[-1])
    assert manifests["Job"]["spec"]["parallelism"] == manifests["Job"]["spec"]["completions"] == 8
    assert container(manifests["StatefulSet"])["image"] == f"registry.example.com/gradwire:{__version__}"


def test_the_secure_component_has_every_file_that_its_options_name(tmp_path: Path) -> None:
    (tmp_path / "kubernetes").symlink_to(KUBERNETES)
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "kustomization.yaml").write_text(
        "resources: [../kubernetes/base]\ncomponents: [../kubernetes/secure]\n"
    )
    found = by_kind(render(tmp_path / "job"))
    for manifest in found.values():
        validate(manifest, VERSIONS[0])
    assert "appProtocol" not in found["Service"]["spec"]["ports"][0]
    secret = {"tls": {"tls.crt", "tls.key", "ca.crt"}, "token": {"token"}}
    for kind, name in (("StatefulSet", "gradwire-server"), ("Job", "gradwire-worker")):
        volumes = {each["name"]: each.get("secret", {}) for each in pod(found[kind])["spec"]["volumes"]}
        files = {
            f"{mount['mountPath']}/{file}"
            for mount in container(found[kind])["volumeMounts"]
            if mount["name"] in secret
            for file in secret[mount["name"]]
            if "items" not in volumes[mount["name"]]
            or file in [item["key"] for item in volumes[mount["name"]]["items"]]
        }
        named = {value for key, value in found[name]["data"].items() if key in FILES}
        assert named <= files
        assert ("/etc/gradwire/tls/tls.key" in files) is (kind == "StatefulSet"), "workers never see the key"
        assert found[name]["data"].get("GC_INSECURE", "false") == "false"
        assert {volumes[each]["secretName"] for each in secret} == {"gradwire-tls", "gradwire-token"}
    assert len([key for key in FILES if key in found["gradwire-server"]["data"]]) == 3
    assert len([key for key in FILES if key in found["gradwire-worker"]["data"]]) == 2


BREAKAGES: dict[str, tuple[str, Callable[[Manifest], object]]] = {
    "misspelled probe": ("StatefulSet", lambda m: _misspell(container(m), "livenessProbe", "livenesProbe")),
    "text for a number": ("StatefulSet", lambda m: m["spec"].update(replicas="1")),
    "no selector": ("StatefulSet", lambda m: m["spec"].pop("selector")),
    "number for a variable": ("Job", lambda m: container(m)["env"].append({"name": "GC_SEED", "value": 1})),
    "option of the Job in the pod": ("Job", lambda m: pod(m)["spec"].update(backoffLimitPerIndex=3)),
    "exit code as text": (
        "Job",
        lambda m: m["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"].update(values=["2"]),
    ),
    "port as a list": ("NetworkPolicy", lambda m: m["spec"]["ingress"][1].update(ports=["http"])),
    "value that is not text": ("gradwire-server", lambda m: m["data"].update(GC_SEED=1)),
    "misspelled endpoints": (
        "PodMonitor",
        lambda m: _misspell(m["spec"], "podMetricsEndpoints", "podMetricEndpoints"),
    ),
    "interval without a unit": (
        "PodMonitor",
        lambda m: m["spec"]["podMetricsEndpoints"][0].update(interval="15"),
    ),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_broken_object_is_refused(name: str, manifests: dict[str, Manifest]) -> None:
    kind, damage = BREAKAGES[name]
    damage(manifests[kind])

    with pytest.raises(jsonschema.ValidationError):
        validate(manifests[kind], VERSIONS[-1])


@pytest.mark.parametrize("kind", ["StatefulSet", "Job"])
def test_probes_ask_for_what_the_daemon_serves(kind: str, manifests: dict[str, Manifest]) -> None:
    daemon = container(manifests[kind])
    probes = {name: daemon[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}

    assert {probe["port"] for probe in probes.values()} == {"http"}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/livez",
        "liveness": "/livez",
        "readiness": "/readyz",
    }


def test_ports_are_those_of_the_options(manifests: dict[str, Manifest]) -> None:
    server, worker = manifests["gradwire-server"]["data"], manifests["gradwire-worker"]["data"]
    (service_port,) = manifests["Service"]["spec"]["ports"]

    assert ports(manifests["StatefulSet"]) == {
        "grpc": int(server["GC_PORT"]),
        "http": int(server["GC_HTTP_PORT"]),
    }
    assert ports(manifests["Job"]) == {"http": int(worker["GC_HTTP_PORT"])}
    assert (service_port["port"], service_port["targetPort"]) == (int(server["GC_PORT"]), "grpc")


def test_workers_find_the_server(manifests: dict[str, Manifest]) -> None:
    service = manifests["Service"]
    name, (port,) = service["metadata"]["name"], service["spec"]["ports"]
    dialled = parse_address(manifests["gradwire-worker"]["data"]["GC_SERVER"])

    assert manifests["StatefulSet"]["spec"]["serviceName"] == name
    assert service["spec"]["clusterIP"] == "None"
    assert dialled == f"{name}:{port['port']}"


def test_selectors_select(manifests: dict[str, Manifest]) -> None:
    server = pod(manifests["StatefulSet"])["metadata"]["labels"].items()
    worker = pod(manifests["Job"])["metadata"]["labels"].items()
    policy = manifests["NetworkPolicy"]["spec"]
    (peer,) = policy["ingress"][0]["from"]
    for selector in (
        manifests["StatefulSet"]["spec"]["selector"]["matchLabels"],
        manifests["Service"]["spec"]["selector"],
        policy["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= server
        assert not selector.items() <= worker
    assert peer["podSelector"]["matchLabels"].items() <= worker
    assert not peer["podSelector"]["matchLabels"].items() <= server
    assert manifests["PodMonitor"]["spec"]["selector"]["matchLabels"].items() <= server & worker


def test_only_workers_reach_the_grpc_port(manifests: dict[str, Manifest]) -> None:
    rules = manifests["NetworkPolicy"]["spec"]["ingress"]

    assert [rule["ports"] for rule in rules] == [[{"port": "grpc"}], [{"port": "http"}]]
    assert ["from" in rule for rule in rules] == [True, False]
    assert manifests["gradwire-server"]["data"]["GC_INSECURE"] == "true"


def test_the_first_round_waits_for_every_worker(manifests: dict[str, Manifest]) -> None:
    job = manifests["Job"]["spec"]

    assert job["completionMode"] == "Indexed"
    assert (
        job["completions"]
        == job["parallelism"]
        == int(manifests["gradwire-server"]["data"]["GC_MIN_WORKERS"])
    )


def test_exit_codes_are_acted_on(manifests: dict[str, Manifest]) -> None:
    actions = {
        code: rule["action"]
        for rule in manifests["Job"]["spec"]["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
        for code in rule["onExitCodes"]["values"]
    }

    assert actions == {Exit.USAGE: "FailJob", Exit.REFUSED: "FailIndex", Exit.TASK: "FailIndex"}


@pytest.mark.parametrize("kind", ["StatefulSet", "Job"])
def test_nothing_runs_as_root_or_writes_to_the_image(kind: str, manifests: dict[str, Manifest]) -> None:
    spec = pod(manifests[kind])["spec"]
    volumes = {volume["name"] for volume in spec["volumes"]} | {
        claim["metadata"]["name"] for claim in manifests[kind]["spec"].get("volumeClaimTemplates", ())
    }
    assert spec["securityContext"]["runAsNonRoot"] is True
    for each in (*spec["initContainers"], *spec["containers"]):
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {mount["name"] for mount in each["volumeMounts"]} <= volumes


def test_everything_written_is_on_a_volume(manifests: dict[str, Manifest]) -> None:
    output = Path(manifests["gradwire-server"]["data"]["GC_OUTPUT"])
    state = Path(manifests["gradwire-server"]["data"]["GC_STATE"])
    (claim,) = manifests["StatefulSet"]["spec"]["volumeClaimTemplates"]
    for kind in ("StatefulSet", "Job"):
        daemon = container(manifests[kind])
        mounts = {mount["mountPath"]: mount["name"] for mount in daemon["volumeMounts"]}
        variables = {variable["name"]: variable.get("value") for variable in daemon["env"]}
        assert {"/tmp", variables["NUMBA_CACHE_DIR"], variables["HOME"]} <= mounts.keys()
        assert variables["PYTHONUNBUFFERED"] == "1"  # a killed script's output is in the log
        if kind == "StatefulSet":
            assert mounts[str(output.parent)] == claim["metadata"]["name"]
            assert mounts[str(state.parent)] == claim["metadata"]["name"]


@pytest.mark.parametrize(("kind", "name"), [("StatefulSet", "gradwire-server"), ("Job", "gradwire-worker")])
def test_every_variable_is_an_option(
    kind: str, name: str, manifests: dict[str, Manifest], tmp_path: Path
) -> None:
    """The command itself says where it took each option from, having read, converted and checked it."""
    (command,) = container(manifests[kind])["command"]
    data = manifests[name]["data"]
    variables = {
        **data,
        **({"GC_OUTPUT": str(tmp_path / "parameters")} if "GC_OUTPUT" in data else {}),  # for the volume
        **{entry["name"]: "0" for entry in container(manifests[kind])["env"] if "valueFrom" in entry},
    }
    done = subprocess.run(
        [Path(sys.executable).parent / command, "--print-config"],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    taken = {line.rpartition("# environment ")[2] for line in done.stdout.splitlines()}

    assert done.returncode == 0, done.stderr
    assert variables.keys() <= taken
