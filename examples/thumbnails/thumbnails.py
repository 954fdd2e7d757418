# thumbnails.py
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO

from PIL import Image, UnidentifiedImageError

from zmdp import ServiceError, Services

services = Services(prefix="thumbnails.", codec="msgpack")


@dataclass
class Job:
    image: bytes
    width: int = 128


@services.service("make")
def make(job: Job) -> bytes:
    """Return the image as a PNG that is at most so wide."""
    return scaled(job.image, job.width)


def scaled(image: bytes, width: int) -> bytes:
    try:
        picture = Image.open(BytesIO(image))
    except UnidentifiedImageError:
        raise ServiceError(422, "this is not an image") from None
    picture.thumbnail((width, picture.height))
    png = BytesIO()
    picture.save(png, "PNG")
    return png.getvalue()


@dataclass
class Series:
    image: bytes
    widths: list[int]


@dataclass
class Thumbnail:
    done: int
    total: int
    png: bytes


@services.service("series")
def series(job: Series) -> Iterator[Thumbnail]:
    """Yield a thumbnail of each width, as soon as it is there."""
    for number, width in enumerate(job.widths, 1):
        yield Thumbnail(number, len(job.widths), scaled(job.image, width))
