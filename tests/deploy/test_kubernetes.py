"""The manifests in deploy/kubernetes/base: what kubectl renders is valid, and its parts agree.

A schema knows each object alone. What an API server, a kubelet or Prometheus would find out later is
checked here too: a probe at a port that does not exist, a selector that selects nothing, a variable that is
no option. `test_kubernetes_jobs` runs what is rendered.
"""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import jsonschema
import pytest
import yaml

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
    jobs_of,
    kustomize,
    pod,
    render,
    validate,
)

FILES = ("GC_TLS_CERT", "GC_TLS_KEY", "GC_TLS_CA", "GC_TOKEN_FILE")  # options that name one


@pytest.fixture(scope="session")
def rendered() -> list[Manifest]:
    return render(BASE)


EVERYTHING = ("monitoring", "egress", "disruption", "priority", "gpu", "cert-manager")
# A folder of a component that replaces the Jobs, and what it leaves of them.
LAYERS = {"jobset": {"JobSet"}, "trainer": {"TrainJob", "TrainingRuntime"}, "files": {"Pod"}}


@pytest.fixture(scope="session")
def layers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Manifest]]:
    """A job named digits with every component, and each layer on it."""
    folder = tmp_path_factory.mktemp("layers")
    (folder / "kubernetes").symlink_to(KUBERNETES)
    texts = {
        "job": f"resources: [../kubernetes/base]\ncomponents: [{of_all(EVERYTHING)}]\nnamePrefix: digits-\n"
    }
    for name in LAYERS:
        texts[name] = f"resources: [../job]\ncomponents: [{of_all([name, 'kueue'])}]\n"
    for name, text in texts.items():
        (folder / name).mkdir()
        (folder / name / "kustomization.yaml").write_text(text)
    return {name: render(folder / name) for name in texts}


def of_all(names: Sequence[str]) -> str:
    return ", ".join(f"../kubernetes/{name}" for name in names)


@pytest.fixture
def manifests(rendered: list[Manifest]) -> dict[str, Manifest]:
    """Copies of the rendered objects by kind; config maps by name, without the hash."""
    return by_kind(copy.deepcopy(rendered))


def ports(manifest: Manifest) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(manifest)["ports"]}


def test_a_base_needs_no_crd_and_no_rights_beyond_its_namespace(manifests: dict[str, Manifest]) -> None:
    assert manifests.keys() == {
        *(
            "Service",
            "PersistentVolumeClaim",
            "server",
            "worker",
            "NetworkPolicy server",
            "NetworkPolicy worker",
        ),
        *("gradwire-server", "gradwire-worker"),
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(
    version: str, rendered: list[Manifest], layers: dict[str, list[Manifest]]
) -> None:
    for manifest in (*rendered, *render(KUBERNETES / "rules"), *chain.from_iterable(layers.values())):
        validate(manifest, version)


def test_every_name_follows_the_name_of_the_job(layers: dict[str, list[Manifest]]) -> None:
    """All but the token, which jobs may share."""
    for name, rendered in layers.items():
        for manifest in rendered:
            text = yaml.safe_dump(manifest)
            plain = set(re.findall(r"(?<!digits-)\bgradwire-[a-z-]+", text)) - {"gradwire-token"}
            assert plain <= ({"gradwire-ca"} if "commonName: gradwire-ca" in text else set()), name


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_replaces_the_jobs_and_keeps_their_pods(
    layer: str, layers: dict[str, list[Manifest]]
) -> None:
    job, found = by_kind(layers["job"]), by_kind(layers[layer])
    made = list(chain.from_iterable(map(jobs_of, found.values())))
    if layer == "files":
        assert found.keys() == LAYERS[layer]
        volume, here = found["Pod"]["spec"], job["server"]["spec"]["template"]["spec"]
        assert volume["containers"][0]["image"] == container(job["server"])["image"]
        assert volume["volumes"][0] == here["volumes"][0]
        assert volume["securityContext"] == here["securityContext"]
    else:
        assert found.keys() == job.keys() - {"server", "worker"} | LAYERS[layer]
        assert [each["spec"] for each in made] == [job[each]["spec"] for each in ("server", "worker")]
        queued = found["JobSet" if layer == "jobset" else "TrainJob"]
        assert queued["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]


def _misspell(manifest: Manifest, name: str, wrong: str) -> None:
    manifest[wrong] = manifest.pop(name)


def test_the_overlay_in_the_documentation_builds(tmp_path: Path) -> None:
    (tmp_path / "my-job").mkdir()
    (tmp_path / "my-job" / "kustomization.yaml").write_text(documented("GC_MIN_WORKERS=8"))
    (tmp_path / "gradwire").symlink_to(ROOT)

    manifests = by_kind(render(tmp_path / "my-job"))
    for manifest in manifests.values():
        validate(manifest, VERSIONS[-1])
    assert manifests["worker"]["spec"]["parallelism"] == manifests["worker"]["spec"]["completions"] == 8
    assert container(manifests["server"])["image"] == f"registry.example.com/gradwire:{__version__}"

    (claim,) = re.findall(r"^(.+awk .+) \| kubectl apply", documented("awk -v RS"), re.MULTILINE)
    here = claim.replace("kubectl kustomize", " ".join(kustomize()))
    made = subprocess.run(["bash", "-c", here], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert yaml.safe_load(made.stdout) == manifests["PersistentVolumeClaim"]


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
    for kind, name in (("server", "gradwire-server"), ("worker", "gradwire-worker")):
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
        assert ("/etc/gradwire/tls/tls.key" in files) is (kind == "server"), "workers never see the key"
        assert found[name]["data"].get("GC_INSECURE", "false") == "false"
        assert {volumes[each]["secretName"] for each in secret} == {"gradwire-tls", "gradwire-token"}
    assert len([key for key in FILES if key in found["gradwire-server"]["data"]]) == 3
    assert len([key for key in FILES if key in found["gradwire-worker"]["data"]]) == 2


BREAKAGES: dict[str, tuple[str, Callable[[Manifest], object]]] = {
    "misspelled probe": ("server", lambda m: _misspell(container(m), "livenessProbe", "livenesProbe")),
    "text for a number": ("server", lambda m: m["spec"].update(backoffLimit="1")),
    "no pods": ("server", lambda m: m["spec"].pop("template")),
    "number for a variable": (
        "worker",
        lambda m: container(m)["env"].append({"name": "GC_SEED", "value": 1}),
    ),
    "option of the Job in the pod": ("worker", lambda m: pod(m)["spec"].update(backoffLimitPerIndex=3)),
    "exit code as text": (
        "worker",
        lambda m: m["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"].update(values=["2"]),
    ),
    "port as text": ("NetworkPolicy server", lambda m: m["spec"]["ingress"][0].update(ports=["grpc"])),
    "value that is not text": ("gradwire-server", lambda m: m["data"].update(GC_SEED=1)),
    "misspelled endpoints": (
        "PodMonitor",
        lambda m: _misspell(m["spec"], "podMetricsEndpoints", "podMetricEndpoints"),
    ),
    "duration without a unit": ("Certificate", lambda m: m["spec"].update(duration="2160")),
    "no runtime": ("TrainJob", lambda m: m["spec"].pop("runtimeRef")),
    "pod of a JobSet": (
        "JobSet",
        lambda m: m["spec"]["replicatedJobs"][0]["template"]["spec"].update(backoffLimit="1"),
    ),
}


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_broken_object_is_refused(
    name: str, manifests: dict[str, Manifest], layers: dict[str, list[Manifest]]
) -> None:
    kind, damage = BREAKAGES[name]
    of_layers = {each["kind"]: copy.deepcopy(each) for each in chain.from_iterable(layers.values())}
    broken = (of_layers | manifests)[kind]
    damage(broken)

    with pytest.raises(jsonschema.ValidationError):
        validate(broken, VERSIONS[-1])


@pytest.mark.parametrize("kind", ["server", "worker"])
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

    assert ports(manifests["server"]) == {
        "grpc": int(server["GC_PORT"]),
        "http": int(server["GC_HTTP_PORT"]),
    }
    assert ports(manifests["worker"]) == {"http": int(worker["GC_HTTP_PORT"])}
    assert (service_port["port"], service_port["targetPort"]) == (int(server["GC_PORT"]), "grpc")


def test_workers_find_the_server(manifests: dict[str, Manifest]) -> None:
    service = manifests["Service"]
    name, (port,) = service["metadata"]["name"], service["spec"]["ports"]
    dialled = parse_address(manifests["gradwire-worker"]["data"]["GC_SERVER"])

    assert service["spec"]["clusterIP"] == "None"
    assert dialled == f"{name}:{port['port']}"


def test_selectors_select(layers: dict[str, list[Manifest]]) -> None:
    found = by_kind(layers["job"])
    server, worker = (pod(found[each])["metadata"]["labels"] for each in ("server", "worker"))

    def selects(selector: Manifest) -> tuple[bool, bool]:
        return selector.items() <= server.items(), selector.items() <= worker.items()

    def whose(name: str) -> tuple[bool, bool]:
        return selects(found[name]["spec"]["podSelector"]["matchLabels"])

    (spread,) = pod(found["worker"])["spec"]["topologySpreadConstraints"]
    budget = found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]
    assert selects(found["Service"]["spec"]["selector"]) == selects(budget) == (True, False)
    assert selects(spread["labelSelector"]["matchLabels"]) == (False, True)
    assert selects(found["PodMonitor"]["spec"]["selector"]["matchLabels"]) == (True, True)
    assert [whose(f"NetworkPolicy {each}") for each in ("server", "worker", "metrics", "egress")] == [
        *((True, False), (False, True), (True, True), (True, True))
    ]
    (admitted,) = found["NetworkPolicy server"]["spec"]["ingress"]
    assert selects(admitted["from"][0]["podSelector"]["matchLabels"]) == (False, True)
    (dialled, names) = found["NetworkPolicy egress"]["spec"]["egress"]
    assert selects(dialled["to"][0]["podSelector"]["matchLabels"]) == (True, False)
    assert {each["port"] for each in names["ports"]} == {53}


def test_only_workers_reach_the_server_and_only_prometheus_the_metrics(
    layers: dict[str, list[Manifest]], manifests: dict[str, Manifest]
) -> None:
    """In the base nothing reaches HTTP ports, and `monitoring` admits one namespace."""
    assert [each["ports"] for each in manifests["NetworkPolicy server"]["spec"]["ingress"]] == [
        [{"port": "grpc"}]
    ]
    assert manifests["NetworkPolicy worker"]["spec"] == {
        "podSelector": manifests["NetworkPolicy worker"]["spec"]["podSelector"],
        "policyTypes": ["Ingress"],
    }
    (rule,) = by_kind(layers["job"])["NetworkPolicy metrics"]["spec"]["ingress"]
    assert (rule["ports"], [list(each) for each in rule["from"]]) == (
        [{"port": "http"}],
        [["namespaceSelector"]],
    )
    assert manifests["gradwire-server"]["data"]["GC_INSECURE"] == "true"


def test_the_first_round_waits_for_every_worker(manifests: dict[str, Manifest]) -> None:
    job = manifests["worker"]["spec"]

    assert job["completionMode"] == "Indexed"
    assert (
        job["completions"]
        == job["parallelism"]
        == int(manifests["gradwire-server"]["data"]["GC_MIN_WORKERS"])
    )


def test_exit_codes_are_acted_on(manifests: dict[str, Manifest]) -> None:
    actions = {
        kind: {
            code: rule["action"]
            for rule in manifests[kind]["spec"]["podFailurePolicy"]["rules"]
            if "onExitCodes" in rule
            for code in rule["onExitCodes"]["values"]
        }
        for kind in ("server", "worker")
    }

    assert actions == {
        "server": {Exit.USAGE: "FailJob", Exit.DIVERGED: "FailJob"},
        "worker": {Exit.USAGE: "FailJob", Exit.REFUSED: "FailIndex", Exit.TASK: "FailIndex"},
    }


@pytest.mark.parametrize("kind", ["server", "worker"])
def test_nothing_runs_as_root_or_writes_to_the_image(kind: str, manifests: dict[str, Manifest]) -> None:
    spec = pod(manifests[kind])["spec"]
    volumes = {volume["name"] for volume in spec["volumes"]}
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
    claim = {"claimName": manifests["PersistentVolumeClaim"]["metadata"]["name"]}
    volumes = {each["name"]: each for each in pod(manifests["server"])["spec"]["volumes"]}
    for kind in ("server", "worker"):
        daemon = container(manifests[kind])
        mounts = {mount["mountPath"]: mount["name"] for mount in daemon["volumeMounts"]}
        variables = {variable["name"]: variable.get("value") for variable in daemon["env"]}
        assert {"/tmp", variables["NUMBA_CACHE_DIR"], variables["HOME"]} <= mounts.keys()
        assert variables["PYTHONUNBUFFERED"] == "1"  # a killed script's output is in the log
        if kind == "server":
            for path in (output, state):
                assert volumes[mounts[str(path.parent)]]["persistentVolumeClaim"] == claim


@pytest.mark.parametrize(("kind", "name"), [("server", "gradwire-server"), ("worker", "gradwire-worker")])
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
