"""The access file: what it may say, and what is said of everything that is wrong with it."""

import os

import pytest

from zmdp.mdp.errors import SettingError
from zmdp.mdp.security.access import Permissions, digest_of, load, new_token
from zmdp.mdp.security.keys import create_keys
from zmdp.mdp.service_limits import Limit, ServiceLimits

UNLISTED = "0123456789012345678901234567890123456789"
"""A key that nobody has."""


@pytest.fixture
def folder(tmp_path):
    for name in ("broker", "shop", "web"):
        create_keys(name, tmp_path)
    return tmp_path


def write(folder, text, own='secret_key = "broker.key_secret"\n'):
    path = folder / "access.toml"
    path.write_text(own + text)
    return path


def refused(path):
    with pytest.raises(SettingError) as raised:
        load(path)
    assert str(path) in str(raised.value)
    return str(raised.value)


def key(folder, name):
    return next(
        line.split('"')[1] for line in (folder / f"{name}.key").read_text().splitlines() if "public-key" in line
    )


def test_roles_have_keys_permissions_and_limits(folder):
    path = write(
        folder,
        f"""
        [roles.shop]
        keys = ["shop.key", "{UNLISTED}"]
        call = ["*"]
        offer = ["resize", "spark.*"]
        mmi = "none"
        on_behalf = true
        link = true
        outstanding = 1000
        queued_requests = 500
        request_bytes = 50_000_000
        connections = 20

        [roles.web]
        keys = []
        """,
    )
    access = load(path)
    assert access.roles["shop"] == Permissions(
        "shop", ("*",), ("resize", "spark.*"), "none", False, True, True, 1000, 500, 50_000_000, 20
    )
    assert access.roles["web"] == Permissions("web", (), (), "service", False, False, False, None, None, None, None)
    assert access.keys == {key(folder, "shop").encode(): "shop", UNLISTED.encode(): "shop"}
    assert access.keys_of("shop") == ["shop.key", UNLISTED]
    assert access.public_key == key(folder, "broker").encode()
    assert access.secret_key.decode() in (folder / "broker.key_secret").read_text()
    assert access.secret_key.decode() not in repr(access)


def test_files_of_keys_are_relative_to_the_access_file(folder, tmp_path, monkeypatch):
    (folder / "keys").mkdir()
    os.rename(folder / "shop.key", folder / "keys" / "shop.key")
    monkeypatch.chdir("/")
    access = load(write(folder, '[roles.a]\nkeys = ["keys/shop.key"]'))
    assert list(access.keys.values()) == ["a"]


def test_patterns_match_whole_names_case_sensitively():
    role = Permissions("r", call=("resize", "spark.*", "v?"), offer=("*",))
    assert role.may_call(b"resize")
    assert role.may_call(b"spark.sql")
    assert role.may_call("vä".encode())
    assert not any(map(role.may_call, (b"Resize", b"resizer", b"spark", b"v10", b"")))
    assert role.may_offer("größe".encode())
    assert role.may_offer(b"\xff")


def test_no_pattern_matches_what_the_broker_itself_offers():
    role = Permissions("r", call=("*",), offer=("*",))
    assert not role.may_call(b"mmi.service")
    assert not role.may_offer(b"mmi.service")
    assert role.may_call(b"mmi")


def test_an_admin_may_ask_the_broker_everything():
    assert Permissions("r", admin=True, mmi="none").mmi == "all"


def test_a_key_loses_its_role_if_it_is_gone_or_has_another_one(folder):
    before = load(write(folder, '[roles.a]\nkeys = ["shop.key"]\n[roles.b]\nkeys = ["web.key"]\n[roles.c]\nkeys = []'))
    same = load(write(folder, '[roles.a]\nkeys = ["shop.key"]\n[roles.b]\nkeys = ["web.key"]\ncall = ["x"]'))
    gone = load(write(folder, '[roles.a]\nkeys = []\n[roles.b]\nkeys = ["web.key"]'))
    moved = load(write(folder, '[roles.a]\nkeys = ["shop.key", "web.key"]\n[roles.b]'))
    web = next(key for key, role in before.keys.items() if role == "b")
    shop = next(key for key, role in before.keys.items() if role == "a")
    assert before.lost_in(same) == set()
    assert before.lost_in(gone) == {shop}
    assert before.lost_in(moved) == {web}
    assert gone.lost_in(before) == set()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[roles.shop]\ncalls = []", "role shop: Object contains unknown field `calls` ('calls': did you mean call?)"),
        ("[role.shop]\n", "access.toml: Object contains unknown field `role` ('role': did you mean roles?)"),
        ("[roles.a.b]\n", "role a: Object contains unknown field `b`"),
        ("[roles.'a b']\n", "'a b' cannot be the name of a role: use up to 64 letters"),
        (f"[roles.{'a' * 65}]\n", "cannot be the name of a role"),
        ("roles = 3", "access.toml: Expected `object`, got `int` - at `$.roles`"),
        ("[roles]\nshop = 3", "role shop: Expected `object`, got `int`"),
        ("[roles.shop]\nkeys = 'shop.key'", "role shop: Expected `array`, got `str` - at `$.keys`"),
        ("[roles.shop]\nkeys = [3]", "role shop: Expected `str`, got `int` - at `$.keys[0]`"),
        ("[roles.shop]\nkeys = ['sho.key']", "role shop: key 'sho.key': cannot find the file"),
        ('[roles.shop]\nkeys = ["a\\u0000b"]', "cannot find the file"),
        ("[roles.shop]\nkeys = ['']", "role shop: key ''"),
        ("[roles.shop]\nkeys = ['rq:rM>']", "nor is this a public key (40 characters of Z85)"),
        (f"[roles.shop]\nkeys = ['{'#' * 40}']", "nor is this a public key (40 characters of Z85)"),
        (f"[roles.shop]\nkeys = ['{'~' * 40}']", "nor is this a public key (40 characters of Z85)"),
        ("[roles.shop]\nkeys = ['access.toml']", "is not a certificate file: it has no public-key"),
        ("[roles.shop]\nkeys = ['noise']", "is not a certificate file: it has no public-key"),
        ("[roles.shop]\nkeys = ['.']", "role shop: key '.': cannot read"),
        ("[roles.shop]\nkeys = ['shop.key_secret']", "contains a secret key: use the public certificate,"),
        ("[roles.shop]\nkeys = ['shop.key', './shop.key']", "key './shop.key': it is listed twice (as 'shop.key')"),
        (
            "[roles.a]\nkeys = ['shop.key']\n[roles.b]\nkeys = ['shop.key']",
            "role b: key 'shop.key': it has role a",
        ),
        ("[roles.shop]\ncall = '*'", "role shop: Expected `array`, got `str` - at `$.call`"),
        ("[roles.shop]\ncall = ['']", "role shop: Expected `str` of length >= 1 - at `$.call[0]`"),
        ("[roles.shop]\ncall = ['mmi.*']", "role shop: 'mmi.*': patterns do not apply to mmi.*: use the setting mmi"),
        ("[roles.shop]\noffer = ['mmi.x']", "role shop: 'mmi.x': patterns do not apply to mmi.*"),
        ("[roles.shop]\nmmi = 'some'", "role shop: Invalid enum value 'some' - at `$.mmi`"),
        ("[roles.shop]\nmmi = []", "role shop: Expected `str`, got `array` - at `$.mmi`"),
        ("[roles.shop]\nadmin = 1", "role shop: Expected `bool`, got `int` - at `$.admin`"),
        ("[roles.shop]\non_behalf = 'yes'", "role shop: Expected `bool`, got `str` - at `$.on_behalf`"),
        ("[roles.shop]\nlink = 1", "role shop: Expected `bool`, got `int` - at `$.link`"),
        ("[roles.shop]\nconnections = 0", "role shop: Expected `int` >= 1 - at `$.connections`"),
        ("[roles.shop]\nrequest_bytes = 1.5", "role shop: Expected `int | null`, got `float` - at `$.request_bytes`"),
        ("[roles.shop]\noutstanding = true", "role shop: Expected `int | null`, got `bool` - at `$.outstanding`"),
        ("[roles.shop", "is not valid TOML"),
        (f"[roles.shop]\nkeys = {'[' * 10_000}", "is not valid TOML"),
        (f"[roles.shop]\nconnections = {'9' * 10_000}", "is not valid TOML"),
    ],
)
def test_what_is_wrong_with_a_role(folder, text, expected):
    (folder / "noise").write_bytes(b"\xff\xfe\npublic-key\n")
    assert expected in refused(write(folder, text))


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ("", "access.toml: Object missing required field `secret_key`"),
        ("secret_key = 3\n", "access.toml: Expected `str`, got `int` - at `$.secret_key`"),
        ("secret_key = 'nothing'\n", "nothing: No such file or directory"),
        ('secret_key = "a\\u0000b"\n', "is not a certificate file"),
        ("secret_key = 'broker.key'\n", "broker.key is a public certificate, which has no secret key: use"),
        (
            "secretkey = 'broker.key'\n",
            "access.toml: Object contains unknown field `secretkey`",
        ),
    ],
)
def test_what_is_wrong_with_the_brokers_own_key(folder, own, expected):
    assert expected in refused(write(folder, "", own))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o666])
def test_a_secret_that_others_have_access_to_is_refused(folder, mode):
    secret = folder / "broker.key_secret"
    secret.chmod(mode)
    assert f"mode 0{mode:o}): chmod 600 {secret}" in refused(write(folder, ""))
    secret.chmod(0o400)
    assert load(write(folder, ""))


def test_a_damaged_certificate_is_reported_without_its_content(folder):
    secret = folder / "broker.key_secret"
    secret.write_text(secret.read_text().replace('secret-key = "', 'secret-key = "xyzzy'))
    text = refused(write(folder, ""))
    assert "is damaged: a key has 40 characters of Z85" in text
    assert "xyzzy" not in text


def test_a_missing_file_and_one_that_is_not_text(tmp_path):
    assert "No such file or directory: mdp-keys allow creates it" in refused(tmp_path / "access.toml")
    (tmp_path / "access.toml").write_bytes(b"\xff")
    assert "is not text" in refused(tmp_path / "access.toml")
    assert "Is a directory" in refused(tmp_path)


def test_tokens_have_a_role_and_are_kept_as_digests(folder):
    token, digest = new_token()
    access = load(write(folder, f"[roles.shop]\ntokens = ['{digest}']\n[roles.web]"))
    assert access.tokens == {digest_of(token.encode()): "shop"}
    assert token not in repr(access)
    assert access.roles["shop"] == Permissions("shop")


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ("'zmdp_secret'", "role shop: tokens: a text without sha256:: expected sha256: and 64 hexadecimal digits"),
        ("'sha256:abc'", "role shop: tokens: sha256:abc: expected sha256: and 64 hexadecimal digits"),
        (f"'sha256:{'0' * 64}', 'sha256:{'0' * 64}'", "role shop: token sha256:00000000… is listed twice"),
        ("5", "role shop: Expected `str`, got `int` - at `$.tokens[0]`"),
    ],
)
def test_what_is_wrong_with_tokens(folder, tokens, expected):
    told = refused(write(folder, f"[roles.shop]\ntokens = [{tokens}]"))
    assert expected in told
    assert "secret'" not in told


def test_a_token_has_one_role(folder):
    both = f"[roles.a]\ntokens = ['sha256:{'1' * 64}']\n[roles.b]\ntokens = ['sha256:{'1' * 64}']"
    assert "role b: token sha256:11111111… is listed in role a already" in refused(write(folder, both))


def test_keys_that_the_program_added_are_still_there_when_the_file_is_read_again(folder):
    path = write(folder, "[roles.shop]\nkeys = ['shop.key']")
    access = load(path).adding({UNLISTED.encode(): Permissions("(own)", admin=True)})
    path.write_text('secret_key = "broker.key_secret"\n[roles.web]\nkeys = ["web.key"]')
    again = access.read_again()
    assert set(again.roles) == {"web", "(own)"}
    assert again.keys == {key(folder, "web").encode(): "web", UNLISTED.encode(): "(own)"}
    assert again.keys_of("(own)") == [UNLISTED]
    assert UNLISTED.encode() not in access.lost_in(again)


def test_limits_of_services_are_by_pattern(folder):
    text = """
[limits."openai.*"]
concurrency = 4
rate = "200/min"
[limits."openai.*".per_group]
concurrency = 1
"""
    assert load(write(folder, text)).limits == {"openai.*": ServiceLimits(Limit(4, "200/min"), Limit(1))}


def test_what_is_wrong_with_a_limit_says_where(folder):
    said = refused(write(folder, '[limits."openai.*"]\nrate = 5\n'))
    assert "limits of 'openai.*': rate is 5" in said
