"""``echelon submit k8s``: an Indexed Job for the hosts, a StatefulSet for parameter servers, and their Services."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.base.environment import KUBERNETES, PS_CA, REQUEUE, TOKEN
from echelon.base.errors import EchelonError, UsageError
from echelon.base.option_checks import at_least
from echelon.launcher.schedulers import kubernetes_names
from echelon.launcher.schedulers.submission import MASTER_PORT, SERVER_PORT, KubernetesSubmission, split_run

#: The user id of the project's image, see Dockerfile.
USER = 1000
_INDEX = "JOB_COMPLETION_INDEX"
_TLS, _STATE = "/etc/echelon/tls", "/var/lib/echelon"
Document = dict[str, Any]


def await_master(master: str | None, patience: float, env: Mapping[str, str]) -> None:
    """Wait until the name of the master pod resolves: in a cluster it exists only once that pod exists."""
    if KUBERNETES not in env or master is None:
        return
    host, deadline = master.split(",")[0].rpartition(":")[0].strip("[]"), time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            socket.getaddrinfo(host, None)
        except OSError:
            time.sleep(1.0)
        else:
            return


def submit(asked: KubernetesSubmission, out: str | None) -> str:
    """Write the documents into a file, or pass them to kubectl; return a message about it."""
    text = manifest(asked)
    if out is not None:
        _write(Path(out), text)
        return f"written to {out}; it holds the job's secret" if asked.token_secret is None else f"written to {out}"
    if not shutil.which("kubectl"):
        raise EchelonError("there is no kubectl on this host; write the documents into a file by -o FILE")
    where = ["--namespace", asked.namespace] if asked.namespace else []
    ended = subprocess.run(
        ["kubectl", "apply", *where, "-f", "-"], input=text, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        said = " ".join(ended.stderr.split()) or f"exit code {ended.returncode}"
        raise EchelonError(f"kubectl refused the job {asked.job_name}: {said}")
    return f"submitted; its console: {' '.join(['kubectl logs', *where, '-f', f'job/{asked.job_name}'])}"


def manifest(asked: KubernetesSubmission) -> str:
    from echelon.launcher.schedulers.yaml_text import to_yaml  # imported late: yaml would cost every run 70 ms

    return to_yaml(documents(asked))


def documents(asked: KubernetesSubmission) -> list[Document]:
    """Return all documents, in an order in which each follows those that it refers to."""
    _check(asked)
    found = [_service(asked, asked.job_name, "host", MASTER_PORT)]
    if asked.token_secret is None:
        found.insert(0, _secret(asked))
    if asked.servers:
        found += [_service(asked, asked.servers_name, "server", SERVER_PORT), _stateful_set(asked)]
    return [*found, _job(asked)]


def _check(asked: KubernetesSubmission) -> None:
    counts = {"--nnodes": asked.hosts, "--workers": asked.workers, "--gpus": asked.gpus, "--min-hosts": asked.fewest}
    kubernetes_names.check_name("--name", asked.job_name)
    kubernetes_names.check_image(asked.image)
    kubernetes_names.check_text([*asked.program, *(asked.environment or []), asked.run])
    for option, name in (
        ("--namespace", asked.namespace),
        ("--token-secret", asked.token_secret),
        ("--tls-secret", asked.tls_secret),
    ):
        if name is not None:
            kubernetes_names.check_object("the name of " + option, name)
    for option, size in (("--cpu", asked.cpu), ("--memory", asked.memory), ("--state-size", asked.state)):
        if size is not None:
            kubernetes_names.check_quantity(option, size)
    for option, count in counts.items():
        at_least(1, option, count)
    _check_fit(asked)


def _check_fit(asked: KubernetesSubmission) -> None:
    if asked.fewest is not None and asked.fewest > asked.hosts:
        raise UsageError(f"--min-hosts {asked.fewest} is more than --nnodes {asked.hosts}; give no more than that")
    if asked.servers < 0 or asked.restarts < 0 or asked.grace < 0:
        raise UsageError("--servers, --restarts and --grace cannot be less than 0")
    if asked.servers and asked.fewest not in (None, asked.hosts):
        raise UsageError(
            "--min-hosts is for jobs without servers; with --servers lost workers are restarted: leave --min-hosts out"
        )
    if not asked.servers and (asked.state is not None or asked.tls_secret is not None or asked.workers != 1):
        raise UsageError("--workers, --state-size and --tls-secret belong to a job with servers; add --servers N")


# The documents


def _metadata(asked: KubernetesSubmission, name: str, part: str) -> Document:
    found: Document = {"name": name, "labels": _labels(asked, part)}
    return {**found, "namespace": asked.namespace} if asked.namespace else found


def _labels(asked: KubernetesSubmission, part: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "echelon",
        "app.kubernetes.io/instance": asked.job_name,
        "app.kubernetes.io/component": part,
    }


def _secret(asked: KubernetesSubmission) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(asked, asked.secret, "token"),
        "type": "Opaque",
        "stringData": {"token": secrets.token_hex(16)},
    }


def _service(asked: KubernetesSubmission, name: str, part: str, port: int) -> Document:
    """Return a headless Service: it only names pods, even before they are ready, because they wait for others."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(asked, name, part),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _labels(asked, part),
            "ports": [{"name": "echelon", "port": port}],
        },
    }


def _job(asked: KubernetesSubmission) -> Document:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(asked, asked.job_name, "host"),
        "spec": {
            "completionMode": "Indexed",
            "completions": asked.hosts,
            "parallelism": asked.hosts,
            "backoffLimitPerIndex": asked.restarts,
            "maxFailedIndexes": 0,
            "podFailurePolicy": {"rules": _failure_rules()},
            "template": {"metadata": {"labels": _labels(asked, "host")}, "spec": _host_pod(asked)},
        },
    }


def _failure_rules() -> list[Document]:
    """Return rules that do not count evictions and preemptions, and that fail the job for an error in its command."""

    def on_code(action: str, code: int) -> Document:
        return {"action": action, "onExitCodes": {"containerName": "echelon", "operator": "In", "values": [code]}}

    evicted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return [evicted, on_code("Ignore", REQUEUE), on_code("FailJob", 2)]


def _host_pod(asked: KubernetesSubmission) -> Document:
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    container = {
        **_container(asked, _host_command(asked), [{"name": _INDEX, "valueFrom": index}]),
        "ports": [{"name": "echelon", "containerPort": MASTER_PORT}],
        "resources": {"limits": _limits(asked, gpus=True)},
    }
    return {**_pod(asked, container), "subdomain": asked.job_name, "restartPolicy": "Never"}


def _host_command(asked: KubernetesSubmission) -> list[str]:
    run = [_literal(word) for word in split_run(asked.run)] + ["--grace", f"{asked.grace:g}"]
    program = [*(["-m"] if asked.module else []), *map(_literal, asked.program)]
    meet = ["--master", asked.master]
    if not asked.servers:
        least = asked.fewest if asked.fewest is not None else asked.hosts
        nnodes = str(asked.hosts) if least == asked.hosts else f"{least}:{asked.hosts}"
        return ["echelon", "run", "--nnodes", nnodes, "--node-rank", f"$({_INDEX})", *meet, *run, *program]
    servers = ["--servers", "0", "--pservers", asked.endpoints, "--trainers", str(asked.hosts * asked.workers)]
    words = [*servers, "--workers", str(asked.workers), *meet, *run, *program]
    # Kubernetes cannot multiply, but the shell can. The arguments are its parameters, which it passes on unchanged.
    first = f'exec echelon run --trainer-id-from "$(({_INDEX} * {asked.workers}))" "$@"'
    return ["sh", "-c", _literal(first), "echelon", *words]


def _stateful_set(asked: KubernetesSubmission) -> Document:
    name = asked.servers_name
    spec: Document = {
        "serviceName": name,
        "replicas": asked.servers,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": _labels(asked, "server")},
        "template": {"metadata": {"labels": _labels(asked, "server")}, "spec": _server_pod(asked)},
    }
    if asked.state is not None:
        claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": asked.state}}}
        spec["volumeClaimTemplates"] = [{"metadata": {"name": "state"}, "spec": claim}]
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": _metadata(asked, name, "server"), "spec": spec}


def _server_pod(asked: KubernetesSubmission) -> Document:
    pod_name = {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    connects = {"tcpSocket": {"port": "echelon"}, "periodSeconds": 10}
    container = {
        **_container(asked, _server_command(asked), [pod_name]),
        "ports": [{"name": "echelon", "containerPort": SERVER_PORT}],
        "resources": {"limits": _limits(asked, gpus=False)},
        # Until the server is up, only startupProbe counts: loading a large state may take long.
        "startupProbe": {**connects, "failureThreshold": 60},
        "readinessProbe": connects,
        "livenessProbe": {**connects, "failureThreshold": 6, "timeoutSeconds": 10},
    }
    container["volumeMounts"] = [*container["volumeMounts"], {"name": "state", "mountPath": _STATE}]
    pod = _pod(asked, container)
    if asked.state is None:
        return {**pod, "volumes": [*pod["volumes"], {"name": "state", "emptyDir": {}}]}
    # a new volume belongs to root; the image's user must be able to write to it
    return {**pod, "securityContext": {"fsGroup": USER, "fsGroupChangePolicy": "OnRootMismatch"}}


def _server_command(asked: KubernetesSubmission) -> list[str]:
    own = f"$(POD_NAME).{asked.servers_name}:{SERVER_PORT}"
    words = ["echelon", "serve", "--endpoint", own, "--pservers", asked.endpoints]
    words += ["--trainers", str(asked.hosts * asked.workers), "--state", _STATE]
    if asked.tls_secret is None:
        return words
    return [*words, "--tls-cert", f"{_TLS}/tls.crt", "--tls-key", f"{_TLS}/tls.key", "--tls-ca", f"{_TLS}/ca.crt"]


def _pod(asked: KubernetesSubmission, container: Document) -> Document:
    return {
        "terminationGracePeriodSeconds": int(asked.grace) + 15,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [container],
        "volumes": _volumes(asked),
    }


def _container(asked: KubernetesSubmission, command: list[str], own: list[Document]) -> Document:
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    mounts += [{"name": f"volume-{n}", "mountPath": path} for n, (_, path) in enumerate(_claims(asked))]
    if asked.tls_secret is not None:
        mounts.append({"name": "tls", "mountPath": _TLS})
    return {
        "name": "echelon",
        "image": asked.image,
        "command": command,
        "env": [*own, *_environment(asked)],
        "volumeMounts": mounts,
        "securityContext": {"allowPrivilegeEscalation": False},
    }


def _environment(asked: KubernetesSubmission) -> list[Document]:
    token = {"secretKeyRef": {"name": asked.secret, "key": "token"}}
    found: list[Document] = [{"name": TOKEN, "valueFrom": token}]
    if asked.tls_secret is not None:
        found.append({"name": PS_CA, "value": f"{_TLS}/ca.crt"})
    pairs = [kubernetes_names.split_variable(text, os.environ) for text in asked.environment or []]
    return found + [{"name": name, "value": _literal(value)} for name, value in pairs]


def _volumes(asked: KubernetesSubmission) -> list[Document]:
    """Return the volumes. Data loaders and NCCL use /dev/shm, of which a container has only 64 MB by default."""
    found: list[Document] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    for number, (claim, _) in enumerate(_claims(asked)):
        found.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
    if asked.tls_secret is not None:
        found.append({"name": "tls", "secret": {"secretName": asked.tls_secret}})
    return found


def _claims(asked: KubernetesSubmission) -> list[tuple[str, str]]:
    return [kubernetes_names.split_volume(text) for text in asked.volumes or []]


def _limits(asked: KubernetesSubmission, gpus: bool) -> dict[str, Any]:
    found = {"cpu": asked.cpu, "memory": asked.memory, "nvidia.com/gpu": asked.gpus if gpus else None}
    return {name: amount for name, amount in found.items() if amount is not None}


def _literal(text: str) -> str:
    """Escape dollars: Kubernetes substitutes ``$(NAME)``, and ``$$`` stands for one dollar."""
    return text.replace("$", "$$")


def _write(path: Path, text: str) -> None:
    """Write a file that only its owner can read, because it may contain a secret."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            os.fchmod(handle, 0o600)
            file.write(text)
    except OSError as error:
        raise UsageError(f"-o '{path}' cannot be written: {error.strerror}") from None
