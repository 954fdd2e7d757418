"""The batch's manifest in deploy/ is valid, and fits the brokers that it connects to; the image's entrypoint."""

from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from support.access import Folder
from support.processes import run

from zmdp.mdp.cli.console import CONTEXT_SETTINGS
from zmdp.spark.batch.catalogue import catalogue_file
from zmdp.spark.command.batch import batch

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = "1.30"
"""An older version, whose schemas newer ones still accept."""
OBJECTS = {
    (each["kind"], each["metadata"]["name"]): each
    for each in yaml.safe_load_all((DEPLOY / "kubernetes" / "batch.yaml").read_text())
}
DEPLOYMENT, SERVICE = OBJECTS["Deployment", "batch"], OBJECTS["Service", "batch"]
POD = DEPLOYMENT["spec"]["template"]
CONFIG = OBJECTS["ConfigMap", "batch"]["data"]
EXECUTOR = yaml.safe_load(CONFIG["executor.yaml"])
BASE = DEPLOY / "kubernetes" / "base"


@pytest.mark.parametrize("manifest", [*OBJECTS.values(), EXECUTOR], ids=lambda m: m["kind"])
def test_manifests_are_valid(manifest):
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_the_manifest_names_what_there_is():
    labels, spec = POD["metadata"]["labels"], POD["spec"]
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (container,) = spec["containers"]
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in spec["volumes"]}
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert SERVICE["spec"]["selector"].items() <= labels.items()
    for port in SERVICE["spec"]["ports"]:
        assert ports[port["name"]] == port["port"]
    assert ("ServiceAccount", spec["serviceAccountName"]) in OBJECTS
    assert set(CONFIG) == {"catalogue.toml", "executor.yaml"}


def test_the_batch_and_its_executors_may_connect_to_the_brokers_of_the_base():
    (configured,) = yaml.safe_load((BASE / "kustomization.yaml").read_text())["configMapGenerator"]
    endpoints = dict(each.split("=") for each in configured["literals"])["MDP_BROKER"]
    assert f"--broker={endpoints}" in POD["spec"]["containers"][0]["args"]
    (policy,) = (
        each for each in yaml.safe_load_all((BASE / "network.yaml").read_text()) if each["metadata"]["name"] == "broker"
    )
    admitted = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    for each in (POD, EXECUTOR):
        assert admitted.items() <= each["metadata"]["labels"].items()


def test_the_options_of_the_batch_are_valid(tmp_path):
    Folder(tmp_path)
    for name, text in CONFIG.items():
        (tmp_path / name).write_text(text)
    words = [
        word.replace("/keys", str(tmp_path)).replace("/etc/zmdp", str(tmp_path))
        for word in POD["spec"]["containers"][0]["args"]
    ]
    command, subcommand, *options = words
    assert (command, subcommand) == ("mdp-spark", "batch")
    given = batch.make_context("batch", options, **CONTEXT_SETTINGS).params
    found = catalogue_file.read(given["config"])
    template = yaml.safe_load(Path(given["conf"]["spark.kubernetes.executor.podTemplateFile"]).read_text())
    (mount,) = template["spec"]["containers"][0]["volumeMounts"]
    for path in (found.results, found.tables["orders"].path):
        assert path.startswith(f"{mount['mountPath']}/")
    assert given["conf"]["spark.driver.host"] == SERVICE["metadata"]["name"]
    assert {given["conf"]["spark.driver.port"], given["conf"]["spark.driver.blockManager.port"]} == {
        str(each["port"]) for each in SERVICE["spec"]["ports"]
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
