"""The files in deploy/: manifests are valid, and what they run starts."""

import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from support.access import Folder
from support.processes import TIMEOUT_SECONDS, process, run

from zmdp.clients import Client
from zmdp.mdp.cli.console import CONTEXT_SETTINGS
from zmdp.mdp.keys import load_keys
from zmdp.spark.batch import catalogue
from zmdp.spark.batch.commands import batch

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = "1.30"
"""An older version, whose schemas newer ones still accept."""
MANIFESTS = {path.name: list(yaml.safe_load_all(path.read_text())) for path in (DEPLOY / "kubernetes").glob("*.yaml")}
OBJECTS = {(each["kind"], each["metadata"]["name"]): each for found in MANIFESTS.values() for each in found}
CONFIG = OBJECTS["ConfigMap", "batch"]["data"]


def pod(name):
    return OBJECTS["Deployment", name]["spec"]["template"]


def arguments(name, **files):
    """Return a container's command, with its files replaced."""
    (container,) = pod(name)["spec"]["containers"]
    words = container["args"]
    for old, new in files.items():
        words = [word.replace(old, str(new)) for word in words]
    return words


@pytest.mark.parametrize(
    "manifest", [*OBJECTS.values(), yaml.safe_load(CONFIG["executor.yaml"])], ids=lambda m: m["kind"]
)
def test_manifests_are_valid(manifest):
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_manifests_name_what_there_is():
    for name in ("broker", "batch"):
        deployment, template = OBJECTS["Deployment", name], pod(name)
        assert deployment["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
        spec = template["spec"]
        volumes = {each["name"] for each in spec["volumes"]}
        for container in (*spec["containers"], *spec["initContainers"]):
            assert {each["name"] for each in container["volumeMounts"]} <= volumes
        (container,) = spec["containers"]
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        service = OBJECTS["Service", name]["spec"]
        assert service["selector"].items() <= template["metadata"]["labels"].items()
        for port in service["ports"]:
            assert ports[port.get("targetPort", port["name"])] == port["port"]
        for probe in ("readinessProbe", "livenessProbe"):
            assert container.get(probe, {"httpGet": {"port": "http"}})["httpGet"]["port"] in {*ports, "http"}
    assert ("ServiceAccount", pod("batch")["spec"]["serviceAccountName"]) in OBJECTS
    assert set(CONFIG) == {"catalogue.toml", "executor.yaml"}


def test_the_broker_starts_as_in_its_manifest(tmp_path):
    access = Folder(tmp_path)
    words = arguments("broker", **{"/keys": tmp_path, "0.0.0.0:5555": "127.0.0.1:*", "0.0.0.0:8080": "127.0.0.1:0"})
    with process(*words) as running:
        endpoint = running.line("tcp://", "stdout")
        with Client(endpoint, timeout=TIMEOUT_SECONDS, **access.settings("shop")) as client:
            assert not client.available("nothing")
        assert running.end() == 0


def test_keys_are_copied_so_that_zmdp_accepts_them(tmp_path):
    """As the init container does: files of a secret are links to files that a group can read."""
    (tmp_path / "made").mkdir()
    Folder(tmp_path / "made")
    for folder in ("secret", "keys"):
        (tmp_path / folder).mkdir()
    for file in (tmp_path / "made").iterdir():
        file.chmod(0o440)
        (tmp_path / "secret" / file.name).symlink_to(file)
    for name in ("broker", "batch"):
        *shell, script = pod(name)["spec"]["initContainers"][0]["command"]
        script = script.replace("/secret", str(tmp_path / "secret")).replace("/keys", str(tmp_path / "keys"))
        subprocess.run([*shell, script], check=True)
        load_keys(tmp_path / "keys" / "driver.key_secret", tmp_path / "keys" / "broker.key")


def test_the_options_of_the_batch_are_valid(tmp_path):
    Folder(tmp_path)
    for name, text in CONFIG.items():
        (tmp_path / name).write_text(text)
    command, subcommand, *options = arguments("batch", **{"/keys": tmp_path, "/etc/zmdp": tmp_path})
    assert (command, subcommand) == ("mdp-spark", "batch")
    given = batch.make_context("batch", options, **CONTEXT_SETTINGS).params
    found = catalogue.read(given["config"])
    template = yaml.safe_load(Path(given["conf"]["spark.kubernetes.executor.podTemplateFile"]).read_text())
    (mount,) = template["spec"]["containers"][0]["volumeMounts"]
    for path in (found.results, found.tables["orders"].path):
        assert path.startswith(f"{mount['mountPath']}/")
    (service,) = (each for each in MANIFESTS["batch.yaml"] if each["kind"] == "Service")
    assert given["conf"]["spark.driver.host"] == service["metadata"]["name"]
    assert {given["conf"]["spark.driver.port"], given["conf"]["spark.driver.blockManager.port"]} == {
        str(each["port"]) for each in service["spec"]["ports"]
    }


def test_the_entrypoint(tmp_path):
    entrypoint = str(DEPLOY / "entrypoint.sh")
    assert run(entrypoint, "echo", "a b").stdout == b"a b\n"
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    java.chmod(0o755)
    names = ("DRIVER_URL", "EXECUTOR_ID", "EXECUTOR_CORES", "APPLICATION_ID", "EXECUTOR_POD_IP", "EXECUTOR_MEMORY",
             "RESOURCE_PROFILE_ID", "EXECUTOR_POD_NAME")  # fmt: skip
    given = {f"SPARK_{name}": name.lower() for name in names}
    options = {f"SPARK_JAVA_OPT_{number}": f"-Da{number}=b c" for number in range(12)}
    done = run(entrypoint, "executor", JAVA_HOME=str(tmp_path), SPARK_HOME="/spark", **given, **options)
    lines = done.stdout.decode().splitlines()
    assert lines[:14] == [*options.values(), "-Xmsexecutor_memory", "-Xmxexecutor_memory"]
    assert "/spark/jars/*" in lines[15]
    pairs = dict(zip(lines[17::2], lines[18::2], strict=True))
    assert pairs == {
        "--driver-url": "driver_url", "--executor-id": "executor_id", "--cores": "executor_cores",
        "--app-id": "application_id", "--hostname": "executor_pod_ip", "--podName": "executor_pod_name",
        "--resourceProfileId": "resource_profile_id",
    }  # fmt: skip
