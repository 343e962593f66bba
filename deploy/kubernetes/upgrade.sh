#!/bin/bash
# Replace the pods of a job by those of its changed overlay. The job continues from its volume.
#
#   gradwire/deploy/kubernetes/upgrade.sh my-job -n training
#
# Nothing is stopped unless the API server would take every object. Then the server's Job is deleted first, so that server
# and workers write their state at one version. May be repeated from any point. More arguments are kubectl's.
set -eu -o pipefail

overlay=${1:?the folder of an overlay, as for kubectl apply -k}
shift
new=$(kubectl kustomize "$overlay")

of() { awk -v RS='---\n' -v ORS='---\n' -v jobs="$1" '(/(^|\n)kind: (Job|JobSet|TrainJob)\n/ ? 1 : 0) == jobs' <<< "$new"; }
names() { of 1 | awk '/^kind: /{kind = $2; part = "-"} /component: /{part = $2} /^  name: / && kind {print part, kind "/" $2; kind = ""}' | sort; }

[ -n "$(names)" ] || { echo "upgrade.sh: $overlay has no Job" >&2; exit 2; }
of 0 | kubectl apply "$@" --dry-run=server -f - > /dev/null
refused=$(of 1 | kubectl create "$@" --dry-run=server -f - 2>&1 > /dev/null | grep -vE 'AlreadyExists|^Warning:' || true)
[ -z "$refused" ] || { echo "$refused"$'\n'"upgrade.sh: nothing was changed" >&2; exit 1; }

trap 'echo "upgrade.sh: stopped half-way. The volume has the state: once the reason above is mended, run this again" >&2' ERR
names | while read -r _ job; do # first the server's
    kubectl delete "$@" "$job" --ignore-not-found --cascade=foreground --timeout=10m
done
kubectl apply "$@" -k "$overlay"
