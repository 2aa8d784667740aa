"""Text from ids: nothing lost, nothing twice, nothing late; stop strings over token borders."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.frontend.detokenizer import Detokenizer, OutputText, StopStrings

E06_TEXTS = ["A 世a界b", "é", "🌶️👨‍👩‍👧", "ที่", "\ufffd", "ascii only"]


def one_byte(token_id):
    return bytes([token_id])


def run_through(tokens, stops=(), groups=None, pieces=one_byte, keep_stop=False):
    """(the deltas, the stop found, tokens kept), with tokens given in groups of the given sizes."""
    text = OutputText(pieces, StopStrings(stops), keep_stop=keep_stop)
    deltas, kept, rest = [], 0, list(tokens)
    for size in [*(groups or []), *([1] * len(rest))]:
        group, rest = rest[:size], rest[size:]
        if not group:
            continue
        delta = text.feed(group)
        deltas.append(delta.text)
        kept += delta.tokens
        if delta.matched is not None:
            return deltas, delta.matched, kept
    last = text.finish()
    return [*deltas, last.text], last.matched, kept


# ---- characters over tokens (sglang#31598, sglang#34852, llama.cpp#14937, llama.cpp#9195) ----


@pytest.mark.parametrize("text", E06_TEXTS)
def test_every_cut_of_every_script_is_the_bytes_decoded_with_replacement_at_the_end(text):
    data = text.encode()
    for length in range(len(data) + 1):
        deltas, _, _ = run_through(data[:length])
        assert "".join(deltas) == data[:length].decode("utf-8", "replace")


@given(st.binary(max_size=80), st.lists(st.integers(1, 9)))
def test_deltas_joined_are_the_whole_text_for_any_bytes_in_any_grouping(data, groups):
    deltas, _, _ = run_through(data, groups=groups)
    assert "".join(deltas) == data.decode("utf-8", "replace")


@given(st.text(max_size=30))
def test_a_character_comes_with_its_last_byte_and_not_before(text):
    detokenizer = Detokenizer(one_byte)
    for character in text:
        *first, last = character.encode()
        assert [detokenizer.feed(byte) for byte in first] == [""] * len(first)
        assert detokenizer.feed(last) == character
    assert detokenizer.flush() == ""


def test_a_genuine_replacement_character_is_not_taken_for_an_incomplete_one():
    # llama.cpp#11738: text that really holds U+FFFD was held back for ever, at quadratic cost.
    detokenizer = Detokenizer(lambda _: "\ufffd".encode())
    assert [detokenizer.feed(0) for _ in range(2000)] == ["\ufffd"] * 2000


def test_a_lone_continuation_byte_shows_at_once():
    detokenizer = Detokenizer(one_byte)
    assert [detokenizer.feed(byte) for byte in b"a\x80b"] == ["a", "\ufffd", "b"]


# ---- stop strings (vllm#3574, vllm#3672, vllm#8468, vllm#13087) ----

WORDS = [b"ABC", b"DEF", b"G", b"HI", b"J", b"K"]


@pytest.mark.parametrize(
    ("stops", "text", "matched", "kept"),
    [
        (["DEFGHIJ"], "ABC", "DEFGHIJ", 5),
        (["EFG"], "ABCD", "EFG", 3),
        (["J"], "ABCDEFGHI", "J", 5),
        (["HIX", "GH"], "ABCDEF", "GH", 4),
        (["XYZ"], "ABCDEFGHIJK", None, 6),
        (["K"], "ABCDEFGHIJ", "K", 6),
    ],
)
def test_stop_strings_over_token_borders(stops, text, matched, kept):
    deltas, found, tokens = run_through(range(6), stops, pieces=WORDS.__getitem__)
    assert ("".join(deltas), found, tokens) == (text, matched, kept)
    deltas, found, tokens = run_through(range(6), stops, groups=[6], pieces=WORDS.__getitem__)
    assert ("".join(deltas), found, tokens) == (text, matched, kept)


def test_without_a_beginning_of_a_stop_nothing_is_held_back():
    deltas, _, _ = run_through(range(6), ["XYZ"], pieces=WORDS.__getitem__)
    assert deltas == ["ABC", "DEF", "G", "HI", "J", "K", ""]


def test_only_what_may_become_the_stop_is_held_back():
    deltas, _, _ = run_through(range(6), ["FGHX"], pieces=WORDS.__getitem__)
    assert deltas == ["ABC", "DE", "", "FGHI", "J", "K", ""]


def test_a_kept_stop_ends_the_text_even_inside_a_token():
    deltas, matched, kept = run_through(range(6), ["EFGH"], pieces=WORDS.__getitem__, keep_stop=True)
    assert ("".join(deltas), matched, kept) == ("ABCDEFGH", "EFGH", 4)


def test_a_stop_of_several_bytes_cut_inside_its_character():
    deltas, matched, kept = run_through("a世b".encode(), ["世"])
    assert ("".join(deltas), matched, kept) == ("a", "世", 4)


def test_a_stop_may_be_completed_by_the_flush():
    # The replacement of a broken end is text too.
    deltas, matched, _ = run_through(b"ab\xe4", ["b\ufffd"])
    assert ("".join(deltas), matched) == ("a", "b\ufffd")


def oracle(text, stops):
    """The stop completed first, the longest of those completed by one character: (text before it, stop)."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


ab = st.text("ab", min_size=1, max_size=5)


@given(st.text("abc", max_size=40), st.lists(ab, max_size=4), st.lists(st.integers(1, 7)))
def test_stops_equal_a_search_of_the_whole_text(text, stops, groups):
    deltas, matched, _ = run_through(text.encode(), stops, groups=groups)
    assert ("".join(deltas), matched) == oracle(text, stops)


@given(st.text("abc", max_size=30), st.lists(ab, min_size=1, max_size=4))
def test_what_is_held_back_is_the_longest_end_that_begins_a_stop(text, stops):
    output = OutputText(one_byte, StopStrings(stops))
    seen = sent = ""
    for byte in text.encode():
        delta = output.feed([byte])
        seen, sent = seen + chr(byte), sent + delta.text
        if delta.matched:
            break
        ends = [seen[-length:] for length in range(1, len(seen) + 1)]
        held = max((end for end in ends if any(stop.startswith(end) for stop in stops)), key=len, default="")
        assert seen == sent + held
