"""Manifests as kubectl renders them, and what tests ask of one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
BASE = KUBERNETES / "base"
POD_MONITOR = json.loads((Path(__file__).parent / "pod_monitor.schema.json").read_text())
# The oldest has backoffLimitPerIndex and podFailurePolicy switched on; the newest is what the checker knows.
VERSIONS = ("1.29", "1.37")

Manifest = dict[str, Any]


def render(folder: Path) -> list[Manifest]:
    if program := shutil.which("kubectl"):
        command = [program, "kustomize"]
    elif program := shutil.which("kustomize"):
        command = [program, "build"]
    else:
        pytest.fail(
            "neither kubectl nor kustomize is on PATH; install one, for example with "
            "`apt install kubernetes-client` (see CONTRIBUTING.md)"
        )
    done = subprocess.run([*command, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def documented(words: str) -> str:
    """The only block of code in docs/how-to/kubernetes.md that has these words, as it stands in a file."""
    text = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()
    (found,) = [each for each in re.findall(r"(?:^(?: {4}.*)?\n)+", text, re.MULTILINE) if words in each]
    return textwrap.dedent(found).strip() + "\n"


def by_kind(rendered: list[Manifest]) -> dict[str, Manifest]:
    found: dict[str, Manifest] = {}
    for manifest in rendered:
        name = name_of(manifest)
        found[name.rpartition("-")[0] if manifest["kind"] == "ConfigMap" else manifest["kind"]] = manifest
    assert len(found) == len(rendered)
    return found


def name_of(manifest: Manifest) -> str:
    name: str = manifest["metadata"]["name"]
    return name


def validate(manifest: Manifest, version: str) -> None:
    """Raises jsonschema.ValidationError; a kind without a schema is an error too."""
    if manifest["kind"] == "PodMonitor":
        jsonschema.validate(manifest, POD_MONITOR)
    else:
        kubernetes_validate.validate(manifest, version, strict=True)


def pod(manifest: Manifest) -> Manifest:
    template: Manifest = manifest["spec"]["template"]
    return template


def container(manifest: Manifest) -> Manifest:
    only: Manifest
    (only,) = pod(manifest)["spec"]["containers"]
    return only
