"""The names of programs with a control service."""

import socket

import pytest

from zmdp.mdp.errors import SettingError
from zmdp.mdp.program.control_services import SPARK, name_or_default, names_in, validate_name


def test_the_default_name_is_made_of_kind_host_and_number(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node_1.example.org")
    assert name_or_default(None, "batch", 17) == "batch-node-1-example-org-17"
    monkeypatch.setattr(socket, "gethostname", lambda: "x" * 64)
    assert name_or_default(None, "http", 8080) == f"http-{'x' * 40}-8080"
    assert name_or_default("nightly.1", "batch", 17) == "nightly.1"


@pytest.mark.parametrize("wrong", ["", "a b", "ä", "x" * 101, "a/b", "a\n"])
def test_other_names_are_refused(wrong):
    with pytest.raises(SettingError, match="is not a valid name"):
        validate_name(wrong)
    with pytest.raises(SettingError, match="is not a valid name"):
        name_or_default(wrong, "batch", 1)


def test_programs_are_found_by_their_services():
    services = [f"{SPARK}b", f"{SPARK}a", f"{SPARK}a/2f", SPARK, f"{SPARK}a b", "shop.control.a", "spark.sql"]
    assert names_in(services, SPARK) == ["a", "b"]
