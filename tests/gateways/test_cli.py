"""The command `mdp-gateway` itself."""

from support.processes import run


def test_it_prints_its_help():
    ended = run("mdp-gateway", "--help")
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert b"mdp-gateway http" in ended.stdout


def test_an_unknown_command():
    ended = run("mdp-gateway", "smtp")
    assert ended.returncode == 2
    assert b"Error: No such command 'smtp'" in ended.stderr
