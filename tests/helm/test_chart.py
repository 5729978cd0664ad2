"""The chart, rendered by Helm's own engine: golden manifests per profile, and the rules that field reports taught.

After a wanted change: TWOSTROKE_UPDATE_GOLDEN=1 pytest tests/helm, then read the diff.
"""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml
from prometheus_client import CollectorRegistry

from twostroke.cluster.config import Config, parse_config
from twostroke.cluster.telemetry.metrics import RouterMetrics, WorkerMetrics

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "twostroke"
GOLDEN = Path(__file__).parent / "golden"
KUBERNETES = "1.30.0"
CUSTOM = {"RayCluster", "ServiceMonitor", "PodMonitor", "PrometheusRule"}
"""Kinds whose schemas are not here."""
Manifest = dict[str, Any]

GPU_POOL = {
    "replicas": 2,
    "gpus": 1,
    "nodeSelector": {"nvidia.com/gpu.present": "true"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
}
PROFILES: dict[str, dict[str, Any]] = {
    "default": {},
    "external-redis": {"redis": {"bundled": False, "externalSecret": {"name": "state", "key": "url"}}},
    "gpu": {
        "prefill": GPU_POOL,
        "decode": {**GPU_POOL, "replicas": 3},
        "model": {
            "source": "/models/llama",
            "existingClaim": "weights",
            "hubTokenSecret": {"name": "hub", "key": "token"},
        },
        "pages": {"numPages": 20000},
        "redis": {"persistence": {"enabled": True}},
        "config": {"transfer": {"transports": ["collective", "grpc"]}, "decode": {"max_running": 512}},
    },
    "monitoring": {
        "monitoring": {"enabled": True, "labels": {"release": "prometheus"}, "dashboard": {"enabled": True}}
    },
}
profiles = pytest.mark.parametrize("profile", PROFILES)


class _Readable(yaml.SafeDumper):
    """Scripts and files as blocks, so that a diff of a golden file reads like one."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Readable.add_representer(str, _text)


def render(values: dict[str, Any]) -> list[Manifest]:
    """All objects, in the order of their files' names."""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(chart.merge_values(values))
        files = chart.render(values, name="ts", namespace="serving")
    texts = [text for name, text in sorted(files.items()) if name.endswith(".yaml")]
    documents = [list(yaml.safe_load_all(text)) for text in texts]
    assert all(len(found) <= 1 for found in documents), "one object per template"
    return [found[0] for found in documents if found and found[0] is not None]


@cache
def _rendered(profile: str) -> str:
    return json.dumps(render(PROFILES[profile]))


def manifests(profile: str) -> list[Manifest]:
    loaded: list[Manifest] = json.loads(_rendered(profile))
    return loaded


def one(objects: list[Manifest], kind: str, suffix: str = "") -> Manifest:
    found = [item for item in objects if item["kind"] == kind and item["metadata"]["name"].endswith(suffix)]
    assert len(found) == 1, f"{len(found)} of {kind} *{suffix}"
    return found[0]


def pod_templates(objects: list[Manifest]) -> dict[str, Manifest]:
    """The pod template of each component."""
    found = {
        item["metadata"]["labels"]["app.kubernetes.io/component"]: item["spec"]["template"]
        for item in objects
        if item["kind"] in ("Deployment", "StatefulSet")
    }
    ray = one(objects, "RayCluster")["spec"]
    found["head"] = ray["headGroupSpec"]["template"]
    return found | {group["groupName"]: group["template"] for group in ray["workerGroupSpecs"]}


def config_of(objects: list[Manifest]) -> Config:
    return parse_config(yaml.safe_load(one(objects, "ConfigMap", "-twostroke")["data"]["config.yaml"]))


@profiles
def test_lint_finds_nothing(profile: str) -> None:
    report = helm_python.lint(CHART, PROFILES[profile], strict=True)
    assert not report["errors"], report
    assert not [message for message in report["messages"] if message["severity"] >= 2], report


@profiles
def test_manifests_are_the_golden_ones(profile: str) -> None:
    text = yaml.dump_all(manifests(profile), Dumper=_Readable, sort_keys=False, width=120)
    path = GOLDEN / f"{profile}.yaml"
    if os.environ.get("TWOSTROKE_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@profiles
def test_core_objects_obey_the_kubernetes_schema(profile: str) -> None:
    for item in manifests(profile):
        if item["kind"] not in CUSTOM:
            kubernetes_validate.validate(item, KUBERNETES, strict=True)


@profiles
def test_the_ray_cluster_has_a_head_and_a_group_per_pool(profile: str) -> None:
    """KubeRay's own schema is not here: its required fields and types by hand, its pods by Kubernetes' schema."""
    cluster = one(manifests(profile), "RayCluster")
    assert cluster["apiVersion"] == "ray.io/v1"
    spec = cluster["spec"]
    assert set(spec) == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    assert [group["groupName"] for group in spec["workerGroupSpecs"]] == ["prefill", "decode"]
    for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **group["template"]}
        pod["metadata"] = {"name": "x", **group["template"]["metadata"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    for group in spec["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert json.loads(json.loads(group["rayStartParams"]["resources"])) == {f"twostroke-{group['groupName']}": 1}


@profiles
def test_the_rendered_configuration_is_valid_and_leaves_routers_to_kubernetes(profile: str) -> None:
    objects = manifests(profile)
    config = config_of(objects)
    groups = {group["groupName"]: group for group in one(objects, "RayCluster")["spec"]["workerGroupSpecs"]}
    assert config.prefill.replicas == groups["prefill"]["replicas"]
    assert config.decode.replicas == groups["decode"]["replicas"]
    assert config.router.replicas == 0
    assert config.router.host == "0.0.0.0"
    # One file for all pods: each listens on every address and tells its own.
    assert (config.worker.host, config.worker.advertise) == ("0.0.0.0", "")
    assert config.ray.address == "127.0.0.1:6379"
    assert config.ray.pool_resources
    assert config.ray.prefill_gpus == float(groups["prefill"]["rayStartParams"]["num-gpus"])
    assert config.ray.decode_gpus == float(groups["decode"]["rayStartParams"]["num-gpus"])


def test_free_configuration_wins_over_what_the_chart_sets() -> None:
    config = config_of(manifests("gpu"))
    assert config.decode.max_running == 512
    assert config.decode.replicas == 3


@profiles
def test_liveness_outlasts_readiness_and_every_probe_has_a_timeout(profile: str) -> None:
    """FIELD-REPORTS C5: a busy process is not a dead one."""
    for component, template in pod_templates(manifests(profile)).items():
        if component in ("head", "prefill", "decode"):
            continue  # KubeRay adds its own probes of the raylet
        (container,) = template["spec"]["containers"]
        probes = [container[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
        assert all(probe["timeoutSeconds"] >= 2 for probe in probes), component
        _, ready, live = (probe["periodSeconds"] * probe["failureThreshold"] for probe in probes)
        assert live > 2 * ready, component


def test_router_probes_touch_the_paths_of_real_health() -> None:
    (container,) = pod_templates(manifests("default"))["router"]["spec"]["containers"]
    assert container["livenessProbe"]["httpGet"]["path"] == "/health/live"
    assert container["readinessProbe"]["httpGet"]["path"] == "/health/ready"


@profiles
def test_grace_covers_pause_and_drain_and_a_routers_covers_a_workers(profile: str) -> None:
    """FIELD-REPORTS D23."""
    objects = manifests(profile)
    drain_s = config_of(objects).ray.drain_s
    templates = pod_templates(objects)
    for component in ("router", "prefill", "decode"):
        spec = templates[component]["spec"]
        command = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        pause_s = int(command[1])
        assert command[0] == "sleep"
        assert pause_s >= 5
        assert spec["terminationGracePeriodSeconds"] > pause_s + drain_s
    grace = {name: templates[name]["spec"]["terminationGracePeriodSeconds"] for name in templates}
    assert grace["router"] >= max(grace["prefill"], grace["decode"])


@profiles
def test_every_pod_is_unprivileged_and_has_no_api_token(profile: str) -> None:
    for component, template in pod_templates(manifests(profile)).items():
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False, component
        assert spec["securityContext"]["runAsNonRoot"] is True, component
        for container in spec["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False, component
            assert container["resources"]["requests"], component
            assert container["resources"]["limits"], component


@profiles
def test_disruption_budgets_select_exactly_their_pods(profile: str) -> None:
    objects = manifests(profile)
    templates = pod_templates(objects)
    for component in ("router", "prefill", "decode"):
        selector = one(objects, "PodDisruptionBudget", component)["spec"]["selector"]["matchLabels"].items()
        selected = [name for name, template in templates.items() if selector <= template["metadata"]["labels"].items()]
        assert selected == [component]


@profiles
def test_services_select_pods_that_have_their_ports(profile: str) -> None:
    objects = manifests(profile)
    for service in (item for item in objects if item["kind"] == "Service"):
        selector = service["spec"]["selector"].items()
        (template,) = (
            template
            for template in pod_templates(objects).values()
            if selector <= template["metadata"]["labels"].items()
        )
        names = {port["name"] for container in template["spec"]["containers"] for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names


@profiles
def test_mounts_have_volumes(profile: str) -> None:
    claims = {"data"} if profile == "gpu" else set()
    for component, template in pod_templates(manifests(profile)).items():
        volumes = {volume["name"] for volume in template["spec"].get("volumes", ())}
        mounts = {mount["name"] for container in template["spec"]["containers"] for mount in container["volumeMounts"]}
        assert mounts <= volumes | claims, component


def test_gpu_pools_ask_for_gpus_on_gpu_nodes() -> None:
    ray = one(manifests("gpu"), "RayCluster")["spec"]
    for group in ray["workerGroupSpecs"]:
        spec = group["template"]["spec"]
        assert spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
        assert spec["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
        assert group["rayStartParams"]["num-gpus"] == "1"
    assert "nvidia.com/gpu" not in json.dumps(ray["headGroupSpec"])


def test_an_external_redis_comes_from_its_secret_and_nothing_is_bundled() -> None:
    objects = manifests("external-redis")
    assert not [item for item in objects if item["metadata"]["name"].endswith("-redis")]
    for component in ("head", "router"):
        (container,) = pod_templates(objects)[component]["spec"]["containers"]
        (url,) = (entry for entry in container["env"] if entry["name"] == "TWOSTROKE_REDIS_URL")
        assert url["valueFrom"] == {"secretKeyRef": {"name": "state", "key": "url"}}


def test_the_routers_share_the_key_of_continuation_tokens() -> None:
    objects = render({"router": {"continuationKeySecret": {"name": "budget", "key": "signing"}}})
    (container,) = pod_templates(objects)["router"]["spec"]["containers"]
    (key,) = (entry for entry in container["env"] if entry["name"] == "TWOSTROKE_CONTINUATION_KEY")
    assert key["valueFrom"] == {"secretKeyRef": {"name": "budget", "key": "signing"}}


def test_a_bundled_redis_is_reached_through_its_service() -> None:
    objects = manifests("default")
    (container,) = pod_templates(objects)["router"]["spec"]["containers"]
    (url,) = (entry["value"] for entry in container["env"] if entry["name"] == "TWOSTROKE_REDIS_URL")
    assert url == f"redis://{one(objects, 'Service', '-redis')['metadata']['name']}:6379/0"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@profiles
def test_container_scripts_are_valid_shell(profile: str) -> None:
    for component, template in pod_templates(manifests(profile)).items():
        for container in template["spec"]["containers"]:
            if container.get("command", [""])[0] == "/bin/bash":
                check = ["bash", "-n", "-c", container["args"][0]]
                result = subprocess.run(check, capture_output=True, text=True, timeout=10)
                assert result.returncode == 0, f"{component}: {result.stderr}"


@pytest.mark.skipif(shutil.which("bash") is None or shutil.which("pgrep") is None, reason="needs bash and pgrep")
def test_a_worker_pod_ends_when_its_role_process_has_drained() -> None:
    """The start script with a stand-in for Ray, and for the role process one that lives until its input closes."""
    marker = f"role-{os.getpid()}.main run"
    (container,) = pod_templates(manifests("default"))["decode"]["spec"]["containers"]
    script = container["args"][0].replace("[t]wostroke.cluster.main run", f"[{marker[0]}]{marker[1:]}")
    environment = {**os.environ, "KUBERAY_GEN_RAY_START_CMD": "echo started; sleep 300"}
    role = subprocess.Popen([sys.executable, "-c", "input()", *marker.split()], stdin=subprocess.PIPE)
    pod = subprocess.Popen(
        ["bash", "-c", "--", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert pod.stdout is not None
        assert pod.stdout.readline() == "started\n"
        pod.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            pod.wait(1.5)
    finally:
        role.communicate(b"\n", timeout=10)
    pod.communicate(timeout=10)  # until the last holder of its output has gone: nothing is left over
    assert pod.returncode == 0


def test_monitors_find_the_ports_that_serve_metrics() -> None:
    objects = manifests("monitoring")
    templates = pod_templates(objects)
    assert not [item for item in manifests("default") if item["kind"] in CUSTOM - {"RayCluster"}]

    spec = one(objects, "ServiceMonitor")["spec"]
    service = one(objects, "Service", "-router")
    assert spec["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert spec["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}

    spec = one(objects, "PodMonitor")["spec"]
    (chosen,) = spec["selector"]["matchExpressions"]
    assert chosen["values"] == ["prefill", "decode"]
    for component in chosen["values"]:
        labels = templates[component]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"].items() <= labels.items()
        assert labels[chosen["key"]] == component
        (container,) = templates[component]["spec"]["containers"]
        (port,) = container["ports"]
        assert port["name"] == spec["podMetricsEndpoints"][0]["port"]
        assert port["containerPort"] == config_of(objects).telemetry.metrics_port
    assert config_of(manifests("default")).telemetry.metrics_port == 0


def test_dashboard_and_alerts_ask_for_metrics_and_labels_that_exist() -> None:
    objects = manifests("monitoring")
    registries = CollectorRegistry(), CollectorRegistry()
    RouterMetrics(registries[0], "model")
    WorkerMetrics(registries[1], "model", "decode-0")
    known = {metric.name: metric for registry in registries for metric in registry.collect()}
    dashboard = json.loads(one(objects, "ConfigMap", "-dashboard")["data"]["twostroke.json"])
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [rule["expr"] for group in one(objects, "PrometheusRule")["spec"]["groups"] for rule in group["rules"]]
    assert len(queries) > 20
    for query in queries:
        names = re.findall(r"twostroke_[a-z0-9_]+", query)
        assert names, query
        for name in names:
            metric = known.get(re.sub("_(total|bucket)$", "", name))
            assert metric is not None, name
            suffix = {"counter": "_total", "histogram": "_bucket", "gauge": ""}[metric.type]
            assert name == metric.name + suffix


BAD_VALUES: list[tuple[str, dict[str, Any]]] = [
    ("unknown key", {"prefil": {"replicas": 2}}),
    ("unknown key inside a pool", {"decode": {"replica": 2}}),
    ("negative replicas", {"prefill": {"replicas": -1}}),
    ("replicas as text", {"decode": {"replicas": "three"}}),
    ("no router", {"router": {"replicas": 0}}),
    ("port out of range", {"router": {"httpPort": 70000}}),
    ("page size zero", {"pages": {"pageSize": 0}}),
    ("empty model", {"model": {"source": ""}}),
    ("service type", {"router": {"service": {"type": "Public"}}}),
    ("probe without an end", {"router": {"probes": {"liveness": {"failureThreshold": 0}}}}),
    ("password in a value", {"redis": {"bundled": False, "externalUrl": "redis://:hunter2@redis:6379/0"}}),
    ("external redis without an address", {"redis": {"bundled": False}}),
    ("no pause before the end", {"shutdown": {"pauseSeconds": 0}}),
    ("metrics port", {"monitoring": {"metricsPort": 80}}),
    ("log level", {"telemetry": {"logLevel": "chatty"}}),
]


@pytest.mark.parametrize("values", [pytest.param(values, id=name) for name, values in BAD_VALUES])
def test_the_schema_refuses(values: dict[str, Any]) -> None:
    with pytest.raises(helm_python.HelmValuesError):
        render(copy.deepcopy(values))


def test_an_external_redis_by_address_is_accepted() -> None:
    objects = render({"redis": {"bundled": False, "externalUrl": "rediss://redis.internal:6380/2"}})
    (container,) = pod_templates(objects)["router"]["spec"]["containers"]
    assert "rediss://redis.internal:6380/2" in json.dumps(container["env"])
