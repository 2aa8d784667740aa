"""The default model as a new user meets it, and its greedy ids over one, two and three stages and in `transformers`."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.service import FP32, serve

pytestmark = [pytest.mark.process, pytest.mark.model]

QUESTION = "The capital of France is"
TEXTS = (
    QUESTION,
    "Once upon a time",
    "Water boils at",
    "def fibonacci(n):",
    "The largest planet in the solar system is",
    "In 1969, the first",
    "My favourite food is",
    "The quick brown fox",
    "To be or not to be",
    "A list of prime numbers: 2, 3, 5,",
    "The opposite of hot is",
    "Shakespeare wrote",
    "The chemical symbol of gold is",
    "import numpy as",
    "Roses are red,",
    "The sun rises in the",
)
NEW_TOKENS = 8


def test_the_default_command_answers_paris_and_shows_two_stages_that_agree():
    with serve("--pp-size", "2") as service:
        body = {"text": QUESTION, "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
        assert "Paris" in service.post("/generate", body).json()["text"]
        now = service.check_idle()
        info = service.info()  # which compares step, digest and books of the stages
        assert [stage["layers"] for stage in info["stages"]] == [[0, 15], [15, 30]]
        assert now["device"]["capacity"] == info["max_total_tokens"] > 0
        assert info["served_model_name"] == "SmolLM2-135M-Instruct"
        if info["dtype"] == "float32":
            assert [stage["bytes_per_token"] for stage in info["stages"]] == [23_040, 23_040]
        assert service.health() == 200


@pytest.fixture(scope="module")
def expected(default_model):
    """Ids of the texts, tokenised by `transformers`, with their greedy continuations."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(default_model.folder, gguf_file=default_model.file)
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    # Three texts each, so that prompts span pages and chunks.
    prompts = [
        prompts[(number + 1) % 16] + prompts[(number + 2) % 16] + ids for number, ids in enumerate(prompts)
    ]
    prompts[0] = tokenizer(QUESTION)["input_ids"]
    answers = default_model.answers(prompts, NEW_TOKENS)
    clear = [(prompt, answer.ids) for prompt, answer in zip(prompts, answers, strict=True) if answer.clear]
    assert len(clear) >= 14
    return clear


@pytest.mark.parametrize("pp_size", [1, 2, 3])
def test_greedy_ids_are_those_of_transformers(expected, pp_size):
    prompts, ids = map(list, zip(*expected, strict=True))
    with serve(
        *FP32, "--pp-size", str(pp_size), "--max-total-tokens", "8192", "--chunked-prefill-size", "64"
    ) as service:
        assert service.generate(QUESTION, NEW_TOKENS)["output_ids"] == ids[0], "from text"
        assert service.gen(prompts[1], NEW_TOKENS) == ids[1], "cold, one request"
        assert service.gen(prompts[1], NEW_TOKENS) == ids[1], "cached, one request"
        assert service.gen_all(prompts, NEW_TOKENS) == ids, "sixteen at once"
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda prompt: service.generate(prompt, NEW_TOKENS), prompts))
        assert [answer["output_ids"] for answer in answers] == ids, "sixteen at once, cached"
        cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
        assert cached == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
        service.check_idle()
