"""What is said about files in TOML that cannot be used."""

import pytest

from zmdp.mdp.errors import SettingError
from zmdp.mdp.program import toml


def test_the_content_of_a_file(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("[a]\nb = 'ü'", encoding="utf-8")
    assert toml.load(path) == {"a": {"b": "ü"}}


def test_a_byte_order_mark_is_no_content(tmp_path):
    path = tmp_path / "a.toml"
    path.write_bytes(b"\xef\xbb\xbf[a]\r\nb = '\xc3\xbc'\r\n")  # as Notepad writes it
    assert toml.load(path) == {"a": {"b": "ü"}}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[a", "is not valid TOML: "),
        (b"a = " + b"[" * 10_000, "is not valid TOML: it is nested too deeply"),
        (b"a = " + b"9" * 10_000, "is not valid TOML: "),
        (b"a = '\xfc'", "is not text in UTF-8"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path, content, expected):
    path = tmp_path / "a.toml"
    path.write_bytes(content)
    with pytest.raises(SettingError, match=f"{path} {expected}"):
        toml.load(path)


def test_a_file_that_does_not_exist(tmp_path):
    with pytest.raises(SettingError, match=f"cannot read {tmp_path}/a.toml: No such file or directory"):
        toml.load(tmp_path / "a.toml")
