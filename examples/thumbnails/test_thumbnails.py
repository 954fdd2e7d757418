# test_thumbnails.py
from io import BytesIO

import pytest
from PIL import Image
from thumbnails import Job, Series, make, series, services

from zmdp import ServiceError


def image(width: int, height: int) -> bytes:
    png = BytesIO()
    Image.new("RGB", (width, height), "teal").save(png, "PNG")
    return png.getvalue()


def size(png: bytes) -> tuple[int, int]:
    return Image.open(BytesIO(png)).size


def test_a_thumbnail():
    with services.test_client() as client:
        assert size(client.call(make, Job(image(640, 480), width=64))) == (64, 48)


def test_a_series():
    with services.test_client() as client:
        parts = list(client.stream(series, Series(image(640, 480), [64, 32])))
    assert [(part.done, part.total, size(part.png)) for part in parts] == [(1, 2, (64, 48)), (2, 2, (32, 24))]


def test_what_is_not_an_image():
    with services.test_client() as client, pytest.raises(ServiceError, match="not an image") as error:
        client.call(make, Job(b"a text"))
    assert error.value.code == 422
