from zmdp.mdp.broker.core.directory import MAX_ABOUTS, Abouts


def said(found):
    return [(each.text, each.workers) for each in found]


def test_what_several_workers_say_is_kept_once_and_the_most_frequent_comes_first():
    found = Abouts()
    old = found.add(b"echo", b"{1}")
    new = [found.add(b"echo", b"{2}") for _ in range(2)]
    assert new[0] is new[1]
    assert said(found.of(b"echo")) == [(b"{2}", 2), (b"{1}", 1)]
    assert found.of(b"other") == []
    found.remove(b"echo", old)
    found.remove(b"echo", new[0])
    assert said(found.of(b"echo")) == [(b"{2}", 1)]
    found.remove(b"echo", new[0])
    assert found.of(b"echo") == []


def test_a_worker_that_says_nothing_is_not_counted():
    assert Abouts().add(b"echo", b"") is None


def test_a_service_has_few_different_texts():
    found = Abouts()
    kept = [found.add(b"echo", b"{%d}" % number) for number in range(MAX_ABOUTS + 1)]
    assert kept[-1] is None
    assert found.add(b"echo", b"{0}") is kept[0], "what others say already is kept"
    assert found.add(b"other", b"{9}") is not None
    found.remove(b"echo", kept[1])
    assert found.add(b"echo", b"{9}") is not None


def test_all_texts_together_have_a_limit():
    found = Abouts(max_bytes=10)
    first = found.add(b"echo", b"{12345}")
    assert found.add(b"other", b"{12}") is None
    assert found.add(b"other", b"{1}") is not None
    found.remove(b"echo", first)
    assert found.add(b"other", b"{12345}") is not None
