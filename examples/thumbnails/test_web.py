# test_web.py
import json

import pytest
from fastapi.testclient import TestClient
from test_thumbnails import image, size
from thumbnails import services
from web import app


@pytest.fixture
def web(worker):
    """The application, with a broker and a worker that are real."""
    worker(services)
    with TestClient(app) as client:
        yield client


def parts_of(response):
    return [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line]


def test_a_thumbnail(web):
    response = web.post("/thumbnail?width=64", content=image(640, 480))
    assert (response.status_code, size(response.content)) == (200, (64, 48))


def test_what_is_not_an_image(web):
    response = web.post("/thumbnail", content=b"a text")
    assert (response.status_code, response.json()) == (422, {"detail": "this is not an image"})


def test_a_series(web):
    response = web.post("/series?widths=64&widths=32", content=image(640, 480))
    assert [part["done"] for part in parts_of(response)] == [1, 2]


def test_a_job(web, mdp_titanic):
    job = web.post("/jobs?widths=64&widths=32", content=image(640, 480)).json()["id"]
    for _ in range(2):  # whoever comes back sees it from the beginning
        assert [part["done"] for part in parts_of(web.get(f"/jobs/{job}"))] == [1, 2]
    assert web.delete(f"/jobs/{job}").status_code == 204
    assert web.get(f"/jobs/{job}").status_code == 404
