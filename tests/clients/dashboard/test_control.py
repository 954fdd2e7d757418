"""Control services at a broker with access control: who may look at what they tell, and act."""

from types import SimpleNamespace

import pytest
from support.access import ROLES, Folder
from support.processes import TIMEOUT_SECONDS, eventually, process
from support.web import form_token, web_broker

from zmdp.clients import Client
from zmdp.mdp.control import GATEWAY
from zmdp.mdp.errors import ServiceError
from zmdp.mdp.tokens import new_token
from zmdp.spark.control import control_service

JOB = {"job": "job-1", "user": "shop", "what": "SELECT secret", "seconds": 1.0, "state": "running"}


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """A broker with a batch and a gateway, and the tokens of two roles."""
    folder, tokens, roles, asked = Folder(tmp_path_factory.mktemp("access")), {}, ROLES, []
    for name in ("driver", "operator"):
        tokens[name], digest = new_token()
        roles = roles.replace(f'["{name}.key"]', f'["{name}.key"]\ntokens = ["{digest}"]')
    folder.write(roles)

    def cancel(arguments, request):
        asked.append((arguments["job"], request.user, request.admin))
        return {"cancelled": True}

    def status(arguments, request):
        return {"kind": "batch", "running": [JOB] if request.admin else []}

    with web_broker("--access", str(folder.access)) as broker:
        operations = {"status": status, "cancel": cancel}
        command = ("mdp-gateway", "http", "--bind", "127.0.0.1:0", "--broker", broker.endpoint)
        with (
            control_service("nightly", operations, broker=broker.endpoint, keys=folder.keys("driver")),
            process(*command, *folder.options("driver"), "--name", "shop") as named,
            process(*command, *folder.options("resizer")) as unnamed,
        ):
            named.line("http://", "stdout")
            unnamed.line("http://", "stdout")
            yield SimpleNamespace(broker=broker, folder=folder, tokens=tokens, asked=asked, unnamed=unnamed)


def page(there, role, path):
    return there.broker.get(path, headers={"authorization": f"Bearer {there.tokens[role]}"}).text


def test_what_a_job_does_and_cancelling_it_is_for_admins(there):
    shown = eventually(lambda: "job-1" in (text := page(there, "operator", "/spark")) and text)
    assert "SELECT secret" in shown
    assert "Cancel this job" in shown
    shown = eventually(lambda: "job-1" in (text := page(there, "driver", "/spark")) and text)
    assert "SELECT secret" not in shown
    assert "Cancel this job" not in shown
    with there.broker.client(follow_redirects=True) as http:
        http.post("/login", data={"token": there.tokens["driver"]})
        token = form_token(http.get("/spark").text)
        fields = {"form_token": token, "batch": "nightly", "job": "job-1"}
        assert http.post("/spark/cancel", data=fields).status_code == 403
    assert there.asked == []
    with there.broker.client(follow_redirects=True) as http:
        http.post("/login", data={"token": there.tokens["operator"]})
        token = form_token(http.get("/spark").text)
        shown = http.post("/spark/cancel", data={"form_token": token, "batch": "nightly", "job": "job-1"})
        assert "The job was cancelled" in shown.text
    assert there.asked == [("job-1", "(dashboard)", True)]


def test_a_gateway_with_a_key_is_shown_if_it_has_a_name(there):
    eventually(lambda: "gateway?name=shop" in page(there, "driver", "/gateways"))
    eventually(lambda: "1–1 of 1 gateways" in page(there, "driver", "/gateways"))
    assert "refused" not in there.unnamed.stderr
    assert "gateway.control" not in there.unnamed.stderr
    for name, told in (("shop", False), ("operator", True)):
        with Client(there.broker.endpoint, timeout=TIMEOUT_SECONDS, **there.folder.settings(name)) as client:
            if told:
                assert b'"name": "shop"' in client.request(f"{GATEWAY}shop", b'{"op": "status"}')[0]
            else:
                with pytest.raises(ServiceError, match="only an admin may"):
                    client.request(f"{GATEWAY}shop", b'{"op": "status"}')
