"""The page about FastAPI: its application runs, and the commands print what the page shows."""

import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Literal

import httpx
import msgspec
import pytest
from pydantic import BaseModel, Field
from support.pages import DOCS, blocks, need_curl
from support.processes import TIMEOUT_SECONDS, broker, process
from typing_extensions import TypedDict

from zmdp import Services

pytest.importorskip("fastapi", reason="needs FastAPI: pip install fastapi")

from fastapi import Body, FastAPI
from fastapi.exceptions import FastAPIError
from fastapi.testclient import TestClient

PAGE = (DOCS / "how-to" / "fastapi.md").read_text()
URL = "http://127.0.0.1:8000"


def test_the_application_of_the_page(tmp_path):
    need_curl()
    (tmp_path / "images.py").write_text(blocks((DOCS / "how-to" / "services.md").read_text(), "python")[0])
    (tmp_path / "shop.py").write_text("\n".join(blocks(PAGE, "python")))
    (session,) = blocks(PAGE, "console")
    commands = [each.split("\n", 1) for each in re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]]
    (start, _), (work, _), (serve, _), *calls = commands
    assert start == "mdp-broker"
    with broker() as (_, at), ExitStack() as stack:
        for command, text in ((work, "serving"), ("titanic serve", "serving")):
            stack.enter_context(process(*shlex.split(command), cwd=tmp_path, MDP_BROKER=at)).line(text)
        server = (sys.executable, "-m", *shlex.split(serve), "--port", "0")
        running = stack.enter_context(process(*server, cwd=tmp_path, MDP_BROKER=at))
        url = re.search(r"http://\S+", running.line("running on"))[0]
        assert len(calls) == 2
        for command, printed in calls:
            done = subprocess.run(
                shlex.split(command.replace(URL, url)),
                capture_output=True,
                text=True,
                timeout=TIMEOUT_SECONDS,
                check=True,
            )
            assert done.stdout.rstrip("\n") == printed.rstrip("\n")
        with httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS) as http:
            uuid = http.post("/jobs", json={"path": "a.png", "width": 40}).raise_for_status().json()
            assert http.get(f"/jobs/{uuid}").json() == {"width": 40, "height": 30}
            assert http.post("/resize", json={"path": "a.png", "width": "wide"}).status_code == 422


@dataclass
class BankTransfer:
    iban: str


@dataclass
class Card:
    number: str


@dataclass
class Circle:
    kind: Literal["circle"] = "circle"
    size: int = 1


@dataclass
class Square:
    kind: Literal["square"] = "square"
    size: int = 1


class Cat(BaseModel):
    kind: Literal["cat"]
    name: str = Field(alias="theName")


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str = Field(alias="theName")


class Person(TypedDict):
    name: str


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (BankTransfer | Card, {"number": "1"}),
        (BankTransfer | Card, {"iban": "2"}),
        (Circle | Square, {"kind": "square", "size": 2}),
        (Cat | Dog, {"kind": "dog", "theName": "a"}),
        (list[Person] | None, [{"name": "a"}]),
    ],
)
def test_endpoints_and_services_share_types(kind, value):
    app, services = FastAPI(), Services()

    def echo(value):
        return value

    echo.__annotations__ = {"value": kind, "return": kind}
    offered = services.service("echo")(echo)

    def endpoint(value):
        return inside.call(offered, value)

    endpoint.__annotations__ = {"value": Annotated[kind, Body()], "return": kind}
    app.post("/echo")(endpoint)
    with services.test_client() as inside:
        assert TestClient(app).post("/echo", json=value).json() == value


def test_fastapi_does_not_know_structs():
    class Struct(msgspec.Struct):
        number: int

    with pytest.raises(FastAPIError):
        FastAPI().post("/struct", response_model=Struct)(lambda: None)
