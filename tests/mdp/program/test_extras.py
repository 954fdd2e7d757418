import json
import sys

import pytest

from zmdp.mdp.program.extras import install_command


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """`installed(record, tool)` makes this an installation of which pip or uv have recorded where it came from."""

    def make(record, tool="pip"):
        folder = tmp_path / "site-packages"
        info = folder / "zmdp-0.1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: zmdp\nVersion: 0.1.0\n")
        (info / "INSTALLER").write_text(f"{tool}\n")
        if record is not None:
            (info / "direct_url.json").write_text(json.dumps(record))
        monkeypatch.syspath_prepend(folder)

    return make


@pytest.mark.parametrize(("editable", "option"), [(False, ""), (True, "-e ")])
def test_what_came_from_a_checkout_comes_from_there_again(installed, tmp_path, editable, option):
    checkout = tmp_path / "my zmdp"
    checkout.mkdir()
    installed({"url": checkout.as_uri(), "dir_info": {"editable": editable} if editable else {}})
    assert install_command("web") == f"pip install {option}'{checkout}[web]'"


def test_a_checkout_that_is_gone_is_not_named(installed, tmp_path):
    installed({"url": (tmp_path / "gone").as_uri(), "dir_info": {}})
    assert install_command("spark", "postgres") == "pip install '/path/to/zmdp[spark,postgres]'"


FROM_GIT = {"url": "https://example.org/zmdp.git", "vcs_info": {"vcs": "git", "commit_id": "0ff"}}
WHEEL = {"url": "file:///srv/zmdp-0.1.0-py3-none-any.whl", "archive_info": {}}


@pytest.mark.parametrize(
    ("record", "requirement"),
    [
        (FROM_GIT, "zmdp[arrow] @ git+https://example.org/zmdp.git@0ff"),
        (WHEEL, "zmdp[arrow] @ file:///srv/zmdp-0.1.0-py3-none-any.whl"),
        (None, "zmdp[arrow]"),
    ],
    ids=["repository", "wheel", "index"],
)
def test_what_came_from_elsewhere(installed, record, requirement):
    installed(record)
    assert install_command("arrow") == f"pip install '{requirement}'"


def test_uv_installs_what_uv_has_installed(installed, tmp_path):
    installed({"url": tmp_path.as_uri(), "dir_info": {}}, tool="uv")
    assert install_command("web") == f"uv pip install '{tmp_path}[web]'"


def test_what_is_not_installed_names_no_index(monkeypatch):
    """As in an archive on Spark's executors, which has no metadata."""
    monkeypatch.setattr(sys, "path", [each for each in sys.path if "site-packages" not in each])
    assert install_command("web") == "pip install '/path/to/zmdp[web]'"
