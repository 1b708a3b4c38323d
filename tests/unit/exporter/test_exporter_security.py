"""Who is let in: users, tokens, what a check costs, and what a change of the files does."""

from __future__ import annotations

import asyncio
import base64
import statistics
import time

import bcrypt
import pytest

from torchmem.errors import ConfigError
from torchmem_exporter.serving import security
from torchmem_exporter.serving.security import BusyError, Guard, Sources


def hashed(password, cost=4):
    return bcrypt.hashpw(password, bcrypt.gensalt(cost)).decode()


def basic(user, password):
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.fixture
def users(tmp_path):
    """A web-config file with two users."""
    path = tmp_path / "web.yml"
    path.write_text(f"basic_auth_users:\n  alice: {hashed(b'wonder:land')}\n  bøb: {hashed(b'x' * 72)}\n")
    return path


@pytest.fixture
def tokens(tmp_path):
    """A file with two tokens."""
    path = tmp_path / "tokens"
    path.write_text("first-token\n\n second-token= \r\n")
    return path


@pytest.fixture
def make_guard():
    guards = []

    def make(web_config=None, bearer_token_file=None, exposed_host=None):
        guards.append(Guard(Sources(web_config, bearer_token_file, exposed_host)))
        return guards[-1]

    yield make
    for guard in guards:
        guard.close()


def allowed(guard, *authorizations):
    async def ask():
        return [await guard.allows(authorization) for authorization in authorizations]

    return asyncio.run(ask())


def test_without_users_and_tokens_everybody_is_let_in(make_guard):
    """A sidecar on loopback could not be used without a password."""
    assert allowed(make_guard(), "", "Basic x", "Bearer y") == [True, True, True]


def test_users(make_guard, users):
    """Somebody without the password would be let in, or somebody with it kept out."""
    guard = make_guard(users)
    right = basic("alice", "wonder:land"), basic("bøb", "x" * 72), basic("bøb", "x" * 90), "basic" + right_tail(users)
    wrong = (
        "",
        "Basic",
        "Basic !!!",
        "Basic YWxpY2U=",
        basic("alice", ""),
        basic("alice", "wonder:lanD"),
        basic("alice", "wonder:land\0"),
        basic("Alice", "wonder:land"),
        basic("bøb", "wonder:land"),
        basic("", ""),
        basic("mallory", "wonder:land"),
        basic("mallory", "x" * 72),
        "Basic " + base64.b64encode(b"\xff\xfe:a").decode(),
        "Bearer first-token",
        basic("alice", "wonder:land") + ", " + basic("alice", "wonder:land"),
        "Digest username=alice",
    )
    assert allowed(guard, *right) == [True] * len(right)
    assert allowed(guard, *wrong) == [False] * len(wrong)
    assert guard.counts.num_rejected == len(wrong)
    assert guard.challenges() == (("WWW-Authenticate", 'Basic realm="torchmem-exporter", charset="UTF-8"'),)


def right_tail(_users):
    return basic("alice", "wonder:land").removeprefix("Basic")


def test_tokens(make_guard, tokens):
    """A token would be refused while another is being brought in, or a part of one be enough."""
    guard = make_guard(None, tokens)
    assert allowed(guard, "Bearer first-token", "bearer second-token=", "Bearer  first-token") == [True] * 3
    wrong = ("", "Bearer", "Bearer first", "Bearer first-token\nsecond-token=", "Bearer é", "Basic Zmlyc3QtdG9rZW46")
    assert allowed(guard, *wrong) == [False] * len(wrong)
    assert guard.challenges() == (("WWW-Authenticate", 'Bearer realm="torchmem-exporter"'),)


def test_users_and_tokens_are_two_ways_in(make_guard, users, tokens):
    """Whoever changes from one to the other could not do so step by step."""
    guard = make_guard(users, tokens)
    assert allowed(guard, basic("alice", "wonder:land"), "Bearer first-token", "Bearer no") == [True, True, False]
    assert len(guard.challenges()) == 2


def test_a_right_password_is_checked_once(make_guard, users):
    """Each scrape would cost a bcrypt check of a tenth of a second."""
    guard = make_guard(users)

    async def scrapes():
        first = asyncio.gather(*(guard.allows(basic("alice", "wonder:land")) for _ in range(50)))
        return await first + [await guard.allows(basic("alice", "wonder:land")) for _ in range(50)]

    assert asyncio.run(scrapes()) == [True] * 100
    assert guard.counts.num_password_checks == 1


def test_what_is_remembered_is_bounded_and_no_password(make_guard, users, monkeypatch):
    """Passwords could be read from the memory, or the memory would grow."""
    monkeypatch.setattr(security, "NUM_CACHED", 3)
    guard = make_guard(users)
    assert allowed(guard, *(basic("bøb", "x" * 72 + "y" * i) for i in range(6))) == [True] * 6
    assert len(guard._known) == 3
    assert not [key for key in guard._known if b"x" in key and len(key) != 32]


def test_too_many_passwords_to_check_are_turned_away(make_guard, users, monkeypatch):
    """A flood of wrong passwords would pile up work for hours."""
    monkeypatch.setattr(security, "MAX_WAITING", 2)
    guard = make_guard(users)

    async def flood():
        return await asyncio.gather(*(guard.allows(basic("alice", str(i))) for i in range(5)), return_exceptions=True)

    outcomes = asyncio.run(flood())
    assert (outcomes.count(False), sum(isinstance(outcome, BusyError) for outcome in outcomes)) == (2, 3)
    assert allowed(guard, basic("alice", "wonder:land")) == [True]


def test_unknown_users_take_as_long_as_known_ones(make_guard, tmp_path):
    """The time of an answer would tell which users there are."""
    path = tmp_path / "web.yml"
    path.write_text(f"basic_auth_users:\n  alice: {hashed(b'a', 8)}\n  bob: {hashed(b'b', 8)}\n")
    guard = make_guard(path)
    seconds = {"alice": [], "mallory": []}
    for i in range(15):
        for user, taken in seconds.items():
            began = time.process_time()  # of this process's own: others use the machine too
            assert allowed(guard, basic(user, f"wrong{i}")) == [False]
            taken.append(time.process_time() - began)
    known, unknown = (statistics.median(taken) for taken in seconds.values())
    assert guard.counts.num_password_checks == 30
    assert 0.5 < unknown / known < 2


def test_an_unknown_user_costs_what_one_of_the_others_does(make_guard, tmp_path):
    """Where costs differ, the time would tell unknown users from those with another cost."""
    path = tmp_path / "web.yml"
    path.write_text(f"basic_auth_users:\n  alice: {hashed(b'a', 4)}\n  bob: {hashed(b'b', 6)}\n")
    guard = make_guard(path)
    picks = [guard._pick(f"user{i}", 2) for i in range(200)]
    assert picks == [guard._pick(f"user{i}", 2) for i in range(200)]
    assert 50 < sum(picks) < 150


def replace(path, text):
    """Puts another file in its place, as one should."""
    other = path.with_name("new")
    other.write_text(text)
    other.rename(path)


def test_changes_are_followed(make_guard, users, tokens):
    """A password or token that leaked would stay valid until a restart."""
    guard = make_guard(users, tokens)
    assert allowed(guard, basic("alice", "wonder:land"), "Bearer first-token") == [True, True]
    replace(users, f"basic_auth_users: {{alice: {hashed(b'new')}}}\n")
    replace(tokens, "third\n")
    asked = basic("alice", "wonder:land"), basic("alice", "new"), "Bearer first-token", "Bearer third"
    assert allowed(guard, *asked) == [False, True, False, True]
    assert guard.num_reload_failures == 0


@pytest.mark.parametrize(
    "text",
    ["", "basic_auth_users: {}\n", "basic_auth_users: [\n", "{}", "tls_server_config: {cert_file: a, key_file: b}\n"],
)
def test_a_broken_change_leaves_everything_as_it_was(make_guard, users, text, caplog):
    """A file caught half-written would open the door, or shut everybody out."""
    guard = make_guard(users)
    replace(users, text)
    for _ in range(3):
        assert allowed(guard, "", basic("alice", "wonder:land")) == [False, True]
    assert guard.num_reload_failures == 1
    assert caplog.text.count("what was in force stays") == 1
    replace(users, f"basic_auth_users: {{alice: {hashed(b'new')}}}\n")
    assert allowed(guard, "", basic("alice", "wonder:land"), basic("alice", "new")) == [False, False, True]


@pytest.mark.parametrize("text", ["", "\n\n", "two words\n", "tökën\n", "a\0b\n"])
def test_token_files_without_good_tokens_are_refused(make_guard, tokens, text):
    """An empty line would be a valid token, or nobody could get in."""
    replace(tokens, text)
    with pytest.raises(ConfigError, match="bearer token file"):
        make_guard(None, tokens)


def test_a_missing_token_file_is_one_line(make_guard, tmp_path):
    """A mistyped path would end in a traceback, or in no protection."""
    with pytest.raises(ConfigError, match=r"No such file.*--bearer-token-file"):
        make_guard(None, tmp_path / "nowhere")


@pytest.mark.parametrize(("has_users", "has_tokens"), [(False, False), (True, False), (False, True), (True, True)])
def test_an_exposed_address_needs_tls_too(make_guard, users, tokens, has_users, has_tokens):
    """Passwords and figures would cross a network in plain text."""
    with pytest.raises(ConfigError, match=r"no TLS|neither TLS nor"):
        make_guard(users if has_users else None, tokens if has_tokens else None, "10.0.0.1")
