"""The image file, as far as it can be tested without a container engine.

Its build steps run in a folder that stands for the root of the build stage, from a copy with only the files
that .dockerignore admits. The last stage, which only copies, is checked as text.
"""

from __future__ import annotations

import os
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from .containerfile import ROOT, Step, stages, values

if TYPE_CHECKING:
    from .conftest import Built, Image


def pod_specs() -> list[dict[str, Any]]:
    base = ROOT / "deploy" / "kubernetes" / "base"
    texts = [(base / name).read_text() for name in ("server.yaml", "workers.yaml")]
    documents = [document for text in texts for document in yaml.safe_load_all(text)]
    return [document["spec"]["template"]["spec"] for document in documents if "template" in document["spec"]]


def test_stages_of_one_python() -> None:
    assert [values(stage, "FROM") for stage in stages()] == [
        ["${PYTHON} AS build"],
        ["build AS sbom"],
        ["${PYTHON}"],
    ]


def test_nothing_of_the_build_is_left_but_the_environment_the_kernels_and_the_list_of_packages() -> None:
    *_, final = stages()

    assert [value.split()[-2:] for value in values(final, "COPY")] == [
        ["/sbom.cdx.json", "/usr/share/gradwire/sbom.cdx.json"],
        ["/gradwire", "/gradwire"],
        ["/kernels", "/var/cache/gradwire"],
    ]
    assert all(value.startswith(("--from=build", "--from=sbom")) for value in values(final, "COPY"))


def test_runs_as_the_user_that_kubernetes_expects() -> None:
    *_, final = stages()
    (user,) = values(final, "USER")
    for spec in pod_specs():
        security = spec["securityContext"]
        assert f"{security['runAsUser']}:{security['runAsGroup']}" == user
    assert final.index(Step("USER", user)) > max(
        index for index, step in enumerate(final) if step.instruction in {"RUN", "COPY"}
    )


def test_kernels_are_where_kubernetes_copies_them_from() -> None:
    *_, final = stages()
    (environment,) = values(final, "ENV")
    (cache,) = [word.partition("=")[2] for word in environment.split() if word.startswith("NUMBA_CACHE_DIR=")]
    for spec in pod_specs():
        (kernels,) = spec["initContainers"]
        assert kernels["command"][:2] == ["cp", "--recursive"]
        assert kernels["command"][2] == f"{cache}/."


@pytest.mark.timeout(900)
def test_the_build_steps_work(image: Image) -> None:
    for name in ("gc-server", "gc-worker", "gc-run"):
        assert os.access(image.environment / "bin" / name, os.X_OK)
    assert list(image.kernels.rglob("*.nbi")), "no kernel was compiled"


@pytest.mark.timeout(900)
def test_what_dockerignore_lets_in_gives_the_wheel_that_the_checkout_gives(
    image: Image, built: Built
) -> None:
    with zipfile.ZipFile(image.wheel) as ours, zipfile.ZipFile(built.wheel) as theirs:
        contents = [
            {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
            for archive in (ours, theirs)
        ]
    assert contents[0] == contents[1]
