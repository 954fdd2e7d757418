"""Certificate files and the keys of clients."""

import os
import stat
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from zmdp.mdp.errors import SettingError
from zmdp.mdp.security.certificates import is_key, read_certificate, read_secret
from zmdp.mdp.security.keys import create_keys, load_keys


@pytest.fixture
def folder(tmp_path):
    for name in ("broker", "shop"):
        create_keys(name, tmp_path)
    return tmp_path


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_nobody_else_may_read_the_secret_file(tmp_path, umask):
    before = os.umask(umask)
    try:
        public, secret = create_keys("shop", tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(public.stat().st_mode) == 0o666 & ~umask
    assert b"secret-key" not in public.read_bytes()


@pytest.mark.parametrize("existing", ["shop.key", "shop.key_secret"])
def test_keys_are_not_overwritten(tmp_path, existing):
    (tmp_path / existing).write_text("precious")
    with pytest.raises(SettingError, match="exists, and keys are not overwritten"):
        create_keys("shop", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [existing]
    assert (tmp_path / existing).read_text() == "precious"


def test_a_link_to_nowhere_is_not_followed(tmp_path):
    (tmp_path / "shop.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SettingError, match=r"shop\.key exists"):
        create_keys("shop", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["shop.key"]  # nor does the secret file stay


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(SettingError, match=r"cannot write keys to .*/none: No such file"):
        create_keys("shop", tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "right"),
    [("0" * 40, True), ("0" * 39, False), ("0" * 41, False), ("#" * 40, False), ("~" * 40, False), ("é" * 40, False)],
)
def test_what_is_a_key(text, right):
    assert is_key(text) is right


def test_the_brokers_key_is_a_file_or_the_key_itself(folder):
    public = read_certificate(folder / "broker.key")[0]
    by_file = load_keys(folder / "shop.key_secret", folder / "broker.key")
    assert by_file == load_keys(str(folder / "shop.key_secret"), public.decode())
    assert by_file.server == public
    assert by_file.public == read_certificate(folder / "shop.key")[0]
    assert by_file.secret.decode() not in repr(by_file)


def test_without_keys_there_are_none():
    assert load_keys(None, None) is None
    assert load_keys("", "") is None


@pytest.mark.parametrize(
    ("own", "brokers", "expected"),
    [
        ("shop.key_secret", None, "of no use without the broker's public key: add --broker-key"),
        (None, "broker.key", "of no use without a key of one's own: add --key"),
        ("shop.key", "broker.key", "shop.key is a public certificate, which has no secret key: use .*shop.key_secret"),
        ("shop.key_secret", "broker.key_secret", "contains a secret key: use the public certificate, .*broker.key"),
        ("none.key_secret", "broker.key", "cannot read .*none.key_secret: No such file"),
        ("shop.key_secret", "none.key", "cannot find the file .*none.key, nor is this a public key"),
    ],
)
def test_keys_that_cannot_be_used(folder, own, brokers, expected):
    with pytest.raises(SettingError, match=expected):
        load_keys(own and folder / own, brokers and folder / brokers)


def test_a_secret_file_that_others_may_read_is_refused(folder):
    (folder / "shop.key_secret").chmod(0o644)
    with pytest.raises(SettingError, match=r"other users have access to it \(mode 0644\): chmod 600"):
        load_keys(folder / "shop.key_secret", folder / "broker.key")


def test_halves_of_different_pairs_are_refused(folder):
    mixed = folder / "shop.key_secret"
    own, other = read_certificate(folder / "shop.key")[0], read_certificate(folder / "broker.key")[0]
    mixed.write_bytes(mixed.read_bytes().replace(own, other))
    with pytest.raises(SettingError, match="its public key does not belong to its secret key"):
        load_keys(mixed, folder / "broker.key")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize(("mode", "accepted"), [(0o440, True), (0o640, True), (0o660, False), (0o444, False)])
def test_the_group_may_read_a_secret_of_root_that_a_container_mounts(mode, accepted):
    with TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        _, secret = create_keys("shop", Path(name))
        os.chown(secret, 0, os.getegid())
        secret.chmod(mode)
        os.seteuid(65534)
        try:
            if accepted:
                assert read_secret(secret)
            else:
                with pytest.raises(SettingError, match="other users have access to it"):
                    read_secret(secret)
        finally:
            os.seteuid(0)


@pytest.mark.parametrize("text", ["{secret}", 'curve\n    secret-key = "{secret}"'])
def test_an_error_never_shows_a_key_that_was_given_instead_of_a_file(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    create_keys("shop", tmp_path)
    secret = read_secret(tmp_path / "shop.key_secret")[1].decode()
    for arguments in ((text.format(secret=secret), "shop.key"), ("shop.key_secret", text.format(secret=secret) + "\n")):
        with pytest.raises(SettingError) as error:
            load_keys(*arguments)
        assert secret not in str(error.value)
