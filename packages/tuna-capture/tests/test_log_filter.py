"""Lines of a log are taken out of a stream; every other byte passes, at once and in order."""

from __future__ import annotations

import pytest

from tuna_capture.passthrough import LINE_BYTES, LogFilter

MARKERS = (b"onednn_verbose,", b"dnnl_verbose,")
STREAM = (
    b"one\nonednn_verbose,a\ntwo, and onednn_verbose,b,c\nthree"
    b" dnnl\n\0\xff\ndnnl_verbose,d\nonednn_verbos,e\n"
)
OWN = b"one\ntwo, and three dnnl\n\0\xff\nonednn_verbos,e\n"
TAKEN = [b"onednn_verbose,a", b"onednn_verbose,b,c", b"dnnl_verbose,d"]


@pytest.mark.parametrize("size", [1, 2, 7, 30, 1000])
def test_the_stream_is_split_alike_however_it_comes(size: int) -> None:
    taken: list[bytes] = []
    log = LogFilter(MARKERS, taken.append)
    passed = b"".join(
        log.feed(STREAM[place : place + size]) for place in range(0, len(STREAM), size)
    )
    assert (passed + log.close(), taken) == (OWN, TAKEN)


def test_a_prompt_is_shown_though_it_ends_as_a_marker_begins() -> None:
    log = LogFilter(MARKERS, lambda line: None)
    assert log.feed(b"Hello") == b"Hell"
    assert (log.pause(), log.pause()) == (b"o", b"")


def test_half_a_line_waits_and_counts_at_the_end() -> None:
    taken: list[bytes] = []
    log = LogFilter(MARKERS, taken.append)
    assert log.feed(b"x onednn_verbose,half") == b"x "
    assert (log.pause(), taken) == (b"", [])
    assert (log.close(), taken) == (b"", [b"onednn_verbose,half"])


def test_a_line_that_does_not_end_is_passed_on() -> None:
    taken: list[bytes] = []
    log = LogFilter(MARKERS, taken.append)
    endless = b"onednn_verbose," + b"x" * LINE_BYTES
    assert log.feed(endless) + log.feed(b"yz\nend\n") == endless + b"yz\nend\n"
    assert taken == []


def test_without_markers_everything_passes() -> None:
    log = LogFilter((), lambda line: pytest.fail("nothing is taken"))
    assert log.feed(STREAM) + log.close() == STREAM
