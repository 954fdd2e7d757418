"""The images, the compose file and the Kustomize base, as far as they can be tried without containers."""

import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import resolve_name

import click
import pytest
import yaml
from support.access import Folder
from support.processes import BIN, TIMEOUT_SECONDS, eventually, process

import zmdp
from zmdp.clients import Client
from zmdp.mdp.security.access import load
from zmdp.testing import free_endpoint

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
OURS = {name: service for name, service in COMPOSE.items() if service["image"] == "zmdp-slim"}
BASE = DEPLOY / "kubernetes" / "base"
KUSTOMIZATION = yaml.safe_load((BASE / "kustomization.yaml").read_text())
OBJECTS = [each for name in KUSTOMIZATION["resources"] for each in yaml.safe_load_all((BASE / name).read_text())]
KUBERNETES = "1.30"
"""An older version, whose schemas newer ones still accept."""


def named(kind, name):
    (found,) = (each for each in OBJECTS if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


def pods():
    return [each["spec"]["template"] for each in OBJECTS if each["kind"] in {"StatefulSet", "Deployment"}]


def check_options(words):
    """Parse a command line as the command would."""
    (entry_point,) = entry_points(group="console_scripts", name=words[0])
    home = {
        "mdp-broker": "zmdp.mdp.cli.broker", "mdworker": "zmdp.workers.command.cli",
        "mdclient": "zmdp.clients.command.main",
        "titanic": "zmdp.titanic.operator.command.cli", "mdp-gateway": "zmdp.gateways.cli",
    }[entry_point.name]  # fmt: skip
    command, arguments = resolve_name(f"{home}:cli"), list(words[1:])
    context = None
    while isinstance(command, click.Group):
        name = arguments.pop(0)
        context = click.Context(command, parent=context, **command.context_settings)
        command = command.get_command(context, name)
        assert command is not None, words
    command.make_context(words[0], arguments, parent=context)


# ── the image ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_the_image_needs_is_not_ignored():
    """`COPY . /src` takes what .dockerignore leaves: all that the build needs, and no environments or results."""
    rules = (ROOT / ".dockerignore").read_text().split()
    assert rules[0] == "**"
    kept = {rule[1:] for rule in rules if rule.startswith("!")}
    folders = {path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file()} - {"tests"}
    assert kept >= folders | {"src", "pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"}
    assert all((ROOT / path).exists() for path in kept)


def test_the_image_runs_as_a_user_and_checks_its_health():
    lines = (DEPLOY / "slim.Dockerfile").read_text().splitlines()
    assert "USER 1000" in lines
    (check,) = (line for line in lines if line.startswith("HEALTHCHECK"))
    assert check.endswith('CMD ["mdclient", "health"]')
    assert "--timeout=30s" in check  # Python may take long to start
    assert "java" not in "".join(lines).lower()


# ── compose ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_compose_file_is_valid():
    pytest.importorskip("check_jsonschema")
    words = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    subprocess.run([*words, DEPLOY / "compose.yaml"], check=True)


def test_compose_starts_a_pair_titanic_two_workers_a_gateway_and_monitoring():
    assert {"broker1", "broker2", "titanic", "postgres", "worker1", "worker2", "gateway", "prometheus", "grafana"} <= (
        COMPOSE.keys()
    )
    for service in OURS.values():
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        check_options(service["command"])
        if "test" in service.get("healthcheck", {}):
            check_options(service["healthcheck"]["test"][1:])
    assert [name for name, service in COMPOSE.items() if "build" in service] == ["broker1"]


def test_compose_opens_ports_of_this_machine_only():
    ports = [port for service in COMPOSE.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert len({port.rpartition(":")[0] for port in ports}) == len(ports)


def test_compose_mounts_and_scrapes_what_there_is():
    for service in COMPOSE.values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).is_file(), volume
    scraped = yaml.safe_load((DEPLOY / "compose" / "prometheus.yml").read_text())
    (config,) = scraped["scrape_configs"][0]["static_configs"]
    for target in config["targets"]:
        name, port = target.split(":")
        assert f"--http=0.0.0.0:{port}" in COMPOSE[name]["command"]


# ── Kubernetes ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("manifest", OBJECTS, ids=lambda each: f"{each['kind']} {each['metadata']['name']}")
def test_manifests_are_valid(manifest):
    if manifest["kind"] == "ServiceMonitor":  # of the Prometheus Operator, whose schema is not Kubernetes'
        assert manifest["apiVersion"] == "monitoring.coreos.com/v1"
        assert {"selector", "endpoints"} == manifest["spec"].keys()
        return
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
def test_kustomize_builds_the_base():
    built = subprocess.run(["kubectl", "kustomize", BASE], check=True, capture_output=True, text=True).stdout
    found = list(yaml.safe_load_all(built))
    assert len(found) == len(OBJECTS) + len(KUSTOMIZATION["configMapGenerator"])
    assert f"image: registry.example/zmdp-slim:{zmdp.__version__}" in built


def test_pods_are_confined_and_start_what_is_there():
    for pod in pods():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        volumes = {volume["name"] for volume in spec["volumes"]}
        for container in (*spec["containers"], *spec.get("initContainers", [])):
            confined = container["securityContext"]
            assert confined["readOnlyRootFilesystem"]
            assert confined["capabilities"] == {"drop": ["ALL"]}
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
            if "args" in container:
                check_options([word.replace("/keys/", "/no/") for word in container["args"] if "--key" not in word])


def test_what_selects_pods_and_ports_finds_them():
    labels = [pod["metadata"]["labels"] for pod in pods()]
    ports = {each["name"] for pod in pods() for c in pod["spec"]["containers"] for each in c.get("ports", [])}

    def finds(selector):
        return any(selector.items() <= each.items() for each in labels)

    for each in OBJECTS:
        spec = each["spec"]
        if each["kind"] in {"StatefulSet", "Deployment", "PodDisruptionBudget"}:
            assert finds(spec["selector"]["matchLabels"])
        elif each["kind"] == "Service":
            assert finds(spec["selector"])
            assert {port["targetPort"] for port in spec["ports"]} <= ports
        elif each["kind"] == "NetworkPolicy":
            assert finds(spec["podSelector"]["matchLabels"])
            for rule in spec.get("ingress", []):
                assert {port["port"] for port in rule["ports"]} <= ports
                assert all(finds(peer["podSelector"]["matchLabels"]) for peer in rule["from"] if "podSelector" in peer)
    (metric,) = named("HorizontalPodAutoscaler", "echo")["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] == "mdp_queue_depth"
    assert named("StatefulSet", "broker")["spec"]["serviceName"] == named("Service", "brokers")["metadata"]["name"]
    monitor = named("ServiceMonitor", "zmdp")["spec"]
    (watched,) = monitor["selector"]["matchExpressions"]
    services = {each["metadata"]["labels"]["app"] for each in OBJECTS if each["kind"] == "Service"}
    assert set(watched["values"]) == services
    assert monitor["endpoints"][0]["port"] in ports


def test_prometheus_leaves_the_labels_of_metrics_as_they_are():
    """The operator calls the Service `service`; without honorLabels, that of a metric becomes `exported_service`."""
    given = {"container", "endpoint", "instance", "job", "namespace", "pod", "service"}
    (metric,) = named("HorizontalPodAutoscaler", "echo")["spec"]["metrics"]
    assert given & metric["external"]["metric"]["selector"]["matchLabels"].keys()
    (endpoint,) = named("ServiceMonitor", "zmdp")["spec"]["endpoints"]
    assert endpoint.get("honorLabels") is True


def test_the_keys_of_the_page_about_deploying_do(tmp_path):
    page = (ROOT / "docs" / "how-to" / "deploy.md").read_text()
    (commands,) = re.findall(r"^(export MDP_ACCESS=.*?)^kubectl", page, re.MULTILINE | re.DOTALL)
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-e", "-c", commands], check=True, cwd=tmp_path, env=environment, capture_output=True)
    access = load(tmp_path / "access.toml")
    offers = {name: role.offer for name, role in access.roles.items() if role.offer}
    assert offers == {"brokers": ("*",), "worker": ("echo",), "titanic": ("titanic.*",)}
    assert access.roles["titanic"].mmi == "all"  # it asks for other Titanics, with another database
    assert set(access.tokens.values()) == set(load(tmp_path / "http" / "access.toml").tokens.values()) == {"metrics"}


def test_the_brokers_of_the_stateful_set_link(tmp_path):
    """With one key for both, as the page about deploying makes it."""
    access = Folder(tmp_path)
    access.write((tmp_path / "access.toml").read_text().partition("\n")[2] + LINK)
    (container,) = named("StatefulSet", "broker")["spec"]["template"]["spec"]["containers"]
    shell, option, script = container["command"]
    endpoints = {name: free_endpoint() for name in ("broker-0", "broker-1")}
    with ExitStack() as stack:
        for name, endpoint in endpoints.items():
            (other,) = (at for each, at in endpoints.items() if each != name)
            words = script.replace("/keys", str(tmp_path)).replace("tcp://0.0.0.0:5555", endpoint)
            words = words.replace("tcp://$peer.brokers:5555", other).replace("0.0.0.0:8080", "127.0.0.1:0")
            path = f"{BIN}:{os.environ['PATH']}"
            stack.enter_context(process(shutil.which(shell), option, words, POD=name, PATH=path))
        keys = access.settings("driver")
        client = stack.enter_context(Client(endpoints["broker-0"], timeout=TIMEOUT_SECONDS, **keys))
        eventually(lambda: b'"broker-1"' in client.request("mmi.brokers")[0])


LINK = """
[roles.brokers]
keys = ["broker.key"]
link = true
offer = ["*"]
"""
