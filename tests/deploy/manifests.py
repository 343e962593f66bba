"""Manifests as kubectl renders them, and what tests ask of one."""

from __future__ import annotations

import functools
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
SCHEMAS = json.loads((Path(__file__).parent / "crds.schema.json").read_text())  # of kinds that need a CRD
# The oldest has backoffLimitPerIndex and podFailurePolicy switched on; the newest is what the checker knows.
VERSIONS = ("1.29", "1.33", "1.37")

Manifest = dict[str, Any]


def render(folder: Path) -> list[Manifest]:
    done = subprocess.run([*kustomize(), folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@functools.cache
def kustomize() -> list[str]:
    """The command that renders a folder. The test fails where there is none that knows our components."""
    old: list[str] = []
    for name, verb, version in (
        ("kubectl", "kustomize", "version --client"),
        ("kustomize", "build", "version"),
    ):
        if program := shutil.which(name):
            said = subprocess.run([program, *version.split()], capture_output=True, text=True).stdout
            if re.search(r"^(Kustomize Version: )?v([5-9]|[1-9]\d)\.", said, re.MULTILINE):
                return [program, verb]
            old.append(program)
    reason = f"too old: {', '.join(old)}" if old else "neither kubectl nor kustomize is on PATH"
    pytest.fail(f"{reason}; install kubectl 1.27 or newer, or kustomize 5 or newer (see CONTRIBUTING.md)")


def documented(words: str) -> str:
    """The only block of code in docs/how-to/kubernetes.md that has these words, as it stands in a file."""
    text = (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()
    (found,) = [each for each in re.findall(r"(?:^(?: {4}.*)?\n)+", text, re.MULTILINE) if words in each]
    return textwrap.dedent(found).strip() + "\n"


def by_kind(rendered: list[Manifest]) -> dict[str, Manifest]:
    """Return the objects by kind; Jobs by component, config maps by name without the hash, and
    kinds with several objects by kind and the last word of the name."""
    found: dict[str, Manifest] = {}
    for manifest in rendered:
        name, kind = name_of(manifest), manifest["kind"]
        if kind == "Job":
            kind = manifest["metadata"]["labels"]["app.kubernetes.io/component"]
        elif kind == "ConfigMap":
            kind = name.rpartition("-")[0]
        elif kind in ("NetworkPolicy", "Certificate", "Issuer"):
            kind = f"{kind} {name.rpartition('-')[2]}"
        found[kind] = manifest
    assert len(found) == len(rendered)
    return found


def name_of(manifest: Manifest) -> str:
    name: str = manifest["metadata"]["name"]
    return name


def validate(manifest: Manifest, version: str) -> None:
    """Raises jsonschema.ValidationError; a kind without a schema is an error too."""
    if manifest["kind"] in SCHEMAS["properties"]:
        jsonschema.validate({manifest["kind"]: manifest}, SCHEMAS)
        for job in jobs_of(manifest):
            validate(job, version)
    else:
        kubernetes_validate.validate(manifest, version, strict=True)


def jobs_of(manifest: Manifest) -> list[Manifest]:
    """Return the Jobs that a controller makes of a JobSet or of a TrainingRuntime."""
    spec = manifest.get("spec", {})
    spec = spec["template"]["spec"] if manifest["kind"] == "TrainingRuntime" else spec
    return [
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": each["name"], "labels": pod(each["template"])["metadata"]["labels"]},
            "spec": each["template"]["spec"],
        }
        for each in spec.get("replicatedJobs", ())
    ]


def pod(manifest: Manifest) -> Manifest:
    template: Manifest = manifest["spec"]["template"]
    return template


def container(manifest: Manifest) -> Manifest:
    only: Manifest
    (only,) = pod(manifest)["spec"]["containers"]
    return only
