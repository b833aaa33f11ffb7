"""Access control: tokens, TLS and certificates, against real servers; refused clients get one line at once."""

from __future__ import annotations

import hmac
from pathlib import Path

import certificates
import numpy as np
import pytest
from counting_server import Counting, rows_of

from echelon.base.errors import EchelonError, UsageError
from echelon.base.security import OPEN, Security, is_loopback
from echelon.parameter_server.protocol.channel import HeartbeatSender, ServerChannel
from echelon.parameter_server.protocol.message import WireMessage
from echelon.parameter_server.server.server_port import ServerPort

IDS = np.array([1, 5, 1008, 77], np.int64)


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates.write(tmp_path_factory.mktemp("pem"))


def settings(pem: Path, **names: str) -> Security:
    return Security(**{name: value if name == "token" else pem / value for name, value in names.items()})


MEMBER = {"certificate": "member.pem", "key": "member.key"}
OUTSIDER = {"certificate": "outsider.pem", "key": "outsider.key"}
TRUSTS = {"authority": "authority.pem"}
MUTUAL = {**MEMBER, "client_authority": "authority.pem"}

WELCOME = {
    "a token": ({"token": "a"}, {"token": "a"}),
    "TLS": (MEMBER, TRUSTS),
    "TLS and a token": ({**MEMBER, "token": "a"}, {**TRUSTS, "token": "a"}),
    "both with certificates": (MUTUAL, {**MEMBER, **TRUSTS}),
    "both with certificates and a token": ({**MUTUAL, "token": "a"}, {**MEMBER, **TRUSTS, "token": "a"}),
}
REFUSED = {
    "another token": ({"token": "a"}, {"token": "b"}, "does not take this process's token; set ECHELON_PS_TOKEN"),
    "a token where there is none": ({}, {"token": "a"}, "does not take this process's token; set ECHELON_PS_TOKEN"),
    "no token": ({"token": "a"}, {}, "does not take this process's token; set ECHELON_PS_TOKEN"),
    "no token but TLS": ({**MEMBER, "token": "a"}, TRUSTS, "does not take this process's token"),
    "a stranger's authority": (MEMBER, {"authority": "stranger.pem"}, r"stranger.pem has not signed \(.*\); set "),
    "no TLS": (MEMBER, {}, "speaks TLS; set ECHELON_PS_CA"),
    "TLS where there is none": ({}, TRUSTS, "does not speak TLS"),
    "no certificate": (MUTUAL, TRUSTS, "accepts only clients with a certificate it trusts"),
    "an outsider's certificate": (MUTUAL, {**OUTSIDER, **TRUSTS}, "accepts only clients with a certificate it trusts"),
    "a token but no certificate": ({**MUTUAL, "token": "a"}, {**TRUSTS, "token": "a"}, "accepts only clients"),
}


@pytest.mark.parametrize("case", WELCOME)
def test_clients_of_the_job_get_in(case: str, pem: Path):
    theirs, ours = (settings(pem, **names) for names in WELCOME[case])
    server = ServerPort("127.0.0.1:0", Counting().handle, theirs)
    link = ServerChannel(server.endpoint, security=ours)
    np.testing.assert_array_equal(link.call(WireMessage({"op": "pull"}, [IDS])).arrays[0], rows_of(IDS))
    link.close()
    assert server.close(patience=10)


@pytest.mark.parametrize("case", REFUSED)
def test_refused_link_is_told_why_in_one_line_without_waiting(case: str, pem: Path):
    """A client that does not belong to the job is told why in one line, without waiting."""
    theirs, ours, line = REFUSED[case]
    calls = []
    server = ServerPort(
        "127.0.0.1:0", lambda frame, gone: calls.append(frame) or WireMessage({}), settings(pem, **theirs)
    )
    link = ServerChannel(server.endpoint, security=settings(pem, **ours), timeout=10_000, name="server 3")
    with pytest.raises(EchelonError, match=rf"^server 3 at {server.endpoint} .*{line}") as caught:
        link.call(WireMessage({"op": "pull"}, [IDS]))
    assert "\n" not in str(caught.value)
    beats = HeartbeatSender([server.endpoint], 0, settings(pem, **ours), every=0.01)
    beats.close()
    link.close()
    assert not calls
    assert server.close(patience=10)


def test_a_server_for_the_network_must_know_who_calls(pem: Path):
    for host in ("0.0.0.0", "10.1.2.3", "[::]", "some.host"):
        for weak in (OPEN, settings(pem, **MEMBER)):
            with pytest.raises(
                UsageError,
                match=r"^a server on .* can be reached from other hosts without authentication; set ECHELON_PS_TOKEN",
            ):
                ServerPort(f"{host}:0", Counting().handle, weak)
    for strong in ({"token": "a"}, MUTUAL):
        server = ServerPort("0.0.0.0:0", Counting().handle, settings(pem, **strong))
        assert server.close()
    assert all(is_loopback(host) for host in ("localhost", "127.0.0.1", "127.9.9.9", "[::1]"))


def test_settings_come_from_the_environment(tmp_path: Path, pem: Path):
    secret = tmp_path / "secret"
    secret.write_text("from a file of ours\n")
    names = {"ECHELON_PS_CERT": "member.pem", "ECHELON_PS_KEY": "member.key", "ECHELON_PS_CA": "authority.pem"}
    env = {name: str(pem / file) for name, file in names.items()} | {"ECHELON_PS_TOKEN_FILE": str(secret)}
    assert Security.from_environment(env) == settings(pem, token="from a file of ours", **MEMBER, **TRUSTS)
    nearer, given = "nearer than the file", "given on the command line"
    assert Security.from_environment({**env, "ECHELON_PS_TOKEN": nearer}).token == nearer
    assert Security.from_environment({**env, "ECHELON_PS_TOKEN": nearer}, token=given).token == given
    assert Security.from_environment({}) == OPEN


def test_servers_token_is_made_from_job_secret_unless_own_is_set(tmp_path: Path):
    """The servers' token is made from the secret of the job unless they have one of their own."""
    (tmp_path / "theirs").write_text("of the servers alone\n")
    (tmp_path / "all").write_text("of the whole job\n")
    made = Security.from_environment({"ECHELON_TOKEN": "of the whole job"}).token
    assert made == hmac.new(b"of the whole job", b"parameter servers", "sha256").hexdigest()
    of_job = {"ECHELON_TOKEN_FILE": str(tmp_path / "all")}
    assert Security.from_environment(of_job).token == made
    own = "the servers' own token"
    assert Security.from_environment({**of_job, "ECHELON_PS_TOKEN": own}).token == own
    own_file = {**of_job, "ECHELON_PS_TOKEN_FILE": str(tmp_path / "theirs")}
    assert Security.from_environment(own_file).token == "of the servers alone"
    with pytest.raises(UsageError, match="ECHELON_TOKEN must be printable ASCII"):
        Security.from_environment({"ECHELON_TOKEN": "two\nlines"})


def test_mistakes_in_settings_are_one_line(tmp_path: Path, pem: Path):
    wrong = {
        "set both": {"ECHELON_PS_CERT": "x"},
        "has no certificate itself": {"ECHELON_PS_CLIENT_CA": "x"},
        "printable": {"ECHELON_PS_TOKEN": "a line\nand another"},
        "^ECHELON_PS_TOKEN has 15 characters and could be guessed; set one of 16": {"ECHELON_PS_TOKEN": "a" * 15},
        "^ECHELON_TOKEN has 1 characters and could be guessed": {"ECHELON_TOKEN": "a"},
        "cannot be read": {"ECHELON_PS_TOKEN_FILE": str(tmp_path / "none")},
    }
    for line, env in wrong.items():
        with pytest.raises(UsageError, match=line):
            Security.from_environment(env)
    missing = Security(certificate=tmp_path / "none", key=tmp_path / "none")
    with pytest.raises(UsageError, match=r"^'.*none' and '.*none' cannot be used for TLS"):
        ServerPort("127.0.0.1:0", Counting().handle, missing)
    (tmp_path / "bad").write_text("no certificate")
    with pytest.raises(UsageError, match="cannot be used for TLS"):
        ServerPort("127.0.0.1:0", Counting().handle, Security(certificate=tmp_path / "bad", key=tmp_path / "bad"))


def test_a_token_does_not_show():
    assert "secret" not in repr(Security(token="secret"))
