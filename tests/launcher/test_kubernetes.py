"""Manifests for Kubernetes are valid by the schemas of its API, consistent, and true to the options given."""

import os
import re
import stat
import subprocess
import sys

import kubernetes_validate
import pytest
import yaml
from command import here, write
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.base.errors import UsageError
from echelon.launcher.schedulers.kubernetes import KubernetesSubmission, documents, manifest

#: Fields of the Job that we use became stable in the first; the second is the newest that the schemas know.
VERSIONS = ("1.33", "1.37")
PLAIN = KubernetesSubmission(
    "train.py", args=["--lr", "0.1"], image="registry.example/t:1", nnodes="4", name="train", gpus=8
)
SERVED = KubernetesSubmission(
    script="train.py",
    image="t",
    nnodes="3",
    name="ctr",
    namespace="ml",
    cpu="8",
    memory="64Gi",
    environment=["A=1"],
    volumes=["data:/data", "out:/out"],
    servers=2,
    workers=4,
    state="20Gi",
    tls_secret="ctr-tls",
)


@pytest.mark.parametrize("asked", [PLAIN, SERVED], ids=["hosts", "servers"])
def test_the_documents_are_valid_by_the_schemas_of_the_api(asked):
    for document in yaml.safe_load_all(manifest(asked)):
        for version in VERSIONS:
            assert kubernetes_validate.validate(document, version, strict=True) == version


def test_a_document_with_a_misspelt_field_would_be_found():
    job = documents(PLAIN)[-1]
    job["spec"]["backofLimitPerIndex"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSIONS[0], strict=True)


def by_kind(asked):
    return {(document["kind"], document["metadata"]["name"]): document for document in documents(asked)}


def test_job_restarts_after_eviction_or_save_not_after_mistake():
    """A job of hosts is started again after an eviction or a save, and not after a mistake in its command."""
    job = by_kind(PLAIN)["Job", "train"]["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 4, 4)
    evicted, saved, mistake = job["podFailurePolicy"]["rules"]
    assert (evicted["action"], evicted["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert (saved["action"], saved["onExitCodes"]["values"]) == ("Ignore", [75])
    assert (mistake["action"], mistake["onExitCodes"]["values"]) == ("FailJob", [2])
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert {rule["onExitCodes"]["containerName"] for rule in (saved, mistake)} == {container["name"]}
    grace = float(container["command"][container["command"].index("--grace") + 1])
    assert pod["terminationGracePeriodSeconds"] > grace
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert container["command"][:6] == ["echelon", "run", "--nnodes", "4", "--node-rank", "$(JOB_COMPLETION_INDEX)"]


@pytest.mark.parametrize("asked", [PLAIN, SERVED], ids=["hosts", "servers"])
def test_every_name_that_is_referred_to_is_there(asked):
    found = by_kind(asked)
    for kind, name in [key for key in found if key[0] in ("Job", "StatefulSet")]:
        spec = found[kind, name]["spec"]
        pod = spec["template"]["spec"]
        service = found["Service", spec.get("serviceName") or pod["subdomain"]]
        labels = spec["template"]["metadata"]["labels"]
        assert service["spec"]["selector"] == labels
        assert spec.get("selector", {"matchLabels": labels})["matchLabels"] == labels
        (container,) = pod["containers"]
        assert [port["port"] for port in service["spec"]["ports"]] == [container["ports"][0]["containerPort"]]
        claims = [claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])]
        volumes = {volume["name"] for volume in pod["volumes"]} | set(claims)
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        secrets = [entry["valueFrom"]["secretKeyRef"] for entry in container["env"] if "secretKeyRef" in str(entry)]
        assert secrets
        assert all(ref["key"] in found["Secret", ref["name"]]["stringData"] for ref in secrets)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert (
                container.get(probe, {}).get("tcpSocket", {"port": "echelon"})["port"] == container["ports"][0]["name"]
            )
        known = {entry["name"] for entry in container["env"]}
        assert "ECHELON_PS_TOKEN" not in known  # servers make their token from the job's secret
        words = " ".join(container["command"])
        assert set(re.findall(r"(?<!\$)\$\((\w+)\)", words)) <= known
        assert ("JOB_COMPLETION_INDEX" in words) == (kind == "Job")
        # every address in a command is a pod that exists: <set>-<index>.<service>:<port>
        for owner, index, where, port in re.findall(r"([\w-]+)-(\d+)\.([\w-]+):(\d+)", words):
            of = found["StatefulSet" if owner.endswith("servers") else "Job", owner]["spec"]
            assert int(index) < of.get("replicas", of.get("completions"))
            assert [entry["port"] for entry in found["Service", where]["spec"]["ports"]] == [int(port)]


def expanded(word, env):
    """Expand variables as the kubelet does: $(NAME) is the variable, $$ is a dollar, all else stays."""
    return re.sub(r"\$(\$|\((\w+)\))", lambda m: "$" if m[1] == "$" else env.get(m[2], m[0]), word)


def test_workers_of_served_job_are_numbered_over_all_pods(tmp_path):
    """The command of the pod, run as the container would run it, with a program in the place of ``echelon``."""
    text = f"#!{sys.executable}\nimport sys, json\njson.dump(sys.argv[1:], sys.stdout)\n"
    write(tmp_path / "echelon", text).chmod(0o755)
    asked = KubernetesSubmission(
        "train.py", args=["$(HOME) $$ '\""], image="t", nnodes="3", name="ctr", servers=2, workers=4
    )
    command = by_kind(asked)["Job", "ctr"]["spec"]["template"]["spec"]["containers"][0]["command"]
    env = {"JOB_COMPLETION_INDEX": "2", "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": "/wrong"}
    words = [expanded(word, env) for word in command]
    told = yaml.safe_load(subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout)
    assert told[:5] == ["run", "--trainer-id-from", "8", "--servers", "0"]
    assert told[told.index("--trainers") + 1 :][:3] == ["12", "--workers", "4"]
    assert told[-2:] == ["train.py", "$(HOME) $$ '\""]


def test_an_elastic_job_says_how_few_hosts_do():
    command = documents(KubernetesSubmission("t.py", "i", nnodes="4", name="t", min_hosts=2))[-1]["spec"]["template"][
        "spec"
    ]["containers"]
    assert command[0]["command"][2:4] == ["--nnodes", "2:4"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), min_size=1, max_size=4))
def test_no_argument_or_value_escapes_its_quotes(words):
    asked = KubernetesSubmission(
        "train.py", "i", words, nnodes="2", name="t", environment=[f"A={words[0]}"], token_secret="s"
    )
    text = manifest(asked)
    assert text.isascii()
    service, job = yaml.safe_load_all(text)
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    assert set(job) == {"apiVersion", "kind", "metadata", "spec"}
    (container,) = job["spec"]["template"]["spec"]["containers"]
    there = {"JOB_COMPLETION_INDEX": "1"}
    assert [expanded(word, there) for word in container["command"][-len(words) :]] == words
    assert expanded(container["env"][-1]["value"], there) == words[0]


@pytest.mark.parametrize(
    "word", ["1e3", "0o7", "on", "~", "1_000", "2026-01-01", "=", "<<", "null", "Yes", "0x1F", ".5"]
)
def test_words_that_yaml_could_misread_are_quoted(word):
    """Words that a YAML parser might take for something other than text are quoted."""
    lines = [line.strip() for line in manifest(KubernetesSubmission("t", "i", [word], name="t")).splitlines()]
    assert f'- "{word}"' in lines


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"name": "Train_1"}, "--name 'Train_1' is not a valid job name; use small letters, digits and dashes"),
        ({"name": "x" * 46}, f"--name '{'x' * 46}' is not a valid job name"),
        ({"namespace": "a b"}, "the name of --namespace is 'a b', which Kubernetes does not allow"),
        ({"image": "a b"}, "--image 'a b' is not the name of an image"),
        ({"memory": "64 GB"}, "--memory '64 GB' is not a Kubernetes quantity; write 8, 500m, 64Gi"),
        ({"volumes": ["data"]}, "--volume 'data' is not CLAIM:/path, such as data:/data"),
        ({"environment": ["1A=2"]}, "--env '1A=2' is not NAME=VALUE"),
        ({"state": "1Gi"}, "--workers, --state-size and --tls-secret belong to a job with servers; add --servers N"),
        (
            {"args": ["a\udcff"]},
            "the argument 'a\\udcff' is not UTF-8 text, and Kubernetes takes no other; change it",
        ),
        ({"min_hosts": 9}, "--min-hosts 9 is more than --nnodes 2; give no more than that"),
    ],
)
def test_mistakes_are_one_line(changed, line):
    with pytest.raises(UsageError) as caught:
        documents(KubernetesSubmission(**({"script": "t", "image": "i", "nnodes": "2", "name": "t"} | changed)))
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_submit_prints_writes_owner_only_file_or_calls_kubectl(tmp_path, monkeypatch):
    """The command prints the documents, writes them to a file only its owner may read, or hands them to kubectl."""
    words = ["submit", "k8s", "--image", "i", "--nnodes", 2]
    shown = here(*words, "--dry-run", "my_train.py", "--lr", "1e3", cwd=tmp_path)
    assert [document["kind"] for document in yaml.safe_load_all(shown.out)] == ["Secret", "Service", "Job"]
    assert (
        here(*words, "-o", "job.yaml", "t.py", cwd=tmp_path).out
        == "echelon: written to job.yaml; it holds the job's secret\n"
    )
    assert stat.S_IMODE((tmp_path / "job.yaml").stat().st_mode) == 0o600
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = here(*words, "t.py", cwd=tmp_path)
    assert (missing.code, missing.err) == (
        1,
        "echelon: there is no kubectl on this host; write the documents into a file by -o FILE\n",
    )
    kubectl = tmp_path / "kubectl"
    write(kubectl, f"#!{sys.executable}\nimport sys\nopen('taken', 'w').write(sys.stdin.read())\n").chmod(0o755)
    taken = here(*words, "--namespace", "ml", "t.py", cwd=tmp_path)
    assert taken.out == "echelon: submitted; its console: kubectl logs --namespace ml -f job/t\n"
    assert len(list(yaml.safe_load_all((tmp_path / "taken").read_text()))) == 3
    write(kubectl, "#!/bin/sh\necho 'error: no\n cluster' >&2; exit 1\n")
    refused = here(*words, "t.py", cwd=tmp_path)
    assert (refused.code, refused.err) == (1, "echelon: kubectl refused the job t: error: no cluster\n")
