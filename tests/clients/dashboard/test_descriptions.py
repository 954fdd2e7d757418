"""What the page of a service shows of what its workers say of it."""

from dataclasses import dataclass

from support.offered import offered
from support.processes import TIMEOUT_SECONDS, eventually

from zmdp import Client, Services

services = Services(version="1.4")


@dataclass
class Job:
    path: str
    width: int = 80


@services.service("images.resize", codec="msgpack", retries=3, ttl=60.0)
def resize(job: Job) -> list[str]:
    """Scale an image, <b>quickly</b>."""
    return [job.path]


def test_a_service_is_shown_as_its_workers_describe_it(plain):
    with offered(services, plain.endpoint), Client(plain.endpoint, timeout=TIMEOUT_SECONDS) as client:
        client.call(resize, Job("a.png"))  # so that the broker counts it
        answer = eventually(lambda: (found := plain.get("/service?name=images.resize")).status_code == 200 and found)
    assert "Version 1.4, 1 worker" in answer.text
    assert "Scale an image, &lt;b&gt;quickly&lt;/b&gt;." in answer.text
    assert "class Job:\n    path: str\n    width: int = 80" in answer.text
    assert "<code>retries=3, ttl=60.0</code>" in answer.text
