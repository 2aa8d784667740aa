"""Tokenisers against `transformers`, and chat templates in their sandbox."""

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

from engine.frontend import limits
from engine.frontend.template import ChatTemplate, TemplateFailure
from engine.frontend.tokenizer import Tokenizer, TokenizerError
from engine.model.source import open_source, resolve_model
from tests.stub_leader import BOS, VOCABULARY, byte_metadata

VARIED = (
    "Hello, world! I'm sure you've SEEN it'll do.  Two spaces\n\nTwo lines\r\n\ttab 12345 3.14159 1,000,000 x2y3\n"
    "  indented 007\n\n42\n Ünïcödé naïve Ελληνικά кириллица עברית العربية हिन्दी ที่ 世界 こんにちは 한국어 ① ² Ⅳ ٣٤٥\n"
    "🌶️👨‍👩‍👧🇩🇪 e\u0301 \u00a0\u3000\u200b\ufffd def f(x): return x**2 # comment\n"
    "<|im_start|>user\n<|im_end|> <file_sep>   trailing   "
)


@pytest.fixture(scope="module")
def default_source():
    return open_source(resolve_model(None))


@pytest.fixture(scope="module")
def default_tokenizer(default_source):
    return Tokenizer.of_source(default_source)


@pytest.fixture(scope="module")
def reference(default_source):
    return AutoTokenizer.from_pretrained(default_source.path.parent, gguf_file=default_source.path.name)


CHAT = [
    {"role": "user", "content": "Hi, say <|im_end|>"},
    {"role": "assistant", "content": "Hello 12"},
    {"role": "user", "content": "🌶️?"},
]


def test_ids_of_the_default_model_equal_those_of_transformers(default_tokenizer, reference):
    assert list(default_tokenizer.encode(VARIED, add_special_tokens=True)) == reference.encode(VARIED)
    for line in VARIED.splitlines():
        assert list(default_tokenizer.encode(line, add_special_tokens=True)) == reference.encode(line)


def test_text_of_the_default_model_equals_that_of_transformers(default_tokenizer, reference):
    ids = reference.encode(VARIED)
    for skip in (True, False):
        # Cut anywhere: characters break, and both show it alike.
        for start in range(0, len(ids), 7):
            expected = reference.backend_tokenizer.decode(ids[start:], skip_special_tokens=skip)
            assert default_tokenizer.text(ids[start:], skip_special_tokens=skip) == expected
    assert default_tokenizer.text(ids, skip_special_tokens=False) == VARIED


def test_chats_of_the_default_model_equal_those_of_transformers(default_tokenizer, reference):
    rendered = default_tokenizer.template.render(CHAT)
    assert rendered == reference.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    ids = reference.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert list(default_tokenizer.encode(rendered, add_special_tokens=False)) == ids


def test_an_exported_tokenizer_is_the_same_in_transformers(default_tokenizer, reference, tmp_path):
    default_tokenizer.export(tmp_path)
    exported = AutoTokenizer.from_pretrained(tmp_path)
    assert exported.encode(VARIED) == reference.encode(VARIED)
    assert exported.apply_chat_template(CHAT, tokenize=False) == reference.apply_chat_template(
        CHAT, tokenize=False
    )
    assert exported.eos_token == reference.eos_token == "<|im_end|>"


@pytest.fixture(scope="module")
def trained():
    """A small byte-level vocabulary with merges that cross digits, spaces and scripts."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator([VARIED] * 3, trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].get), "<|end|>", "<think>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 4],
    }


@pytest.mark.parametrize("split", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_each_pre_tokeniser_cuts_words_as_transformers_does(trained, split):
    metadata = trained | {"tokenizer.ggml.pre": split}
    theirs, _ = convert_gguf_tokenizer(
        "llama",
        {
            "tokenizer_type": "gpt2",
            "pre_tokenizer_type": split,
            "tokens": trained["tokenizer.ggml.tokens"],
            "merges": trained["tokenizer.ggml.merges"],
            "token_type": trained["tokenizer.ggml.token_type"],
        },
    )
    text = VARIED + "<think>12 34<|end|>  "
    assert (
        list(Tokenizer.from_gguf(metadata).encode(text, add_special_tokens=True)) == theirs.encode(text).ids
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model 'llama'"),
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre 'tekken'"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.merges": ["a"]}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["a nothing"]}, "tokenizer.ggml.merges"),
    ],
)
def test_a_tokenizer_that_is_not_known_is_refused_by_name(change, named):
    with pytest.raises(TokenizerError, match=named) as caught:
        Tokenizer.from_gguf(byte_metadata() | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_an_id_that_cannot_be_one_is_refused_by_name(token_id):
    metadata = byte_metadata() | {"tokenizer.ggml.bos_token_id": token_id}
    with pytest.raises(
        TokenizerError, match=rf"^tokenizer\.ggml\.bos_token_id is {token_id}: allowed is 0 to"
    ):
        Tokenizer.from_gguf(metadata)


def test_an_unknown_decoder_is_refused_by_name(tmp_path):
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match="decoder is made of nothing"):
        Tokenizer.from_file(tmp_path / "tokenizer.json", {})
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="is no tokenizer"):
        Tokenizer.from_file(tmp_path / "tokenizer.json", {})


def test_byte_fallback_tokens_are_bytes_and_a_leading_space_stays(tmp_path):
    vocab = {"<unk>": 0, "<0xE4>": 1, "<0xB8>": 2, "<0x96>": 3, "\u2581Hi": 4, "\u2581there": 5}
    backend = Backend(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer.json", {})
    assert tokenizer.text([4, 5, 1, 2, 3], skip_special_tokens=True) == " Hi there世"
    assert backend.decode([4, 5, 1, 2, 3]) == "Hi there世"


def test_bos_comes_once_whether_or_not_the_text_has_it():
    # vllm#16976, vllm#27486: a rendered chat begins with BOS, and the tokenizer adds another.
    tokenizer = Tokenizer.from_gguf(byte_metadata(add_bos=True))
    assert tokenizer.encode("a", add_special_tokens=True) == (BOS, 97)
    assert tokenizer.encode("<|bos|>a", add_special_tokens=True) == (BOS, 97)
    assert tokenizer.encode("<|bos|>a", add_special_tokens=False) == (BOS, 97)
    assert tokenizer.encode("", add_special_tokens=True) == (BOS,)


def test_a_file_that_asks_for_truncation_shortens_no_prompt(tmp_path):
    # sglang#2876: a prompt that is cut in silence.
    source = Tokenizer.from_gguf(byte_metadata())
    source.export(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer.json", settings)
    assert tokenizer.encode("0123456789", add_special_tokens=True) == tuple(b"0123456789")


def test_many_threads_share_one_tokenizer():
    # vllm#40949, huggingface/transformers#47085: "Already borrowed" when calls set state on the shared object.
    tokenizer = Tokenizer.from_gguf(byte_metadata(add_bos=True))
    texts = [f"{i} " * (i % 50 + 1) for i in range(400)]
    alone = [tokenizer.encode(text, add_special_tokens=i % 2 == 0) for i, text in enumerate(texts)]
    gate = threading.Barrier(8)

    def encode(start):
        gate.wait()
        return [tokenizer.encode(texts[i], add_special_tokens=i % 2 == 0) for i in range(start, 400, 8)]

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(encode, range(8)))
    for start, ids in enumerate(together):
        assert ids == alone[start::8]


def test_ids_without_a_token_show_nothing():
    tokenizer = Tokenizer.from_gguf(byte_metadata())
    assert tokenizer.piece(VOCABULARY + 7) == b""
    assert Tokenizer(None, special_tokens={}, chat_template=None).text([1, 2], skip_special_tokens=True) == ""
    with pytest.raises(TokenizerError, match="no tokenizer"):
        Tokenizer(None, special_tokens={}, chat_template=None).encode("a", add_special_tokens=True)


# ---- chat templates -----------------------------------------------------------------------------


def render(source, messages=({"role": "user", "content": "x"},)):
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages)


def test_a_template_has_the_helpers_that_transformers_gives():
    assert render("{{ bos_token }}{{ messages[0] | tojson }}") == '<s>{"role": "user", "content": "x"}'
    assert render("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{{ 'a'.ljust(3) ~ 1 ~ none ~ 'b' | center(3) }}") == "a  1None b "
    assert (
        render("{{ '**%s**-%d' % ('a', 7) + '%05.1f' | format(2.5) + '{:>3}{x}'.format(1, x=2) }}")
        == "**a**-7002.5  12"
    )
    assert render("{% generation %}a{{ 1 }}{% endgeneration %}") == "a1"
    with pytest.raises(TemplateFailure, match="only users here"):
        render("{{ raise_exception('only users here') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 'a' * 10**9 }}",
        "{{ [0] * 10**9 }}",
        "{{ 9 ** 999999999 }}",
        "{% for i in range(100000) %}{{ 'a' * 10000 }}{% endfor %}",
        "{{ missing.field }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source):
    with pytest.raises(TemplateFailure):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(x='ab') %}{% for i in range(24) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(24) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{{ 'a'.ljust(20000000) }}",
        "{{ 'a'.rjust(20000000) }}",
        "{{ 'a'.center(20000000) }}",
        "{{ 'a'.zfill(20000000) }}",
        "{{ 'a' | center(20000000) }}",
        "{{ '%20000000d' % 1 }}",
        "{{ '%*d' % (20000000, 1) }}",
        "{{ '%*d' % (-20000000, 1) }}",
        "{{ '%(a)20000000d' % {'a': 1} }}",
        "{{ '{0[}]:20000000}'.format({'}': 1}) }}",
        "{{ '%20000000d' | format(1) }}",
        "{{ '{:20000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 20000000) }}",
    ],
)
def test_a_template_cannot_make_a_huge_text_even_to_throw_it_away(source):
    with pytest.raises(TemplateFailure, match=r"too many for a template|width is a field"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    ],
)
def test_a_template_cannot_run_for_ever(source, monkeypatch):
    monkeypatch.setattr(limits, "TEMPLATE_SECONDS_MAX", 0.05)
    with pytest.raises(TemplateFailure, match="ran for over"):
        render(source)


def test_a_template_that_cannot_be_compiled_is_refused():
    with pytest.raises(TemplateFailure, match="cannot be compiled"):
        render("{% for %}")
    with pytest.raises(TemplateFailure, match="characters"):
        render("x" * (limits.TEMPLATE_CHARACTERS_MAX + 1))


def test_nothing_of_the_front_end_imports_torch():
    code = "import engine.frontend.serve, sys; assert 'torch' not in sys.modules"
    root = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
