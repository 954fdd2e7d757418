"""What the page of a service shows of what its workers say of it."""

import threading
from dataclasses import dataclass

from support.offered import offered
from support.processes import TIMEOUT_SECONDS, eventually

from zmdp import Client, Limit, Services

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


def test_what_a_limit_holds_back_is_shown_by_service_and_by_group(plain):
    limited, may_end = Services(), threading.Event()

    @limited.service("embed", limit=Limit(concurrency=1), per_group=Limit(rate="500/min"))
    def embed(text: str) -> str:
        may_end.wait(TIMEOUT_SECONDS)
        return text

    with offered(limited, plain.endpoint), Client(plain.endpoint, timeout=TIMEOUT_SECONDS) as client:
        outstanding = [client.submit("embed", b'"x"', options={"group": f"tenant-{at // 2}"}) for at in range(3)]
        try:
            tile = "Held back by the limit 2 1 at once; per group 500/min; throttled so far: 2"
            groups = "Group Waiting Running tenant-0 1 1 tenant-1 1 0"
            plain.shows("/service?name=embed", tile, groups)
            plain.shows("/services", "2 / 2 limited")
            plain.shows("/requests?q=tenant-1", "1–1 of 1 requests, 3 without the search")
        finally:
            may_end.set()
        for each in outstanding:
            each.result(TIMEOUT_SECONDS)
