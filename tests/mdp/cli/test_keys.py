"""The command mdp-keys, and how mdp-broker uses and shows what it writes."""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import tomllib

import pytest
import zmq
from click.testing import CliRunner
from support.processes import BIN, TIMEOUT_MS, broker, run

from zmdp.mdp.cli import access_file
from zmdp.mdp.cli import keys as command
from zmdp.mdp.errors import SettingError
from zmdp.mdp.security.access import load
from zmdp.mdp.security.certificates import read_certificate
from zmdp.mdp.security.keys import load_keys

KEYS = (sys.executable, "-m", "zmdp.mdp.cli.keys")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MDP_ACCESS", raising=False)
    return tmp_path


def keys(*arguments):
    """Run mdp-keys; return what it printed, and on stderr."""
    result = CliRunner().invoke(command.cli, arguments, standalone_mode=False)
    if result.exception:
        raise result.exception
    return result.stdout, result.stderr


def public(name):
    return read_certificate(name)[0].decode()


@pytest.fixture
def access(folder):
    keys("new", "shop")
    keys("new", "web")
    keys("allow", "shop", "shop.key", "--call", "*", "--access", "access.toml")
    return folder / "access.toml"


def test_new_writes_a_pair_and_prints_the_names_of_the_files(folder):
    out, err = keys("new", "shop", "--dir", str(folder))
    assert out == f"{folder}/shop.key\n{folder}/shop.key_secret\n"
    assert "stays with the program (--key)" in err
    with pytest.raises(SettingError, match="exists, and keys are not overwritten"):
        keys("new", "shop")


@pytest.mark.parametrize("name", ["../shop", "", "a b", "/shop", "é"])
def test_new_takes_only_plain_names(folder, name):
    with pytest.raises(SettingError, match="cannot be the name of a key"):
        keys("new", name)
    assert list(folder.iterdir()) == []


def test_show_prints_the_public_key_but_never_the_secret(folder):
    keys("new", "shop")
    _, secret = read_certificate(folder / "shop.key_secret")
    for file in ("shop.key", "shop.key_secret"):
        out, err = keys("show", file)
        assert out.splitlines() == [public(folder / "shop.key")]
        assert secret.decode() not in out + err


def test_the_first_allow_creates_the_file_and_the_brokers_key(access):
    assert stat.S_IMODE((access.parent / "broker.key_secret").stat().st_mode) == 0o600
    rules = load(access)
    assert rules.public_key.decode() == public(access.parent / "broker.key")
    assert rules.keys_of("shop") == ["shop.key"]
    assert rules.roles["shop"].call == ("*",)


def test_allow_uses_the_brokers_key_if_there_is_one(folder):
    keys("new", "broker")
    before = public(folder / "broker.key")
    keys("new", "shop")
    keys("allow", "shop", "shop.key", "--access", "access.toml")
    assert load("access.toml").public_key.decode() == before


def test_allow_adds_keys_and_patterns_and_replaces_other_permissions(access):
    keys("allow", "shop", "web.key", "--call", "a", "--offer", "b.*", "--mmi", "all", "--access", "access.toml")
    keys("allow", "shop", "--on-behalf", "--connections", "7", "--request-bytes", "8", "--access", "access.toml")
    keys("allow", "shop", "web.key", "--call", "a", "--mmi", "none", "--connections", "9", "--access", "access.toml")
    role = load(access).roles["shop"]
    assert load(access).keys_of("shop") == ["shop.key", "web.key"]
    assert (role.call, role.offer, role.mmi, role.on_behalf) == (("*", "a"), ("b.*",), "none", True)
    assert (role.connections, role.request_bytes, role.outstanding) == (9, 8, None)
    keys("allow", "shop", "--no-on-behalf", "--admin", "--link", "--access", "access.toml")
    role = load(access).roles["shop"]
    assert (role.on_behalf, role.admin, role.mmi, role.link) == (False, True, "all", True)
    keys("allow", "shop", "--no-link", "--access", "access.toml")
    assert not load(access).roles["shop"].link


@pytest.mark.parametrize(("permission", "warned"), [("--on-behalf", True), ("--admin", False), ("--mmi=all", False)])
def test_allow_warns_of_a_role_that_may_do_nothing(access, permission, warned):
    _, err = keys("allow", "ops", permission, "--access", "access.toml")
    assert ("role ops may neither call nor offer any service yet: add --call or --offer" in err) == warned


@pytest.mark.parametrize(
    ("permissions", "told"),
    [
        (["--admin"], "offer nothing; admin\n"),
        (["--mmi", "all", "--on-behalf", "--call", "a"], "may call a, and offer nothing; mmi all, on behalf\n"),
        (["--link", "--offer", "*"], "may call nothing, and offer *; link\n"),
        (["--mmi", "none", "--call", "a"], "may call a, and offer nothing; mmi none\n"),
        (["--call", "a"], "may call a, and offer nothing\n"),
    ],
)
def test_allow_tells_everything_that_the_role_may_do(access, permissions, told):
    _, err = keys("allow", "ops", *permissions, "--access", "access.toml")
    assert told in err


def test_allow_takes_a_key_itself_and_keeps_files_relative_to_the_access_file(access, monkeypatch):
    folder = access.parent
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    stranger = zmq.curve_keypair()[0].decode()
    keys("allow", "web", "../web.key", "--access", str(access), "--", stranger)
    assert load(access).keys_of("web") == ["web.key", stranger]


def test_comments_and_layout_survive(access):
    text = access.read_text() + "# the end\n"
    text = text.replace("[roles.shop]", "# who buys\n[roles.shop]  # since 2026")
    text = text.replace('keys = ["shop.key"]', 'keys = [\n  "shop.key",  # the first\n]')
    access.write_text(text)
    keys("allow", "shop", "web.key", "--access", "access.toml")
    for comment in ("# who buys", "# since 2026", "# the first", "# the end"):
        assert comment in access.read_text()
    keys("revoke", "web.key", "--access", "access.toml")
    assert load(access).keys_of("shop") == ["shop.key"]
    for comment in ("# who buys", "# since 2026", "# the first", "# the end"):
        assert comment in access.read_text()


def test_a_file_from_windows_can_be_edited(access):
    access.write_bytes(b"\xef\xbb\xbf# f\xc3\xbcr uns\r\n" + access.read_bytes().replace(b"\n", b"\r\n"))
    keys("allow", "shop", "web.key", "--access", "access.toml")
    assert load(access).keys_of("shop") == ["shop.key", "web.key"]
    assert "# für uns" in access.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("allow", "web", "shop.key"), "it has role shop"),
        (("allow", "web", "web.key_secret"), r"contains a secret key: use the public certificate, web\.key"),
        (("allow", "web", "none.key"), r"cannot find the file none\.key, nor is this a public key"),
        (("allow", "a b", "web.key"), "'a b' cannot be the name of a role"),
        (("allow", "web", "web.key", "--call", "mmi.*"), r"patterns do not apply to mmi\.\*"),
        (("allow", "web", "web.key", "--mmi", "some"), "'some' is not one of"),
        (("allow", "web", "web.key", "--connections", "0"), "expected a whole number of connections"),
        (("allow", "web"), "nothing to allow: name a KEY, or a permission such as --call"),
        (("revoke", "web.key"), r"has no key 'web\.key': mdp-keys ls lists its keys"),
        (("token", "shpo"), r"has no role 'shpo': did you mean shop\? \(mdp-keys allow adds a role\)"),
        (("token", "ops"), r"has no role 'ops': known are shop \(mdp-keys allow adds a role\)"),
    ],
)
def test_what_is_wrong_changes_nothing(access, arguments, expected):
    before = access.read_bytes()
    with pytest.raises(Exception, match=expected):
        keys(*arguments, "--access", "access.toml")
    assert access.read_bytes() == before
    assert [path.name for path in access.parent.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("text", ["roles = 3", "[roles]\nshop = 3", "[roles.shop]\nkeys = 3", "[roles.shop", "\0"])
def test_an_invalid_file_is_not_edited(access, text):
    access.write_text(text)
    for arguments in (("allow", "web", "web.key"), ("revoke", "shop.key"), ("token", "shop")):
        with pytest.raises(SettingError):
            keys(*arguments, "--access", "access.toml")
    assert access.read_text() == text


@pytest.mark.parametrize(
    "command",
    [
        "mdp-keys new shop",
        "mdp-keys allow shop --call a --access access.toml",
        "mdp-gateway token shop --access access.toml",
    ],
)
def test_on_a_full_disk_nothing_is_left_of_what_cannot_be_written(folder, command):
    limited = subprocess.run(["sh", "-c", f"ulimit -f 0; exec {BIN}/{command}"], capture_output=True, check=False)
    assert limited.returncode == 2
    assert b": File too large\n" in limited.stderr
    assert list(folder.iterdir()) == []
    assert run(*command.split()).returncode == 0


def test_a_token_needs_an_access_file_with_its_role(folder):
    with pytest.raises(SettingError, match=r"cannot read .*access\.toml: No such file .*: mdp-keys allow creates it"):
        keys("token", "shop", "--access", "access.toml")
    assert list(folder.iterdir()) == []
    keys("new", "broker")
    (folder / "access.toml").write_text('secret_key = "broker.key_secret"\n')
    with pytest.raises(SettingError, match=r"has no role 'shop': it has none \(mdp-keys allow adds a role\)"):
        keys("token", "shop", "--access", "access.toml")


def test_a_failed_write_leaves_the_file_as_it_was(access, monkeypatch):
    before = access.read_bytes()

    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(access_file.os, "replace", fails)
    with pytest.raises(SettingError, match=r"cannot write access\.toml: No space left on device"):
        keys("allow", "web", "web.key", "--access", "access.toml")
    assert access.read_bytes() == before
    assert [path.name for path in access.parent.iterdir() if path.name.startswith(".")] == []


def test_an_edit_keeps_the_permissions_and_follows_a_link(access):
    real = access.parent / "real.toml"
    access.rename(real)
    access.symlink_to(real)
    real.chmod(0o640)
    keys("allow", "web", "web.key", "--access", "access.toml")
    assert access.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert load(access).keys_of("web") == ["web.key"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_an_access_file_stays_that_of_its_owner_and_group(access):
    os.chown(access, 4711, 4712)
    access.chmod(0o640)
    keys("allow", "shop", "web.key", "--access", "access.toml")
    found = access.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (4711, 4712, 0o640)


def test_edits_at_the_same_time_are_all_kept(access):
    strangers = [zmq.curve_keypair()[0].decode() for _ in range(8)]
    threads = [
        threading.Thread(target=access_file.allow, args=(access, f"role{number}", [key], {}))
        for number, key in enumerate(strangers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.encode() for key in strangers} < set(load(access).keys)


@pytest.mark.parametrize("name", ["shop.key", "shop", "./shop.key", "the key itself"])
def test_revoke_takes_a_file_its_name_or_the_key(access, name):
    key = public(access.parent / "shop.key") if name == "the key itself" else name
    _, err = keys("revoke", "--access", "access.toml", "--", key)
    assert "revoked shop.key, which had the role shop" in err
    assert load(access).keys == {}
    assert load(access).roles["shop"].call == ("*",)


def test_revoke_finds_a_key_by_its_file_although_the_access_file_has_the_key_itself(access):
    key = public(access.parent / "web.key")
    keys("allow", "web", "--access", "access.toml", "--", key)
    keys("revoke", "web.key", "--access", "access.toml")
    assert load(access).keys_of("web") == []


def test_a_key_whose_file_is_gone_can_be_revoked(access):
    (access.parent / "shop.key").unlink()
    keys("revoke", "shop.key", "--access", "access.toml")
    assert load(access).keys == {}


def test_revoke_does_not_guess_between_keys_of_the_same_name(access):
    for name in ("a", "b"):
        (access.parent / name).mkdir()
        keys("new", "same", "--dir", name)
        keys("allow", "web", f"{name}/same.key", "--access", "access.toml")
    with pytest.raises(SettingError, match=r"has several keys 'same': choose one of a/same\.key, b/same\.key"):
        keys("revoke", "same", "--access", "access.toml")


def test_ls_lists_the_keys_with_their_roles(access):
    key = public(access.parent / "shop.key")
    assert keys("ls", "--access", "access.toml")[0] == f"shop  shop.key  {key}\n"
    (row,) = json.loads(keys("ls", "--json", "--access", "access.toml")[0])
    assert row == {"role": "shop", "name": "shop.key", "public_key": key}


def test_the_access_file_can_be_in_the_environment(access, monkeypatch):
    monkeypatch.setenv("MDP_ACCESS", "access.toml")
    assert "shop.key" in keys("ls")[0]


@pytest.mark.parametrize("arguments", [("allow", "shop", "web.key"), ("revoke", "shop.key")])
def test_it_says_how_a_running_broker_learns_of_it(access, arguments):
    _, err = keys(*arguments, "--access", "access.toml")
    assert "a broker that runs with --access access.toml reads it again on SIGHUP: kill -HUP PID" in err


def test_errors_are_one_line(folder):
    done = subprocess.run([*KEYS, "show", "none.key"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "mdp-keys: cannot read none.key: No such file or directory\n"


# ── mdp-broker ───────────────────────────────────────────────────────────────────────────────────────────────────────


def check(*options):
    done = run("mdp-broker", "--check", *options)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_check_prints_who_may_do_what(access):
    keys("allow", "shop", "--connections", "3", "--offer", "spark.*", "--link", "--access", "access.toml")
    code, out, err = check("--access", str(access))
    assert (code, err) == (0, "")
    rows = {line[2:12].strip(): line[12:].strip() for line in out.splitlines() if line.startswith("  ")}
    assert rows["may call"] == "*"
    assert rows["may offer"] == "spark.*"
    assert rows["limits"] == "3 connections"
    assert (rows["on behalf"], rows["link"], rows["tokens"]) == ("no", "yes", "none")
    keys("token", "shop", "--access", "access.toml")
    (digest,) = tomllib.loads(access.read_text())["roles"]["shop"]["tokens"]
    _, out, _ = check("--access", str(access))
    assert f"  tokens     {digest[:15]}…\n" in out
    keys("revoke", "shop.key", "--access", "access.toml")
    assert "  keys       none\n" in check("--access", str(access))[1]
    keys("allow", "empty", "--call", "a", "--access", "access.toml")
    assert "  keys       none: nobody has this role\n" in check("--access", str(access))[1]
    keys("allow", "shop", "shop.key", "--access", "access.toml")
    code, out, _ = check("--json", "--access", str(access))
    assert code == 0
    assert json.loads(out)["roles"]["shop"]["tokens"] == [digest]
    assert json.loads(out)["roles"]["shop"]["keys"] == ["shop.key"]
    assert json.loads(out)["roles"]["shop"]["connections"] == 3
    assert json.loads(out)["roles"]["shop"]["link"] is True
    secret = load(access).secret_key.decode()
    assert secret not in out


def test_check_says_what_is_wrong(access):
    access.write_text(access.read_text().replace("call", "calls"))
    code, out, err = check("--access", str(access))
    message = f"{access}, role shop: Object contains unknown field `calls` ('calls': did you mean call?)"
    assert (code, out, err) == (2, "", f"mdp-broker: {message}\n"), "as without --check"
    _, _, err = check("--access", str(access), "--log-format", "json")
    assert json.loads(err)["message"] == message


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--check",), "--check requires --access"),
        (("--json",), "--json requires --check"),
        (("--ipc-mode", "8"), "expected permissions as three octal digits, such as '660', got '8'"),
        (("--access", "none.toml"), "cannot read none.toml: No such file or directory: mdp-keys allow"),
    ],
)
def test_options_that_cannot_be(folder, options, expected):
    done = run("mdp-broker", *options)
    assert done.returncode == 2
    assert expected in done.stderr.decode()


def test_a_number_in_the_settings_file_is_not_taken_for_octal(folder):
    (folder / "broker.toml").write_text("ipc-mode = 600\n")
    done = run("mdp-broker", "--config", "broker.toml")
    assert done.returncode == 2
    assert b"broker.toml: Expected `str`, got `int` - at `$.ipc-mode`" in done.stderr


def test_an_address_that_others_reach_is_refused_in_one_line_that_names_both_ways_out():
    done = run("mdp-broker", "--bind", "tcp://*:*")
    assert (done.returncode, done.stdout) == (1, b"")
    (line,) = done.stderr.decode().splitlines()
    assert "--access FILE" in line
    assert "--insecure" in line


def test_from_nothing_to_a_revoked_key(access):
    """The real programs: a key is admitted, revoked, and refused after SIGHUP."""
    shop = load_keys("shop.key_secret", "broker.key")
    with broker("--access", str(access)) as (process, endpoint), zmq.Context() as context:
        assert load(access).public_key.decode() in process.line("access control by")
        with context.socket(zmq.DEALER) as client:
            client.linger, client.rcvtimeo = 0, TIMEOUT_MS
            shop.apply(client)
            client.connect(endpoint)
            client.send_multipart([b"MDPC02", b"\x01", b"mmi.service", b"echo"])
            assert client.recv_multipart()[-1] == b"404"
        keys("revoke", "shop.key", "--access", "access.toml")
        process.send_signal(signal.SIGHUP)
        process.line("reloaded ")
        with context.socket(zmq.DEALER) as client:
            client.linger = 0
            shop.apply(client)
            client.connect(endpoint)
            process.line(f"unknown key {shop.public.decode()}")
        assert process.end() == 0


def test_without_an_access_file_a_hangup_is_ignored():
    with broker("--insecure", bind="tcp://0.0.0.0:*") as (process, _):
        process.line("--insecure: whoever can connect may do everything")
        process.line("ready on")
        process.send_signal(signal.SIGHUP)
        process.line("nothing to reload")
        assert process.end() == 0


def test_the_permissions_of_ipc_sockets(tmp_path):
    with broker("--ipc-mode", "660", bind=f"ipc://{tmp_path}/broker") as (process, endpoint):
        assert stat.S_IMODE(os.stat(endpoint.removeprefix("ipc://")).st_mode) == 0o660
        assert process.end() == 0
