"""The gate before torch's store: clients with the secret pass through it unchanged, all others are refused."""

import contextlib
import os
import secrets
import socket
import ssl
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import certificates
import pytest
from command import finish, start, until, write
from harness import free_port
from torch.distributed import TCPStore

from echelon.base import auth_proxy, job_secret, network, proxy_loop
from echelon.base.auth_proxy import AuthProxy, AuthTunnel, WrongSecret, local_store_endpoint, serve_store
from echelon.base.environment import PS_CA, PS_CERT, PS_CLIENT_CA, PS_KEY
from echelon.base.errors import PeerLost

TOKEN = b"a secret of ours"
LIMIT = timedelta(seconds=20)


@pytest.fixture
def quick(monkeypatch):
    """Patience of half a second in place of ten."""
    for module in (job_secret, proxy_loop, auth_proxy):
        monkeypatch.setattr(module, "PATIENCE", 0.5)


@pytest.fixture(autouse=True)
def _no_tunnels_left():
    yield
    for target in list(auth_proxy._tunnels):
        auth_proxy._tunnels.pop(target).door.close()


def served(token=TOKEN):
    """A store at an address under which it is not known to be our own, so that we go the way of another host."""
    store, port = serve_store("0.0.0.0", 0, token, LIMIT)
    return store, port


def reached(port, token=TOKEN):
    return TCPStore(
        *local_store_endpoint("127.0.0.1", port, token), is_master=False, wait_for_workers=False, timeout=LIMIT
    )


class Behind:
    """A server behind a gate in place of a store: ``answer`` gets each connection that was let through."""

    def __init__(self, answer=lambda connection: None):
        self.listener, self.let_in = network.listen("127.0.0.1", 0), []
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._serve, args=(answer,), daemon=True).start()

    def _serve(self, answer):
        with contextlib.suppress(OSError):
            while True:
                self.let_in.append(self.listener.accept()[0])
                answer(self.let_in[-1])

    def close(self):
        self.listener.close()
        for connection in self.let_in:
            connection.close()


@pytest.fixture
def guarded():
    """Makes a gate before ``Behind``, and a tunnel to the gate; both and where the gate is."""
    with contextlib.ExitStack() as opened:

        def make(answer=lambda connection: None):
            behind = Behind(answer)
            door = AuthProxy(network.listen("127.0.0.1", 0), behind.port, TOKEN).door
            tunnel = AuthTunnel("127.0.0.1", door.port, TOKEN).door
            for thing in (behind, door, tunnel):
                opened.callback(thing.close)
            return behind, door, tunnel

        yield make


def test_first_caller_of_a_gate_gets_through(monkeypatch):
    """On a busy host the first caller has proven the secret before the gate's constructor has returned."""
    behind, heard = Behind(lambda connection: connection.sendall(b"here")), []

    def opened(listener, receive, at_most):
        door = proxy_loop.ProxyListener(listener, receive, at_most)
        with socket.create_connection(("127.0.0.1", door.port), timeout=10) as caller:
            job_secret.prove(caller, TOKEN)
            heard.append(caller.recv(4))
        return door

    monkeypatch.setattr(auth_proxy, "ProxyListener", opened)
    gate = AuthProxy(network.listen("127.0.0.1", 0), behind.port, TOKEN)
    assert heard == [b"here"]
    gate.door.close()
    behind.close()


def call(port):
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def ended(connection):
    """Return True if the other end hangs up or resets; its output before is discarded."""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while connection.recv(65536):
            pass
    return True


def test_sixty_four_ranks_share_a_store_through_the_gate():
    store, port = served()
    large = secrets.token_bytes(1 << 17)
    stores = [reached(port) for _ in range(64)]  # all at once would take torch 5 s, with the gate or without

    def rank(number):
        own = stores[number]
        own.set(f"from-{number}", large[number:])
        own.wait([f"from-{63 - number}"])
        return own.get(f"from-{63 - number}") == large[63 - number :] and own.add("sum", number)

    with ThreadPoolExecutor(64) as pool:
        assert all(isinstance(found, int) for found in pool.map(rank, range(64)))
    assert store.add("sum", 0) == sum(range(64))
    assert len(auth_proxy._tunnels) == 1


HOSTILE = {
    "nothing": b"",
    "one byte": b"e",
    "noise": secrets.token_bytes(4096),
    "torch's own greeting": b"\x00\x9d\x0c\x5f\x3c\x0d\x00\x00\x00\x00",
    "TLS": bytes.fromhex("16030100c8010000c40303") + secrets.token_bytes(194),
    "HTTP": b"GET / HTTP/1.1\r\nHost: a\r\nConnection: keep-alive\r\n\r\n",
    "our greeting, then zeros": job_secret.GREETING + bytes(32) + bytes(32),
    "our greeting, then noise": job_secret.GREETING + secrets.token_bytes(1 << 20),
}


def test_no_byte_of_a_stranger_goes_through_while_others_work(guarded, request):
    """Strangers send and wait, hang up at once, send without end, or send a byte now and then."""
    store, port = served()
    ours = reached(port)
    request.getfixturevalue("quick")
    behind, door, _ = guarded()
    for target in (door.port, port):
        callers = [call(target) for _ in HOSTILE]
        for caller, words in zip(callers, HOSTILE.values(), strict=True):
            with contextlib.suppress(OSError):
                caller.sendall(words)
            with call(target) as hasty, contextlib.suppress(OSError):
                hasty.sendall(words)
            assert ours.add("works", 1)
        flood, drip = call(target), call(target)
        with pytest.raises(OSError), flood:  # noqa: PT011, PT012
            while True:
                flood.sendall(bytes(1 << 20))
        with pytest.raises(OSError), drip:  # noqa: PT011, PT012
            for _ in range(1000):
                drip.sendall(b"e")
                time.sleep(0.05)
        assert all(ended(caller) for caller in callers)
        for caller in callers:
            caller.close()
    assert behind.let_in == []
    assert store.add("works", 0) == 2 * len(HOSTILE)


def test_gate_many_strangers_are_bounded_and_do_not_block_ours(monkeypatch):
    """They have all the patience in the world, and the gate its usual ten seconds."""
    monkeypatch.setattr(auth_proxy, "UNPROVEN", 8)
    store, port = served()
    crowd = [call(port) for _ in range(50)]
    ours = reached(port)
    assert ours.add("works", 1) == 1
    crowd += [call(port) for _ in range(50)]
    assert [TCPStore.add(reached(port), "works", 1) for _ in range(3)] == [2, 3, 4]
    assert ours.add("works", 1) == 5
    assert all(ended(stranger) for stranger in crowd[: 100 - 8])
    for stranger in crowd:
        stranger.close()
    assert store.check(["works"])


def test_what_was_overheard_opens_nothing(guarded):
    behind, door, _ = guarded()
    heard = []

    class Tapped(socket.socket):
        def sendall(self, data):
            heard.append(bytes(data))
            super().sendall(data)

    with Tapped() as ours:
        ours.connect(("127.0.0.1", door.port))
        job_secret.prove(ours, TOKEN)
        until(lambda: len(behind.let_in) == 1, "the caller who knows the secret")
    with call(door.port) as replay:
        replay.sendall(b"".join(heard))
        assert ended(replay)
    with call(door.port) as mirror:  # what the gate answers is no answer to the gate
        mirror.sendall(heard[0])
        mirror.sendall(mirror.recv(40, socket.MSG_WAITALL)[8:])
        assert mirror.recv(64, socket.MSG_WAITALL) == bytes(32)  # a wrong proof gets nothing to try guesses on
        assert ended(mirror)
    assert TOKEN not in b"".join(heard)
    assert len(behind.let_in) == 1


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("side", [job_secret.admit, job_secret.prove])
def test_a_byte_now_and_then_delays_no_other_connection(side):
    ours, theirs = socket.socketpair()

    def drip():
        with contextlib.suppress(OSError), theirs:
            for byte in job_secret.GREETING + bytes(60):
                time.sleep(0.05)
                theirs.sendall(bytes([byte]))

    dripping = threading.Thread(target=drip)
    dripping.start()
    with ours, pytest.raises(job_secret.HandshakeError, match="timed out"):
        side(ours, TOKEN)
    dripping.join()


def test_another_secret_is_told_in_one_line():
    _, port = served()
    with pytest.raises(WrongSecret) as told:
        local_store_endpoint("127.0.0.1", port, b"another")
    assert str(told.value) == (
        f"the job at 127.0.0.1:{port} does not know this secret; ECHELON_TOKEN must be the same on every host"
    )
    assert "another" not in str(told.value)


def test_a_launcher_with_another_secret_is_told_so_and_ends(tmp_path):
    write(tmp_path / "any.py", "")
    ours = TOKEN.decode()
    where = f"127.0.0.1:{free_port()}"
    words = ["--nnodes", 2, "--procs", 1, "--master", where, "any.py"]
    first = start("run", "--node-rank", 0, *words, cwd=tmp_path, ECHELON_TOKEN=ours)
    words = ["run", "--node-rank", 1, *words]
    other = finish(start(*words, cwd=tmp_path, ECHELON_TOKEN="theirs, not ours"))
    assert (other.code, other.err) == (
        2,
        f"echelon: the job at {where} does not know this secret; ECHELON_TOKEN must be the same on every host\n",
    )
    right = start(*words, cwd=tmp_path, ECHELON_TOKEN=ours)
    ends = finish(right), finish(first)
    assert [(end.code, end.err) for end in ends] == [(0, ""), (0, "")]


@pytest.mark.usefixtures("quick")
def test_what_is_no_gate_is_told_in_one_line():
    _, port = serve_store("127.0.0.1", 0, None, LIMIT)
    with pytest.raises(PeerLost, match=f"the program at 127.0.0.1:{port} does not authenticate"):
        local_store_endpoint("127.0.0.1", port, TOKEN)
    with network.listen("127.0.0.1", 0) as listener:
        gone = listener.getsockname()[1]
    with pytest.raises(PeerLost, match=f"the launcher at 127.0.0.1:{gone} cannot be reached"):
        local_store_endpoint("127.0.0.1", gone, TOKEN)


def test_who_has_said_all_still_hears_the_answer(guarded):
    """Ending one direction goes through gate and tunnel, and so does all that is under way then."""

    def backwards(connection):
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
        connection.sendall(b"".join(parts)[::-1])
        connection.shutdown(socket.SHUT_WR)

    _, _, tunnel = guarded(backwards)
    words = secrets.token_bytes(8 << 20)
    with call(tunnel.port) as ours:
        ours.sendall(words)
        ours.shutdown(socket.SHUT_WR)
        found = b""
        while part := ours.recv(1 << 20):
            found += part
    assert found == words[::-1]
    until(lambda: tunnel.idle, "the end of the pipe")


@pytest.mark.parametrize("who", ["caller", "store"])
def test_when_one_side_vanishes_the_other_is_told(guarded, who):
    behind, door, tunnel = guarded()
    ours = call(tunnel.port)
    ours.sendall(b"words")
    until(lambda: len(behind.let_in) == 1, "the connection")
    theirs = behind.let_in[0]
    assert theirs.recv(5) == b"words"
    gone, left = (ours, theirs) if who == "caller" else (theirs, ours)
    gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, as of a process that died
    gone.close()
    with left:
        left.settimeout(20)
        assert ended(left)
    until(lambda: tunnel.idle and door.idle, "the end of the pipe")


def test_gate_ends_with_its_store_and_old_tunnels_with_the_next():
    """The gate ends with its store, and tunnels to an ended gate are closed when the next one is opened."""
    store, port = served()
    ours = reached(port)
    assert ours.add("here", 1) == 1
    del store, ours
    until(lambda: not network.answers("127.0.0.1", port, 1.0), "the end of the gate")
    old = auth_proxy._tunnels["127.0.0.1", port].door
    until(lambda: old.idle, "the end of the connections")
    _store, second = served()
    assert reached(second).add("here", 1) == 1
    assert list(auth_proxy._tunnels) == [("127.0.0.1", second)]
    until(lambda: not network.answers("127.0.0.1", old.port, 1.0), "the end of the old tunnel")


def test_the_serving_host_needs_no_tunnel():
    store, port = serve_store("127.0.0.1", 0, TOKEN, LIMIT)
    ours = reached(port)
    store.set("said", "here")
    assert ours.get("said") == b"here"
    assert auth_proxy._tunnels == {}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_another_user_of_this_host_finds_the_tunnel_shut(guarded):
    behind, _, tunnel = guarded()
    program = f"exec 3<>/dev/tcp/127.0.0.1/{tunnel.port}; head -c 1 <&3 | wc -c"
    theirs = subprocess.run(["bash", "-c", program], user=65534, capture_output=True, check=True, cwd="/")
    assert theirs.stdout.strip() == b"0"
    assert behind.let_in == []
    with call(tunnel.port):
        until(lambda: len(behind.let_in) == 1, "our own connection")


class TestWithCertificates:
    @pytest.fixture(autouse=True)
    def _files(self, tmp_path, monkeypatch):
        pem = certificates.write(tmp_path)
        self.files = {
            PS_CERT: pem / "member.pem",
            PS_KEY: pem / "member.key",
            PS_CA: pem / "authority.pem",
            PS_CLIENT_CA: pem / "authority.pem",
        }
        self.pem, self.monkeypatch = pem, monkeypatch
        for name, path in self.files.items():
            monkeypatch.setenv(name, str(path))

    def test_the_store_is_reached_by_tls_and_no_word_is_readable(self, guarded):
        store, port = served()
        ours = reached(port)
        ours.set("large", bytes(1 << 20))
        assert store.get("large") == bytes(1 << 20)
        with call(port) as plain, pytest.raises(job_secret.HandshakeError):
            job_secret.prove(plain, TOKEN)
        # what goes between tunnel and gate, overheard by a relay
        behind, door, _ = guarded()
        heard, relay = [], network.listen("127.0.0.1", 0)
        overheard = AuthTunnel("127.0.0.1", relay.getsockname()[1], TOKEN).door

        def pass_on():
            near, far = relay.accept()[0], call(door.port)
            with near, far:
                threading.Thread(target=_copy, args=(far, near, heard)).start()
                _copy(near, far, heard)

        passing = threading.Thread(target=pass_on)
        passing.start()
        with call(overheard.port) as mine:
            mine.sendall(b"in plain words")
            until(lambda: len(behind.let_in) == 1, "the connection")
            assert behind.let_in[0].recv(14, socket.MSG_WAITALL) == b"in plain words"
        passing.join()
        overheard.close()
        relay.close()
        assert len(b"".join(heard)) > 500
        assert b"plain words" not in b"".join(heard)
        assert job_secret.GREETING not in b"".join(heard)

    def test_a_certificate_of_another_job_is_not_trusted(self):
        _, port = served()
        self.monkeypatch.setenv(PS_CA, str(self.pem / "stranger.pem"))
        with pytest.raises(PeerLost, match=r"cannot be reached: .*certificate verify failed"):
            local_store_endpoint("127.0.0.1", port, TOKEN)

    def test_proof_relayed_to_another_connection_is_refused(self, guarded):
        """Somebody in between with a certificate of the same authority, but without the secret."""
        behind, door, _ = guarded()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.pem / "outsider.pem", self.pem / "outsider.key")
        both = self.pem / "both.pem"
        both.write_text("".join((self.pem / f"{name}.pem").read_text() for name in ("authority", "stranger")))
        self.monkeypatch.setenv(PS_CA, str(both))
        relay = network.listen("127.0.0.1", 0)

        def pass_on():
            client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
            client.load_cert_chain(self.files[PS_CERT], self.files[PS_KEY])
            with (
                contextlib.suppress(OSError),
                context.wrap_socket(relay.accept()[0], server_side=True) as victim,
                client.wrap_socket(call(door.port)) as called,
            ):
                for _ in range(2):
                    called.sendall(victim.recv(4096))
                    victim.sendall(called.recv(4096))

        passing = threading.Thread(target=pass_on)
        passing.start()
        with pytest.raises(WrongSecret):
            local_store_endpoint("127.0.0.1", relay.getsockname()[1], TOKEN)
        passing.join()
        relay.close()
        assert behind.let_in == []


def _copy(source, sink, heard):
    with contextlib.suppress(OSError):
        while part := source.recv(65536):
            heard.append(part)
            sink.sendall(part)
        sink.shutdown(socket.SHUT_WR)
