"""The image and the composition, by `make image-check`: built with buildah and run with podman.

Without root, both engines and the variable IMAGE_BASE this is skipped. IMAGE_BASE is an image that the build
begins with, or a file NAME.tar with the root of one, as mmdebstrap makes it where no image can be pulled.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BASE = os.environ.get("IMAGE_BASE", "")
READY = BASE and os.geteuid() == 0 and all(map(shutil.which, ("buildah", "podman", "runc")))
# These work also where control groups are hybrid, and where limits of processes are low.
PODMAN = ("podman", "--cgroup-manager=cgroupfs", f"--runtime={shutil.which('runc')}")
LIMITS = ("--ulimit=nofile=20000:20000", "--ulimit=nproc=10000:10000")
PATIENCE_S = 240.0
COMPOSE = ROOT / ".cache" / "compose" / "bin" / "podman-compose"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),  # of the build, too, which loads hundreds of megabytes
    pytest.mark.skipif(
        not READY, reason="make image-check sets IMAGE_BASE; needs root, buildah, podman, runc"
    ),
]


def run(*command: str | Path, **variables: str) -> str:
    """Standard output of a command, which must succeed."""
    done = subprocess.run(
        list(map(str, command)),
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def buildah(command: str, *arguments: str | Path) -> str:
    return run("buildah", command, *arguments)


def settings_of_pip(file: Path) -> Iterator[str]:
    """Write pip's settings of this machine as a file; yield the local paths that they name."""
    listed = run(sys.executable, "-m", "pip", "config", "list")
    found = {key.rpartition(".")[2]: value for key, value in re.findall(r"^(\S+?)='(.*)'$", listed, re.M)}
    file.write_text("\n".join(["[global]", *(f"{key} = {value}" for key, value in found.items())]))
    for scheme, path in re.findall(r"(?:^|\s)(file://)?(/\S+)", "\n".join(found.values()), re.M):
        if os.path.exists(path):  # the files of an index may lie beside its folder
            yield os.path.dirname(path.rstrip("/")) if scheme else path


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("image")
    base = BASE
    if BASE.endswith(".tar"):
        (folder / "Containerfile").write_text(
            f"FROM scratch\nADD {Path(BASE).name} /\nENV PATH={os.environ['PATH']}\n"
        )
        shutil.copy(BASE, folder)
        buildah("bud", "--isolation=chroot", "--tag=gradwire-base", folder)
        base = "localhost/gradwire-base"
    mounts = [f"--volume={path}:{path}:ro" for path in {*settings_of_pip(folder / "pip.conf")}]
    given = (f"--build-arg=PYTHON={base}", f"--secret=id=pip,src={folder / 'pip.conf'}", *mounts)
    file = DEPLOY / "image" / "Containerfile"
    buildah(
        "bud", "--isolation=chroot", "--network=host", *given, "--tag=gradwire:check", f"--file={file}", ROOT
    )
    return "localhost/gradwire:check"


OVERRIDE = """
services:
  server:
    environment:
      GC_STAY: "true" # so that it can be asked after the end
"""


def test_a_composed_job_ends_with_a_read_only_root_and_no_root_user(image: str, tmp_path: Path) -> None:
    (token := tmp_path / "token").write_text(secrets.token_hex(32))
    token.chmod(0o400)
    os.chown(token, 65532, -1)
    (tmp_path / "deploy").mkdir()  # as in a checkout, with the token beside the folder
    file = shutil.copy(DEPLOY / "compose.yaml", tmp_path / "deploy")
    (tmp_path / "override.yaml").write_text(OVERRIDE)
    name = f"gradwire{os.getpid()}"
    told = (
        f"--podman-args={' '.join(PODMAN[1:])}",
        f"--podman-run-args={' '.join(LIMITS)}",
        f"--project-name={name}",
    )
    compose = (COMPOSE, *told, f"--file={file}", f"--file={tmp_path / 'override.yaml'}")
    variables = {
        "IMAGE": image,
        "GC_EPOCHS": "2",
        "WORKERS": "2",
    }
    server, *workers = (f"{name}_{each}" for each in ("server_1", "worker_1", "worker_2"))
    try:
        run(*compose, "up", "--detach", **variables)
        deadline = time.monotonic() + PATIENCE_S
        while '"finished"' not in (said := ask(server, "gc-status", "--json")):
            assert time.monotonic() < deadline, said + "".join(logs(each) for each in (server, *workers))
            time.sleep(1)
        run(*PODMAN, "healthcheck", "run", server)
        assert "Read-only file system" in ask(server, "touch", "/here")
        assert ask(server, "id", "-u") == "65532\n"
        run(*compose, "stop", "--timeout", "60", "server", **variables)
        assert run(*PODMAN, "wait", server, *workers).split() == ["0", "0", "0"]
        script = "import safetensors.numpy as s; print(len(s.load_file('/data/parameters.safetensors')))"
        volume = ("run", "--rm", "--read-only", *LIMITS, f"--volume={name}_state:/data", image)
        assert int(run(*PODMAN, *volume, "python", "-c", script)) > 0
    finally:
        subprocess.run([*map(str, compose), "down", "--volumes"], env={**os.environ, **variables})


def logs(container: str) -> str:
    return run(*PODMAN, "logs", container)


def ask(container: str, *command: str) -> str:
    done = subprocess.run([*PODMAN, "exec", container, *command], capture_output=True, text=True)
    return done.stdout + done.stderr


def test_the_image_lists_its_packages(image: str) -> None:
    listed = json.loads(
        run(*PODMAN, "run", "--rm", *LIMITS, image, "cat", "/usr/share/gradwire/sbom.cdx.json")
    )
    assert listed["bomFormat"] == "CycloneDX"
    assert {"gradwire", "torch", "grpcio"} <= {each["name"] for each in listed["components"]}
