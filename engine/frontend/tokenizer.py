"""Text to ids and ids to bytes, for one model. Built from its `tokenizer.json` or from a GGUF file's metadata.

The tokenizer is complete when built and never changed after, so any number of threads may use it at once (a fast
tokenizer whose padding or truncation is set per call fails with "Already borrowed" under load). Files are
untrusted data: what they ask for and is not known here is refused by name. Special tokens written out in a text
are read as those tokens, in user content too, as `transformers` does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from engine.frontend.template import ChatTemplate
from engine.model.source import ModelSource


class TokenizerError(ValueError):
    """The model's tokenizer cannot be built. The text is one line that names what is not known and what is allowed."""


_CONTROL, _USER_DEFINED = 3, 4
"""GGUF token types: tokens that never come from plain text, and plain ones that are always matched whole."""
_GGUF_NAMES: Final = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_SPECIAL_NAMES: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_SPLITS: Final[dict[str, str | None]] = {
    # The vocabulary was trained with each digit split off first. That differs from the plain byte-level split only
    # where two or more spaces or line ends precede a digit; there `transformers` keeps the plain split, and so do we.
    "smollm": None,
    "gpt-2": None,
    "llama-bpe": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
}
"""GGUF's name of a pre-tokeniser -> the pattern that cuts a text into words; None is byte-level BPE's own."""


class Tokenizer:
    """One model's tokenizer. Thread-safe: nothing in it changes once it is built.

    A model may come without one (random weights for a bare `config.json`): then ids have no text, and a text has
    no ids, which `encode` says.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer | None,
        *,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
    ) -> None:
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self._pieces: dict[int, bytes] = {}
        self._special_ids: frozenset[int] = frozenset()
        self._bos_id: int | None = None
        if backend is not None:
            # A file may ask for truncation, which would shorten prompts in silence.
            backend.no_truncation()
            backend.no_padding()
            self._pieces = _pieces_of(backend)
            added = backend.get_added_tokens_decoder()
            self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
            bos = special_tokens.get("bos_token")
            self._bos_id = None if bos is None else backend.token_to_id(bos)
        self.template_source = chat_template
        self.template = None if chat_template is None else ChatTemplate(chat_template, self._special_tokens)
        """Renders chats, or None when the model brings no template."""

    @staticmethod
    def of_source(source: ModelSource) -> Tokenizer:
        """The tokenizer of an opened model. Raises TokenizerError."""
        if source.gguf_metadata is not None:
            return Tokenizer.from_gguf(source.gguf_metadata, chat_template=source.chat_template)
        if source.tokenizer_path is None:
            return Tokenizer(None, special_tokens={}, chat_template=None)
        return Tokenizer.from_file(
            source.tokenizer_path, source.tokenizer_config, chat_template=source.chat_template
        )

    @staticmethod
    def from_file(path: Path, settings: Mapping[str, Any], *, chat_template: str | None = None) -> Tokenizer:
        """From `tokenizer.json` and the contents of `tokenizer_config.json`. Raises TokenizerError."""
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions for all that is wrong in a file
            raise TokenizerError(f"{path}: is no tokenizer ({str(error).splitlines()[0]})") from None
        special_tokens = {}
        for name in _SPECIAL_NAMES:
            value = settings.get(name)
            content = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(content, str):
                special_tokens[name] = content
        return Tokenizer(backend, special_tokens=special_tokens, chat_template=chat_template)

    @staticmethod
    def from_gguf(metadata: Mapping[str, Any], *, chat_template: str | None = None) -> Tokenizer:
        """From a GGUF file's `tokenizer.ggml.*`. Raises TokenizerError for a kind that is not byte-level BPE."""
        backend = _gguf_backend(metadata)
        special_tokens = {}
        for name, key in _GGUF_NAMES.items():
            token_id = metadata.get(key)
            if not isinstance(token_id, int):
                continue
            if not 0 <= token_id < 2**32:
                raise TokenizerError(f"{key} is {token_id}: allowed is 0 to {2**32 - 1}")
            token = backend.id_to_token(token_id)
            if token is not None:
                special_tokens[name] = token
        if metadata.get("tokenizer.ggml.add_bos_token") is True and "bos_token" in special_tokens:
            bos = special_tokens["bos_token"]
            backend.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A",
                pair=f"{bos} $A $B",
                special_tokens=[(bos, metadata["tokenizer.ggml.bos_token_id"])],
            )
        return Tokenizer(backend, special_tokens=special_tokens, chat_template=chat_template)

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """The ids of a text. With `add_special_tokens` the model's own prefix is added (BOS), once:
        a text that already begins with BOS, like a rendered chat, gets no second one. Raises TokenizerError."""
        if self._backend is None:
            raise TokenizerError("the model has no tokenizer, so a prompt must be given as ids")
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        doubled = add_special_tokens and self._bos_id is not None and ids[:2] == [self._bos_id] * 2
        return tuple(ids[1:] if doubled else ids)

    def piece(self, token_id: int) -> bytes:
        """The bytes that an id stands for; none for an id without a token."""
        return self._pieces.get(token_id, b"")

    def plain_piece(self, token_id: int) -> bytes:
        """Like `piece`, but special tokens show nothing."""
        return b"" if token_id in self._special_ids else self.piece(token_id)

    def token_text(self, token_id: int) -> str:
        """One id alone, as text: U+FFFD where it holds a part of a character only."""
        return self.piece(token_id).decode("utf-8", "replace")

    def text(self, token_ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """The text of all ids at once: their bytes, with U+FFFD for what is no character."""
        piece = self.plain_piece if skip_special_tokens else self.piece
        return b"".join(map(piece, token_ids)).decode("utf-8", "replace")

    def export(self, folder: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, from which `transformers.AutoTokenizer` loads.

        Raises TokenizerError when there is nothing to write.
        """
        if self._backend is None:
            raise TokenizerError("the model has no tokenizer that could be exported")
        folder.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(folder / "tokenizer.json"))
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self._special_tokens,
        }
        if self.template_source is not None:
            settings["chat_template"] = self.template_source
        text = json.dumps(settings, ensure_ascii=False, indent=2)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _gguf_backend(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Byte-level BPE as the metadata describe it, without a prefix."""
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2":
        raise TokenizerError(f"tokenizer.ggml.model {kind!r}: allowed is 'gpt2' (byte-level BPE)")
    if split not in _SPLITS:
        raise TokenizerError(f"tokenizer.ggml.pre {split!r}: allowed is one of {', '.join(_SPLITS)}")
    tokens, merges = _strings(metadata, "tokenizer.ggml.tokens"), _strings(metadata, "tokenizer.ggml.merges")
    if any(merge.count(" ") != 1 for merge in merges):
        raise TokenizerError("tokenizer.ggml.merges: allowed are pairs parted by one space")
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    try:
        backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    except Exception as error:  # a merge of tokens that the vocabulary lacks
        raise TokenizerError(f"tokenizer.ggml.merges: {error}") from None
    backend.decoder = decoders.ByteLevel()
    pattern = _SPLITS[split]
    if pattern is None:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    kinds = metadata.get("tokenizer.ggml.token_type") or ()
    for token, token_kind in zip(tokens, kinds, strict=False):
        if token_kind == _CONTROL:
            backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif token_kind == _USER_DEFINED:
            backend.add_tokens([AddedToken(token, normalized=False)])
    return backend


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TokenizerError(f"{key}: allowed is a list of texts")
    return values


# ---- bytes of a token ---------------------------------------------------------------------------


def _pieces_of(backend: tokenizers.Tokenizer) -> dict[int, bytes]:
    """What each id stands for, by the kind of the tokenizer's decoder. Raises TokenizerError for another kind.

    Byte-level: each character of a token stands for a byte. Otherwise U+2581 is a space and <0xNN> a byte. A space
    that such a decoder would strip from the start of a text is kept, since an answer continues its prompt.
    """
    steps = _decoder_steps(json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {})
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if steps == {"ByteLevel"}:
        of_character = _byte_alphabet()
        return {token_id: _byte_level_piece(token, of_character) for token, token_id in vocabulary.items()}
    if steps and steps <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return {token_id: _spaced_piece(token) for token, token_id in vocabulary.items()}
    raise TokenizerError(
        f"tokenizer.json: its decoder is made of {', '.join(sorted(steps)) or 'nothing'}; allowed are ByteLevel, "
        "Metaspace, or a sequence of Replace, ByteFallback, Fuse and Strip"
    )


def _decoder_steps(decoder: Mapping[str, Any]) -> set[str]:
    """The kinds of the steps that a decoder is made of."""
    if decoder.get("type") == "Sequence":
        return set().union(*map(_decoder_steps, decoder["decoders"]))
    return {str(decoder["type"])} if decoder else set()


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's character for each byte: itself where printable, else the next one from U+0100 on (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _byte_level_piece(token: str, of_character: Mapping[str, int]) -> bytes:
    """A token written in the byte alphabet; an added token with other characters stands for itself."""
    try:
        return bytes(of_character[character] for character in token)
    except KeyError:
        return token.encode()


def _spaced_piece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("\u2581", " ").encode()
