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


def submit(options: KubernetesSubmission, out: str | None) -> str:
    """Write the documents into a file, or pass them to kubectl; return a message about it."""
    text = manifest(options)
    if out is not None:
        _write(Path(out), text)
        return f"written to {out}; it holds the job's secret" if options.token_secret is None else f"written to {out}"
    if not shutil.which("kubectl"):
        raise EchelonError("there is no kubectl on this host; write the documents into a file by -o FILE")
    where = ["--namespace", options.namespace] if options.namespace else []
    ended = subprocess.run(
        ["kubectl", "apply", *where, "-f", "-"], input=text, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        said = " ".join(ended.stderr.split()) or f"exit code {ended.returncode}"
        raise EchelonError(f"kubectl refused the job {options.job_name}: {said}")
    return f"submitted; its console: {' '.join(['kubectl logs', *where, '-f', f'job/{options.job_name}'])}"


def manifest(options: KubernetesSubmission) -> str:
    from echelon.launcher.schedulers.yaml_text import to_yaml  # imported late: yaml would cost every run 70 ms

    return to_yaml(documents(options))


def documents(options: KubernetesSubmission) -> list[Document]:
    """Return all documents, in an order in which each follows those that it refers to."""
    _check(options)
    result = [_service(options, options.job_name, "host", MASTER_PORT)]
    if options.token_secret is None:
        result.insert(0, _secret(options))
    if options.servers:
        result += [_service(options, options.servers_name, "server", SERVER_PORT), _stateful_set(options)]
    return [*result, _job(options)]


def _check(options: KubernetesSubmission) -> None:
    counts = {
        "--nnodes": options.hosts,
        "--workers": options.workers,
        "--gpus": options.gpus,
        "--min-hosts": options.fewest,
    }
    kubernetes_names.check_name("--name", options.job_name)
    kubernetes_names.check_image(options.image)
    kubernetes_names.check_text([*options.program, *(options.environment or []), options.run])
    for option, name in (
        ("--namespace", options.namespace),
        ("--token-secret", options.token_secret),
        ("--tls-secret", options.tls_secret),
    ):
        if name is not None:
            kubernetes_names.check_object("the name of " + option, name)
    for option, size in (("--cpu", options.cpu), ("--memory", options.memory), ("--state-size", options.state)):
        if size is not None:
            kubernetes_names.check_quantity(option, size)
    for option, count in counts.items():
        at_least(1, option, count)
    _check_fit(options)


def _check_fit(options: KubernetesSubmission) -> None:
    if options.fewest is not None and options.fewest > options.hosts:
        raise UsageError(f"--min-hosts {options.fewest} is more than --nnodes {options.hosts}; give no more than that")
    if options.servers < 0 or options.restarts < 0 or options.grace < 0:
        raise UsageError("--servers, --restarts and --grace cannot be less than 0")
    if options.servers and options.fewest not in (None, options.hosts):
        raise UsageError(
            "--min-hosts is for jobs without servers; with --servers lost workers are restarted: leave --min-hosts out"
        )
    if not options.servers and (options.state is not None or options.tls_secret is not None or options.workers != 1):
        raise UsageError("--workers, --state-size and --tls-secret belong to a job with servers; add --servers N")


# The documents


def _metadata(options: KubernetesSubmission, name: str, part: str) -> Document:
    result: Document = {"name": name, "labels": _labels(options, part)}
    return {**result, "namespace": options.namespace} if options.namespace else result


def _labels(options: KubernetesSubmission, part: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "echelon",
        "app.kubernetes.io/instance": options.job_name,
        "app.kubernetes.io/component": part,
    }


def _secret(options: KubernetesSubmission) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(options, options.secret, "token"),
        "type": "Opaque",
        "stringData": {"token": secrets.token_hex(16)},
    }


def _service(options: KubernetesSubmission, name: str, part: str, port: int) -> Document:
    """Return a headless Service: it only names pods, even before they are ready, because they wait for others."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(options, name, part),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _labels(options, part),
            "ports": [{"name": "echelon", "port": port}],
        },
    }


def _job(options: KubernetesSubmission) -> Document:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(options, options.job_name, "host"),
        "spec": {
            "completionMode": "Indexed",
            "completions": options.hosts,
            "parallelism": options.hosts,
            "backoffLimitPerIndex": options.restarts,
            "maxFailedIndexes": 0,
            "podFailurePolicy": {"rules": _failure_rules()},
            "template": {"metadata": {"labels": _labels(options, "host")}, "spec": _host_pod(options)},
        },
    }


def _failure_rules() -> list[Document]:
    """Return rules that do not count evictions and preemptions, and that fail the job for an error in its command."""

    def on_code(action: str, code: int) -> Document:
        return {"action": action, "onExitCodes": {"containerName": "echelon", "operator": "In", "values": [code]}}

    evicted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return [evicted, on_code("Ignore", REQUEUE), on_code("FailJob", 2)]


def _host_pod(options: KubernetesSubmission) -> Document:
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    container = {
        **_container(options, _host_command(options), [{"name": _INDEX, "valueFrom": index}]),
        "ports": [{"name": "echelon", "containerPort": MASTER_PORT}],
        "resources": {"limits": _limits(options, gpus=True)},
    }
    return {**_pod(options, container), "subdomain": options.job_name, "restartPolicy": "Never"}


def _host_command(options: KubernetesSubmission) -> list[str]:
    run = [_literal(word) for word in split_run(options.run)] + ["--grace", f"{options.grace:g}"]
    program = [*(["-m"] if options.module else []), *map(_literal, options.program)]
    master = ["--master", options.master]
    if not options.servers:
        least = options.fewest if options.fewest is not None else options.hosts
        nnodes = str(options.hosts) if least == options.hosts else f"{least}:{options.hosts}"
        return ["echelon", "run", "--nnodes", nnodes, "--node-rank", f"$({_INDEX})", *master, *run, *program]
    servers = ["--servers", "0", "--pservers", options.endpoints, "--trainers", str(options.hosts * options.workers)]
    argv = [*servers, "--workers", str(options.workers), *master, *run, *program]
    # Kubernetes cannot multiply, but the shell can. The arguments are its parameters, which it passes on unchanged.
    first = f'exec echelon run --trainer-id-from "$(({_INDEX} * {options.workers}))" "$@"'
    return ["sh", "-c", _literal(first), "echelon", *argv]


def _stateful_set(options: KubernetesSubmission) -> Document:
    name = options.servers_name
    spec: Document = {
        "serviceName": name,
        "replicas": options.servers,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": _labels(options, "server")},
        "template": {"metadata": {"labels": _labels(options, "server")}, "spec": _server_pod(options)},
    }
    if options.state is not None:
        claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": options.state}}}
        spec["volumeClaimTemplates"] = [{"metadata": {"name": "state"}, "spec": claim}]
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": _metadata(options, name, "server"),
        "spec": spec,
    }


def _server_pod(options: KubernetesSubmission) -> Document:
    pod_name = {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    connects = {"tcpSocket": {"port": "echelon"}, "periodSeconds": 10}
    container = {
        **_container(options, _server_command(options), [pod_name]),
        "ports": [{"name": "echelon", "containerPort": SERVER_PORT}],
        "resources": {"limits": _limits(options, gpus=False)},
        # Until the server is up, only startupProbe counts: loading a large state may take long.
        "startupProbe": {**connects, "failureThreshold": 60},
        "readinessProbe": connects,
        "livenessProbe": {**connects, "failureThreshold": 6, "timeoutSeconds": 10},
    }
    container["volumeMounts"] = [*container["volumeMounts"], {"name": "state", "mountPath": _STATE}]
    pod = _pod(options, container)
    if options.state is None:
        return {**pod, "volumes": [*pod["volumes"], {"name": "state", "emptyDir": {}}]}
    # a new volume belongs to root; the image's user must be able to write to it
    return {**pod, "securityContext": {"fsGroup": USER, "fsGroupChangePolicy": "OnRootMismatch"}}


def _server_command(options: KubernetesSubmission) -> list[str]:
    own = f"$(POD_NAME).{options.servers_name}:{SERVER_PORT}"
    argv = ["echelon", "serve", "--endpoint", own, "--pservers", options.endpoints]
    argv += ["--trainers", str(options.hosts * options.workers), "--state", _STATE]
    if options.tls_secret is None:
        return argv
    return [*argv, "--tls-cert", f"{_TLS}/tls.crt", "--tls-key", f"{_TLS}/tls.key", "--tls-ca", f"{_TLS}/ca.crt"]


def _pod(options: KubernetesSubmission, container: Document) -> Document:
    return {
        "terminationGracePeriodSeconds": int(options.grace) + 15,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [container],
        "volumes": _volumes(options),
    }


def _container(options: KubernetesSubmission, command: list[str], own: list[Document]) -> Document:
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    mounts += [{"name": f"volume-{n}", "mountPath": path} for n, (_, path) in enumerate(_claims(options))]
    if options.tls_secret is not None:
        mounts.append({"name": "tls", "mountPath": _TLS})
    return {
        "name": "echelon",
        "image": options.image,
        "command": command,
        "env": [*own, *_environment(options)],
        "volumeMounts": mounts,
        "securityContext": {"allowPrivilegeEscalation": False},
    }


def _environment(options: KubernetesSubmission) -> list[Document]:
    token = {"secretKeyRef": {"name": options.secret, "key": "token"}}
    result: list[Document] = [{"name": TOKEN, "valueFrom": token}]
    if options.tls_secret is not None:
        result.append({"name": PS_CA, "value": f"{_TLS}/ca.crt"})
    pairs = [kubernetes_names.split_variable(text, os.environ) for text in options.environment or []]
    return result + [{"name": name, "value": _literal(value)} for name, value in pairs]


def _volumes(options: KubernetesSubmission) -> list[Document]:
    """Return the volumes. Data loaders and NCCL use /dev/shm, of which a container has only 64 MB by default."""
    result: list[Document] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    for number, (claim, _) in enumerate(_claims(options)):
        result.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
    if options.tls_secret is not None:
        result.append({"name": "tls", "secret": {"secretName": options.tls_secret}})
    return result


def _claims(options: KubernetesSubmission) -> list[tuple[str, str]]:
    return [kubernetes_names.split_volume(text) for text in options.volumes or []]


def _limits(options: KubernetesSubmission, gpus: bool) -> dict[str, Any]:
    result = {"cpu": options.cpu, "memory": options.memory, "nvidia.com/gpu": options.gpus if gpus else None}
    return {name: amount for name, amount in result.items() if amount is not None}


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
