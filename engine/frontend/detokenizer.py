"""The text of one growing sequence: ids in, text out, each character once and as soon as it is certain.

A token is a few bytes; characters may be cut anywhere between tokens. `Detokenizer` holds back only the bytes of a
character that is not complete yet. `OutputText` also looks for stop strings over token borders and holds back only
the longest end of the text that may still become one. Both take time linear in the text. What is sent is never
taken back: the pieces given out, joined, are the text of all ids, whatever way the ids were grouped.

    ids ...  ->  bytes  ->  characters  ->  | sent | held: may become a stop | undecoded bytes of a character |
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

Pieces = Callable[[int], bytes]
"""The bytes that a token id stands for; empty for an id that shows nothing."""


class Detokenizer:
    """Incremental UTF-8 of one sequence. Bytes that are no character give U+FFFD, as soon as that is certain."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """The characters that this token completes; may be empty."""
        return self._decoder.decode(self._pieces(token_id))

    def flush(self) -> str:
        """The end of the sequence: U+FFFD if it stops inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Finds the first of several strings in a text read character by character (Aho and Corasick, 1975).

    Immutable, so that all sequences of a request share it; where a sequence stands is a plain state number,
    0 at the start. The depth of a state is how much of the text's end may still become a stop string.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self._depth = [0]
        self._found: list[str] = [""]
        for string in strings:
            assert string, "an empty stop string ends every text; refuse it at the door"
            self._add(string)
        self._link()

    def __bool__(self) -> bool:
        return len(self._next) > 1

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)

    def held(self, state: int) -> int:
        """How many characters at the end of the text are the beginning of a stop string."""
        return self._depth[state]

    def found(self, state: int) -> str:
        """The longest stop string that ends here, or an empty text."""
        return self._found[state]

    def _add(self, string: str) -> None:
        state = 0
        for character in string:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self._depth.append(self._depth[state] + 1)
                self._found.append("")
            state = self._next[state][character]
        self._found[state] = string

    def _link(self) -> None:
        """Point each state at the longest shorter one that the same text may be in; breadth first."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                self._fallback[child] = self.step(self._fallback[state], character)
                self._found[child] = self._found[child] or self._found[self._fallback[child]]
                queue.append(child)


NO_STOPS = StopStrings(())


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What some tokens add to a text."""

    text: str
    """Certain now: may be sent."""
    matched: str | None = None
    """The stop string that ends the sequence here."""
    tokens: int = 0
    """How many of the tokens given belong to the sequence: all, or those up to the one that completed the stop."""


class OutputText:
    """The text of one sequence as its client may see it.

    The stop that counts is the one completed first; of those completed by the same character, the longest. It is
    cut off unless `keep_stop`; the text ends with it in both cases, even in the middle of a token.
    """

    def __init__(self, pieces: Pieces, stops: StopStrings = NO_STOPS, *, keep_stop: bool = False) -> None:
        self._detokenizer = Detokenizer(pieces)
        self._stops = stops
        self._keep_stop = keep_stop
        self._state = 0
        self._held = ""

    def feed(self, token_ids: Iterable[int]) -> TextDelta:
        """Add tokens. Must not be called again once a stop string has matched."""
        sent: list[str] = []
        count = 0
        for count, token_id in enumerate(token_ids, 1):
            text, matched = self._pass(self._detokenizer.feed(token_id))
            sent.append(text)
            if matched is not None:
                return TextDelta("".join(sent), matched, count)
        return TextDelta("".join(sent), None, count)

    def finish(self) -> TextDelta:
        """The sequence has ended: give out what was held back."""
        text, matched = self._pass(self._detokenizer.flush())
        if matched is None:
            text, self._held = text + self._held, ""
        return TextDelta(text, matched)

    def _pass(self, text: str) -> tuple[str, str | None]:
        """Let new characters through the stop strings: (what may be sent now, the stop found)."""
        if not self._stops:
            return text, None
        for position, character in enumerate(text):
            self._state = self._stops.step(self._state, character)
            matched = self._stops.found(self._state)
            if matched:
                whole = self._held + text[: position + 1]
                self._held = ""
                return (whole if self._keep_stop else whole[: len(whole) - len(matched)]), matched
        whole = self._held + text
        border = len(whole) - (0 if self._keep_stop else self._stops.held(self._state))
        self._held = whole[border:]
        return whole[:border], None
