"""What the referee of a soak finds in a ledger: each invariant is broken once."""

import pytest
from faults.fault import GRACE_SECONDS, Fault
from faults.ledger import LedgerReader
from faults.referee import Referee

RIGHT = ("1 sent a-1", "2 executed a-1", "3 right a-1")
AGAIN = (*RIGHT, "2.5 executed a-1")
BROKEN_STREAM = ("1 sent a-1", "2 executed a-1", "3 failed a-1 StreamInterrupted: broken")


def judge(folder, lines, *faults):
    """Return the counts of what is broken, in a ledger with these lines."""
    (folder / "a.ledger").write_text("".join("\t".join([*line.split(" ", 3), ""][:4]) + "\n" for line in lines))
    referee = Referee(folder)
    referee.read()
    verdict = referee.judge([Fault(at, "kill", until, hard) for at, until, hard in faults])
    return {name: verdict.counts[name] for name in ("lost", "failed", "wrong", "twice", "never executed")
            if verdict.counts[name]}  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "broken"),
    [
        (RIGHT, {}),
        (RIGHT[:2], {"lost": 1}),
        (("1 sent a-1", "3 right a-1"), {"never executed": 1}),
        (AGAIN, {"twice": 1}),
        ((*RIGHT, "4 right a-1"), {"wrong": 1}),
        ((*RIGHT[:2], "3 wrong a-1 other"), {"wrong": 1}),
        (("2 executed a-1",), {"wrong": 1}),
        (BROKEN_STREAM, {"failed": 1}),
        (("1 sent a-1", "1 accepted a-1 u", "3 failed a-1 RequestTimeout: late"), {"lost": 1}),
        (("1 sent a-1", "1 accepted a-1 u", "2 closed a-1"), {}),
        (("1 sent a-1", "1 accepted a-1 u", "2 accepted a-1 v", "3 closed a-1"), {"wrong": 1}),
        (("1 sent a-1", "2 executed a-1 x", "3 right a-1 x", "4 seen a-1 x"), {}),
        (("1 sent a-1", "2 executed a-1 x", "3 right a-1 x", "4 seen a-1 y"), {"wrong": 1, "never executed": 1}),
        (("1 sent a-1", "2 executed a-1 x", "3 right a-1 y"), {"never executed": 1}),
        (("1 sent a-1", "3 abandoned a-1"), {}),
    ],
)
def test_without_faults_each_call_is_executed_and_answered_once(lines, broken, tmp_path):
    assert judge(tmp_path, lines) == broken


@pytest.mark.parametrize("lines", [AGAIN, BROKEN_STREAM])
@pytest.mark.parametrize(
    ("fault", "explains"),
    [((1.5, 2.0, True), True), ((1.5, 2.0, False), False), ((5.0, 6.0, True), False), ((0.0, 0.5, True), True)],
)
def test_only_a_hard_fault_during_the_call_explains_a_second_execution_or_an_error(lines, fault, explains, tmp_path):
    assert bool(judge(tmp_path, lines, fault)) != explains


def test_a_fault_explains_what_follows_until_its_consequences_must_be_over(tmp_path):
    assert judge(tmp_path, AGAIN, (-GRACE_SECONDS - 1, -GRACE_SECONDS, True)) == {"twice": 1}


def test_no_fault_explains_a_timeout(tmp_path):
    lines = ("1 sent a-1", "2 executed a-1", "3 failed a-1 RequestTimeout: late")
    assert judge(tmp_path, lines, (1.5, 2.0, True)) == {"failed": 1}


def test_calls_that_go_on_are_not_judged_by_half_of_their_entries(tmp_path):
    (tmp_path / "a.ledger").write_text("2\texecuted\ta-1\t\n3\tright\tb-1\t\n1\texecuted\tc-1\t\n")
    referee = Referee(tmp_path)
    referee.read()
    assert referee.judge([], complete_to=2).broken == ["c-1 was executed, but nobody has sent it"]


def test_entries_are_read_once_and_half_a_line_later(tmp_path):
    path = tmp_path / "a.ledger"
    path.write_text("1\tsent\ta-1\t\n2\texec")
    reader = LedgerReader(tmp_path)
    assert [entry.event for entry in reader.new_entries()] == ["sent"]
    with path.open("a") as file:
        file.write("uted\ta-1\t\n")
    assert [entry.event for entry in reader.new_entries()] == ["executed"]
