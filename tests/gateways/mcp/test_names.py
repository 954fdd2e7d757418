"""Names of tools."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmdp.gateways.mcp.names import service_name, tool_name


@pytest.mark.parametrize(
    ("service", "tool"),
    [
        ("echo", "echo"),
        ("words.count", "words-count"),
        ("word_count", "word_count"),
        ("a-b", "a--2db"),
        ("a..b", "a--2e-b"),
        ("a.", "a--2e"),
        ("é/x", "--c3--a9--2fx"),
        ("task_result", "--74ask_result"),
        ("task.result", "task-result"),
    ],
)
def test_the_name_of_a_service(service, tool):
    assert tool_name(service) == tool
    assert service_name(tool) == service


@given(st.text(min_size=1))
def test_a_name_stands_for_one_service(text):
    service = text.encode("utf-8", "ignore").decode()
    tool = tool_name(service)
    assert re.fullmatch(r"[A-Za-z0-9_-]*", tool)
    assert service_name(tool) == service


@given(st.text(alphabet="ab.-_0123456789cdef"))
def test_no_service_has_two_names(tool):
    service = service_name(tool)
    assert service is None or tool_name(service) == tool


@pytest.mark.parametrize("tool", ["a.b", "a--zz", "--61", "--ff", "task_result", "é", "-"])
def test_what_is_not_a_name(tool):
    assert service_name(tool) is None
