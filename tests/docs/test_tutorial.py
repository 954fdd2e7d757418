"""The pages with whole programs: who follows them gets what they show; the tutorial makes the finished example."""

import json
import subprocess
from contextlib import ExitStack
from urllib.request import urlopen

import pytest
from support.pages import DOCS, Reader, blocks, write_files
from support.processes import TIMEOUT_SECONDS, eventually, free_endpoint, run

from zmdp.clients import Client

FINISHED = DOCS.parent / "examples" / "thumbnails"
PAGES = [f"tutorial/{name}.md" for name in ("index", "web", "progress", "jobs", "tests", "production")]
LEFT, RIGHT, WEB, DASHBOARD = "tcp://127.0.0.1:5555", "tcp://127.0.0.1:5556", "--port 8000", "127.0.0.1:8080"


@pytest.fixture
def reader(tmp_path, monkeypatch):
    for name in ("MDP_BROKER", "MDP_KEY", "MDP_BROKER_KEY", "MDP_ACCESS", "TITANIC_DB"):
        monkeypatch.delenv(name, raising=False)
    left, right, web, dashboard = (free_endpoint() for _ in range(4))
    port = web.rpartition(":")[2]
    names = {
        LEFT: left, RIGHT: right, DASHBOARD: dashboard.removeprefix("tcp://"),
        WEB: f"--port {port}", "127.0.0.1:8000": f"127.0.0.1:{port}",
    }  # fmt: skip
    with ExitStack() as stack:
        # Programs without an argument use the default endpoint, at which other tests may have a broker.
        yield Reader(tmp_path, stack, names, {"MDP_BROKER": left, "MDP_BIND": left})


@pytest.mark.parametrize("page", ["start.md", "how-to/other-languages.md", "how-to/moving.md"])
def test_the_programs_of_a_page(page, reader):
    reader.write(page)
    reader.read(page)


@pytest.fixture
def tutorial(reader):
    """Follow the tutorial up to a page, and run the commands of that page and of those that it builds on."""
    pytest.importorskip("fastapi")
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (640, 480), "teal").save(reader.folder / "photo.jpg")

    def follow(last, *needed):
        for page in PAGES[: PAGES.index(last) + 1]:
            reader.write(page)
        for page in (*needed, last):
            reader.read(page)
        return reader

    return follow


def test_the_page_about_the_service(tutorial):
    tutorial("tutorial/index.md")


def test_the_pages_about_the_web_application_and_jobs(tutorial):
    reader = tutorial("tutorial/jobs.md", "tutorial/index.md", "tutorial/web.md", "tutorial/progress.md")
    url = f"http://127.0.0.1:{reader.names[WEB].split()[1]}/series?" + "&".join(["widths=640"] * 2000)
    browser = subprocess.Popen(
        ["curl", "-sN", "--data-binary", f"@{reader.folder / 'photo.jpg'}", url], stdout=subprocess.PIPE
    )
    assert browser.stdout.readline().startswith(b'data: {"done": 1, "total": 2000,')
    browser.kill()
    browser.communicate()
    with Client(reader.names[LEFT]) as client:
        eventually(lambda: json.loads(client.request("mmi.stats")[0])["dropped"].get("cancelled") == 1)
        assert json.loads(client.request("mmi.requests")[0])["requests"] == []


def test_the_page_about_tests(tutorial):
    tutorial("tutorial/tests.md")


def test_the_page_about_production(tutorial):
    """The dashboard is there, and a call succeeds after the first broker is lost."""
    reader = tutorial("tutorial/production.md")
    with urlopen(f"http://{reader.names[DASHBOARD]}/livez", timeout=TIMEOUT_SECONDS) as answer:
        assert answer.status == 200
    (left,) = [running for command, running in reader.servers.items() if "--name left" in command]
    left.kill()
    reader.run("curl --silent --data-binary @photo.jpg http://127.0.0.1:8000/thumbnail --output small.png", [])
    assert (reader.folder / "small.png").read_bytes().startswith(b"\x89PNG")


def test_the_pages_make_the_finished_example(tmp_path):
    for page in PAGES:
        write_files(page, tmp_path)
    (tmp_path / "try_it.py").unlink()
    made = {file.name: f"# {file.name}\n{file.read_text()}" for file in tmp_path.iterdir()}
    assert made == {file.name: file.read_text() for file in FINISHED.glob("*.py")}


def test_the_settings_of_its_workers_are_valid():
    pytest.importorskip("PIL.Image")
    page = (DOCS / "how-to" / "deploy.md").read_text()
    (block,) = (block for block in blocks(page, "ini") if "TARGET=" in block)
    settings = dict(line.split("=", 1) for line in block.splitlines()[1:])
    words = [word for word in settings["OPTIONS"].split() if not word.startswith("--key=")]
    done = run("mdworker", *words, settings["TARGET"], "--check", cwd=FINISHED, PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 0, done.stderr
