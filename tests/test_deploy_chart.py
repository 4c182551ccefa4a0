# SPDX-License-Identifier: Apache-2.0
"""The Helm chart and the manifests: rendered by Helm's own library, validated against Kubernetes' own schemas."""

from __future__ import annotations

import copy
import hashlib
import os
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")

import helm_python as helm
import kubernetes_validate as kubernetes

DEPLOY = Path(__file__).parent.parent / "deploy"
CHART = DEPLOY / "helm/nemo-build"
CASES = ("all", "wheel")
OLDEST = "1.27"
CUSTOM = {"PodMonitor", "ScaledObject"}
"""Kinds whose schemas are not among Kubernetes'."""


def case(name: str) -> dict[str, Any]:
    return yaml.safe_load((CHART / f"ci/{name}.yaml").read_text())


def render(values: dict[str, Any]) -> list[dict[str, Any]]:
    with helm.Chart.load(CHART) as chart:
        rendered = chart.render(values, name="prod", namespace="models")
    texts = [text for name, text in rendered.items() if not name.endswith("NOTES.txt")]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def of_kind(documents: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {d["metadata"]["name"]: d for d in documents if d["kind"] == kind}


def containers(deployment: dict[str, Any]) -> Iterator[dict[str, Any]]:
    spec = deployment["spec"]["template"]["spec"]
    yield from spec.get("initContainers", [])
    yield from spec["containers"]


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {e["name"]: e["value"] for e in container["env"]}


@pytest.mark.parametrize("name", [None, *CASES])
def test_lint(name):
    report = helm.lint(CHART, case(name) if name else {}, strict=True, kube_version=f"v{OLDEST}.0")
    assert report["errors"] == []
    assert [m for m in report["messages"] if m["severity"] > 1] == []


@pytest.mark.parametrize("version", [OLDEST, "latest"])
@pytest.mark.parametrize("name", CASES)
def test_objects_are_what_kubernetes_takes(name, version):
    release = kubernetes.latest_version() if version == "latest" else version
    documents = render(case(name))
    builtin = [d for d in documents if d["kind"] not in CUSTOM]
    for document in builtin:
        kubernetes.validate(document, release, strict=True)
    assert len(builtin) >= (15 if name == "all" else 4)


def test_schemas_refuse_what_is_wrong():
    """Otherwise the test before says nothing."""
    deployment = copy.deepcopy(next(iter(of_kind(render(case("all")), "Deployment").values())))
    deployment["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate(deployment, OLDEST, strict=True)


@pytest.mark.parametrize("name", CASES)
def test_references_lead_somewhere(name):
    documents = render(case(name))
    names = of_kind(documents, "ConfigMap")
    for deployment in of_kind(documents, "Deployment").values():
        template = deployment["spec"]["template"]
        volumes = {v["name"]: v for v in template["spec"]["volumes"]}
        assert volumes["scripts"]["configMap"]["name"] in names
        used = {m["name"] for c in containers(deployment) for m in c["volumeMounts"]}
        assert used == set(volumes), "every volume is there, and used"
        selector = deployment["spec"]["selector"]["matchLabels"]
        assert selector.items() <= template["metadata"]["labels"].items()
        service = of_kind(documents, "Service")[deployment["metadata"]["name"]]
        assert service["spec"]["selector"] == selector
        ports = {p["name"] for p in template["spec"]["containers"][0]["ports"]}
        assert {p["targetPort"] for p in service["spec"]["ports"]} <= ports
        for container in containers(deployment):
            script = next((c for c in container["command"] if c.startswith("/scripts/")), None)
            if script is not None:
                assert Path(script).name in names[volumes["scripts"]["configMap"]["name"]]["data"]
    for scaler in (
        *of_kind(documents, "HorizontalPodAutoscaler").values(),
        *of_kind(documents, "ScaledObject").values(),
    ):
        target = of_kind(documents, "Deployment")[scaler["spec"]["scaleTargetRef"]["name"]]
        assert "replicas" not in target["spec"], "or each upgrade would undo the scaling"


def test_an_engine_runs_on_its_gpu():
    documents = render(case("all"))
    deployments = of_kind(documents, "Deployment")
    assert set(deployments) == {"prod-h100", "prod-l40s", "prod-a100", "prod-cpu"}
    for engine in case("all")["engines"]:
        spec = deployments[f"prod-{engine['name']}"]["spec"]["template"]["spec"]
        server = spec["containers"][0]
        shm = next(v for v in spec["volumes"] if v["name"] == "shm")
        assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": engine["shm"]}
        if "gpuProducts" in engine:
            [term] = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
                "nodeSelectorTerms"
            ]
            assert term["matchExpressions"] == [
                {"key": "nvidia.com/gpu.product", "operator": "In", "values": engine["gpuProducts"]}
            ]
            assert server["resources"]["limits"]["nvidia.com/gpu"] == 1
        else:
            assert "affinity" not in spec
            assert "nvidia.com/gpu" not in server["resources"]["limits"]
    limits = deployments["prod-h100"]["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"memory": "64Gi", "nvidia.com/gpu": 1}


def test_where_engines_come_from():
    documents = render(case("all"))
    steps = {
        name: {c["name"]: c for c in containers(deployment)}
        for name, deployment in of_kind(documents, "Deployment").items()
    }
    assert {name: list(c) for name, c in steps.items()} == {
        "prod-h100": ["fetch", "prepare", "server"],
        "prod-l40s": ["fetch", "prepare", "server"],
        "prod-a100": ["prepare", "server"],
        "prod-cpu": ["server"],
    }
    assert environment(steps["prod-h100"]["fetch"])["KIND"] == "oci"
    fetched = environment(steps["prod-l40s"]["fetch"])
    assert (fetched["KIND"], len(fetched["SHA256"])) == ("object", 64)
    assert steps["prod-l40s"]["fetch"]["envFrom"] == [{"secretRef": {"name": "s3"}}]
    mounted = environment(steps["prod-a100"]["prepare"])
    assert mounted["ENGINE"] == "/engine/nemotron/a100"
    assert len(mounted["MANIFEST_SHA256"]) == 64
    assert environment(steps["prod-cpu"]["server"])["REPOSITORY"] == "/models/nemotron/cpu"
    assert steps["prod-h100"]["prepare"]["args"] == case("all")["engines"][0]["options"]


@pytest.mark.parametrize("name", CASES)
def test_probes_generate(name):
    command = "nemo-build" if name == "all" else "/packages/bin/nemo-build"
    for deployment in of_kind(render(case(name)), "Deployment").values():
        [server] = deployment["spec"]["template"]["spec"]["containers"]
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = server[kind]
            words = probe["exec"]["command"]
            assert words[:4] == [command, "triton", "--probe", "127.0.0.1:8000"]
            assert probe["timeoutSeconds"] > float(words[words.index("--probe-timeout") + 1])
        startup = server["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 1200
        drains = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        [timeout] = [a for a in server["args"] if a.startswith("--exit-timeout-secs=")]
        assert drains > int(timeout.split("=")[1]) + int(server["lifecycle"]["preStop"]["exec"]["command"][1])


@pytest.mark.parametrize("name", CASES)
def test_nothing_runs_with_more_rights_than_it_needs(name):
    documents = render(case(name))
    pods = [d["spec"]["template"]["spec"] for d in of_kind(documents, "Deployment").values()]
    pods += [d["spec"] for d in of_kind(documents, "Pod").values()]
    for pod in pods:
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in (*pod.get("initContainers", []), *pod["containers"]):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}


def test_scaling_follows_our_gauges():
    gauges = {"nemo_build_requests_waiting": "2", "nemo_build_requests_running": "6"}
    scalers = of_kind(render(case("all")), "HorizontalPodAutoscaler")
    assert set(scalers) == {"prod-h100", "prod-cpu"}, "those with more pods at most than at least"
    spec = scalers["prod-h100"]["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 6)
    assert {
        m["pods"]["metric"]["name"]: m["pods"]["target"]["averageValue"] for m in spec["metrics"]
    } == gauges
    [scaled] = of_kind(render(case("wheel")), "ScaledObject").values()
    triggers = [t["metadata"] for t in scaled["spec"]["triggers"]]
    assert {t["query"].split("(")[1].split("{")[0]: t["threshold"] for t in triggers} == gauges
    assert all('namespace="models"' in t["query"] and "prod-h100-" in t["query"] for t in triggers)
    source = (DEPLOY.parent / "triton_repo/models/generate.py").read_text()
    for gauge in gauges:
        assert f'"{gauge.removeprefix("nemo_build_")}":' in source, "the model has it"
    adapter = yaml.safe_load((DEPLOY / "helm/prometheus-adapter.yaml").read_text())
    assert "nemo_build_requests_(waiting|running)" in adapter["rules"]["custom"][0]["seriesQuery"]


def changed(**values: Any) -> dict[str, Any]:
    return case("all") | values


def with_source(**source: Any) -> dict[str, Any]:
    return changed(engines=[{"name": "a", "replicas": 1, "shm": "1Gi", "scratch": "1Gi", "source": source}])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (changed(engines=[]), "engines is empty"),
        (changed(image={"repository": "nvcr.io/nvidia/tritonserver"}), "does not have nemo-build"),
        (
            changed(
                image={"repository": "nvcr.io/nvidia/tritonserver", "tag": "24.10-py3"},
                nemoBuild={"wheel": "https://w/nemo_build.whl"},
            ),
            "before 25.12",
        ),
        (
            changed(engines=2 * [with_source(pvc={"claim": "c", "path": "p"})["engines"][0]]),
            "two of the name a",
        ),
    ],
)
def test_what_templates_refuse(values, message):
    with pytest.raises(helm.HelmError, match=message):
        render(values)


@pytest.mark.parametrize(
    "values",
    [
        changed(replicas=3),
        changed(autoscaling={"kind": "cpu"}),
        with_source(),
        with_source(oci={"reference": "registry.example/engine:latest"}),
        with_source(object={"remote": ":s3:b/engine.tar", "sha256": "abc"}),
        with_source(object={"remote": ":s3:b/engine.tar"}),
        with_source(pvc={"claim": "c", "path": "p"}, repository={"claim": "c", "path": "p"}),
        with_source(pvc={"claim": "c"}),
        changed(
            engines=[
                {"name": "A_b", "replicas": 1, "shm": "1Gi", "source": {"pvc": {"claim": "c", "path": "p"}}}
            ]
        ),
        changed(engines=[{"name": "a", "replicas": 1, "source": {"pvc": {"claim": "c", "path": "p"}}}]),
    ],
)
def test_what_the_schema_refuses(values):
    with helm.Chart.load(CHART) as chart:
        for fine in (case("all"), case("wheel"), with_source(pvc={"claim": "c", "path": "p"})):
            chart.validate_schema(fine)
        with pytest.raises(helm.HelmValuesError):
            chart.validate_schema(values)


# --- the scripts, run -----------------------------------------------------------------------------------------


@pytest.fixture
def shell(tmp_path):
    """Runs a script of the chart with stand-ins for the programs of the images."""
    binaries = tmp_path / "bin"
    binaries.mkdir()

    def run(script: str, *arguments: str, programs: dict[str, str], **variables: str):
        for name, body in programs.items():
            (binaries / name).write_text(f"#!/bin/sh\nset -eu\n{body}\n")
            (binaries / name).chmod(0o755)
        environment = {"PATH": f"{binaries}:{os.environ['PATH']}", **variables}
        command = ["sh", str(CHART / "files" / script), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    return run


@pytest.fixture
def artefact(tmp_path) -> Path:
    (tmp_path / "built").mkdir()
    (tmp_path / "built/engine.json").write_text("{}")
    with tarfile.open(tmp_path / "engine.tar", "w") as tar:
        tar.add(tmp_path / "built", ".")
    return tmp_path / "engine.tar"


def test_objects_are_compared_with_their_digest(shell, artefact, tmp_path):
    work = tmp_path / "work"
    (work / "engine").mkdir(parents=True)
    (work / "engine/old").touch()
    programs = {"rclone": f'[ "$1 $2" = "copyto :s3:b/e.tar" ]\ncp {artefact} "$3"'}
    variables = {"KIND": "object", "SOURCE": ":s3:b/e.tar", "WORK": str(work), "programs": programs}
    done = shell("fetch.sh", SHA256="0" * 64, **variables)
    assert done.returncode != 0
    assert not (work / "engine").exists(), "nothing is unpacked"
    done = shell("fetch.sh", SHA256=hashlib.sha256(artefact.read_bytes()).hexdigest(), **variables)
    assert done.returncode == 0, done.stderr
    assert [p.name for p in work.iterdir()] == ["engine"]
    assert [p.name for p in (work / "engine").iterdir()] == ["engine.json"]


def test_artefacts_of_registries(shell, artefact, tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    programs = {"oras": f'[ "$1 $2 $4" = "pull --output r@sha256:1" ]\ncp {artefact} "$3/engine.tar"'}
    done = shell("fetch.sh", KIND="oci", SOURCE="r@sha256:1", WORK=str(work), programs=programs)
    assert done.returncode == 0, done.stderr
    assert (work / "engine/engine.json").is_file()
    programs = {"oras": "exit 1"}
    done = shell("fetch.sh", KIND="oci", SOURCE="r@sha256:1", WORK=str(work), programs=programs)
    assert done.returncode != 0


def test_engines_are_checked_before_they_are_served(shell, tmp_path):
    engine, log = tmp_path / "engine", tmp_path / "log"
    engine.mkdir()
    (engine / "engine.json").write_text("{}")
    programs = {"nemo": f'echo "$@" >> {log}'}
    variables = {"ENGINE": str(engine), "NEMO_BUILD": "nemo", "REPOSITORY": "/models/r", "VERIFY": "true"}
    done = shell("prepare.sh", "--in-process", programs=programs, MANIFEST_SHA256="0" * 64, **variables)
    assert done.returncode != 0
    assert not log.exists()
    digest = hashlib.sha256(b"{}").hexdigest()
    done = shell("prepare.sh", "--in-process", programs=programs, MANIFEST_SHA256=digest, **variables)
    assert done.returncode == 0, done.stderr
    assert log.read_text().splitlines() == [
        f"inspect --verify {engine}",
        f"triton {engine} -o /models/r --reference --force --in-process",
    ]
    programs = {"nemo": "exit 1"}
    assert shell("prepare.sh", programs=programs, **variables).returncode != 0


def test_models_are_loaded_in_order(shell, tmp_path):
    shared, repository = tmp_path / "shm", tmp_path / "repository"
    shared.mkdir()
    (shared / "nemo-build-1-left").touch()
    for name in ("generate", "verify", "accept", "plain_step"):
        (repository / name).mkdir(parents=True)
    programs = {"tritonserver": 'printf "%s\\n" "$@"'}
    variables = {"REPOSITORY": str(repository), "SHARED": str(shared)}
    done = shell("serve.sh", "--exit-timeout-secs=9", programs=programs, **variables)
    words = done.stdout.split()
    assert done.returncode == 0, done.stderr
    assert words[0] == f"--model-repository={repository}"
    assert "--exit-timeout-secs=9" in words
    loads = [w.removeprefix("--load-model=") for w in words if w.startswith("--load-model=")]
    assert sorted(loads[:-1]) == ["accept", "plain_step", "verify"]
    assert loads[-1] == "generate"
    assert list(shared.iterdir()) == []


@pytest.mark.parametrize("name", ["fetch.sh", "prepare.sh", "serve.sh"])
def test_scripts_are_plain_shell(name):
    """Images have different shells; none of these is run as a file."""
    path = CHART / "files" / name
    assert path.read_text().startswith("#!/bin/sh\n")
    assert not path.stat().st_mode & stat.S_IXUSR
    assert subprocess.run(["sh", "-n", path], check=False).returncode == 0


# --- KServe --------------------------------------------------------------------------------------------------


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "kserve" / name).read_text())


def test_the_runtime_of_kserve_is_a_pod():
    """What it says of containers and volumes is what a pod would say."""
    runtime = manifest("runtime.yaml")
    spec = {name: runtime["spec"][name] for name in ("containers", "volumes")}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
    for version in (OLDEST, kubernetes.latest_version()):
        kubernetes.validate(pod, version, strict=True)
    [container] = spec["containers"]
    assert container["name"] == "kserve-container"
    assert "--model-repository=/mnt/models" in container["args"][0]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in spec["volumes"]}
    script = subprocess.run(["sh", "-n"], input=container["args"][0], text=True, check=False)
    assert script.returncode == 0


def test_the_service_of_kserve_fits_its_runtime():
    runtime, service = manifest("runtime.yaml"), manifest("inference_service.yaml")
    predictor = service["spec"]["predictor"]
    model = predictor["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"] in runtime["spec"]["supportedModelFormats"]
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    resources = {"name": "x", "resources": model["resources"]}
    spec = {name: predictor[name] for name in ("affinity", "tolerations", "terminationGracePeriodSeconds")}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "x"},
        "spec": spec | {"containers": [resources]},
    }
    kubernetes.validate(pod, OLDEST, strict=True)
    metrics = [m["external"] for m in predictor["autoScaling"]["metrics"]]
    assert all(set(m["target"]) == {"type", "value"} for m in metrics)
    queries = [m["metric"]["query"] for m in metrics]
    assert [q.split("(")[1].split("{")[0] for q in queries] == [
        "nemo_build_requests_waiting",
        "nemo_build_requests_running",
    ]
