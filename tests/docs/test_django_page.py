"""The page about Django: its files make a project, which runs as separate programs."""

import re
import shlex
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.pages import blocks
from support.processes import broker, process, run

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "django.md").read_text()
SETTINGS = """
SECRET_KEY = "for tests"
INSTALLED_APPS = ["django_tasks"] if {backport} else []
DATABASES = {{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}}}}
"""
PROGRAM = """
import time
import django

django.setup()
from shop.orders import find, place
from shop.uploads import upload

task = place(18)
while (found := find(task)) is None:
    time.sleep(0.01)
print(found)
print(upload("a.png"))
"""

django = pytest.importorskip("django", reason="needs Django: pip install django django-tasks")
BACKPORT = django.VERSION < (6,)
if BACKPORT and find_spec("django_tasks") is None:
    pytest.skip("needs the tasks of Django: pip install django-tasks", allow_module_level=True)


def test_the_project_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("shop").mkdir()
    *files, upload = blocks(PAGE, "python")
    for text in [*files, f"# shop/uploads.py\n{upload}"]:
        path = Path(text.splitlines()[0].removeprefix("# "))
        if BACKPORT:
            text = text.replace("from django.tasks import", "from django_tasks import")  # noqa: PLW2901
        path.write_text(text + (SETTINGS.format(backport=BACKPORT) if path.stem == "settings" else ""))
    Path("program.py").write_text(PROGRAM)
    (commands,) = blocks(PAGE, "sh")
    upgrade, start, serve, work = map(shlex.split, commands.splitlines())
    assert start == ["mdp-broker"]
    setting, *work = work
    settings = dict([setting.split("=")])
    with broker() as (_, at), ExitStack() as stack:
        assert run(*upgrade).returncode == 0
        stack.enter_context(process(*serve, MDP_BROKER=at)).line("serving")
        stack.enter_context(process(*work, MDP_BROKER=at, **settings)).line("offering")
        done = run(sys.executable, "program.py", **settings)
    assert re.fullmatch(r"invoice-18\.pdf\n[0-9a-f]{32}\n", done.stdout.decode()), done.stderr.decode()


def test_the_page_names_every_option():
    from zmdp.titanic.contrib.django import _SUBMISSION

    rows = re.findall(r"^\| (`.*?`) \|", PAGE, re.MULTILINE)
    assert sorted(re.findall("`(.*?)`", " ".join(rows))) == sorted(["database", "prefix", "owner", *_SUBMISSION])
