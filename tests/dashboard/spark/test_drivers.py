"""Control services at a broker with access control: who may look at what they tell, and act."""

from types import SimpleNamespace

import pytest
from support.access import ROLES, Folder
from support.processes import eventually
from support.web import form_token, web_broker

from zmdp.mdp.security.access import new_token
from zmdp.spark.drivers import control_service

JOB = {"job": "job-1", "user": "shop", "what": "SELECT secret", "seconds": 1.0, "state": "running"}


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """A broker with a batch, and the tokens of two roles."""
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
        with control_service("nightly", operations, broker=broker.endpoint, keys=folder.keys("driver")):
            yield SimpleNamespace(broker=broker, tokens=tokens, asked=asked)


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
