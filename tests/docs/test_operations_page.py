"""The dashboard and the alerts in `monitoring` use metrics that exist, and docs/how-to/operations.md has them all."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.web import web_broker

from zmdp.dashboard.shell.shell import exposition
from zmdp.titanic.db.metrics import Metrics
from zmdp.titanic.db.store.models import STATES
from zmdp.titanic.operator.pages.collector import TitanicCollector
from zmdp.titanic.server.program import NOTHING

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "monitoring"
NAME = re.compile(r"\b(?:mdp|titanic)_[a-z_]+\b")
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


@pytest.fixture(scope="module")
def families():
    """The families that a broker and a Titanic export, by name, with their kinds."""
    with web_broker() as broker:
        exposed = broker.get("/metrics").text  # it is there: `web_broker` has waited for the first snapshot
    counted = {**Metrics().as_dict(), **NOTHING}
    stats = {"total": {**dict.fromkeys(STATES, 0), "oldest_pending_seconds": None}, "titanics": 1}
    exposed += exposition([TitanicCollector(counted, stats)], "")[0].decode()
    return {each.name: each.type for each in text_string_to_metric_families(exposed)}


@pytest.fixture(scope="module")
def series(families):
    """The names of all their time series."""
    return {name + suffix for name, kind in families.items() for suffix in SUFFIXES[kind]}


def expressions():
    """Yield every expression in the dashboard, and where it is."""
    dashboard = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
    for variable in dashboard["templating"]["list"]:
        yield variable["name"], variable.get("definition", "")


def test_the_dashboard_uses_metrics_that_exist(series):
    used = {(where, name) for where, text in expressions() for name in NAME.findall(text)}
    assert {name for _, name in used} > {"mdp_up", "titanic_requests"}
    assert {(where, name) for where, name in used if name not in series} == set()


def test_the_alerts_use_metrics_that_exist(series):
    for name in ("prometheus-alerts.yml", "prometheus-alerts-test.yml"):
        used = set(NAME.findall((FOLDER / name).read_text()))
        assert used
        assert used - series == set()


def test_the_scaling_by_metrics_uses_metrics_that_exist(series):
    scaled = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "keda.yaml").read_text())
    assert (scaled["apiVersion"], scaled["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["metadata"].keys() == {"serverAddress", "query", "threshold"}
    used = set(NAME.findall(trigger["metadata"]["query"]))
    assert {"mdp_queue_depth", "mdp_requests_running"} <= used
    assert used - series == set()


def test_the_panels_have_places_of_their_own():
    panels = json.loads((FOLDER / "grafana-dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for at in [panel["gridPos"]]
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23


@pytest.mark.skipif(not shutil.which("promtool"), reason="there is no promtool (Debian: apt-get install prometheus)")
def test_promtool_accepts_the_alerts_and_the_expressions(tmp_path):
    for arguments in (("check", "rules", "prometheus-alerts.yml"), ("test", "rules", "prometheus-alerts-test.yml")):
        done = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    rules = [
        {"record": f"panel:{at}", "expr": re.sub(r"\$__rate_interval", "5m", text)}
        for at, (_, text) in enumerate(expressions())
        if text and not text.startswith("label_values")
    ]
    (tmp_path / "panels.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run(
        ["promtool", "check", "rules", "panels.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_documented():
    page = (ROOT / "docs" / "how-to" / "operations.md").read_text()
    alerts = re.findall(r"alert: (\w+)", (FOLDER / "prometheus-alerts.yml").read_text())
    assert {f"`{name}`" for name in alerts} == set(re.findall(r"`(?:Mdp|Titanic)[A-Z]\w+`", page))


def test_every_metric_is_documented(families):
    page = (ROOT / "docs" / "how-to" / "operations.md").read_text()
    shown = {name + ("_total" if kind == "counter" else "") for name, kind in families.items()}
    assert shown - set(re.findall(r"`([a-z_]+)`", page)) == set()
