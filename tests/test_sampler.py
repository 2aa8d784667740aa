"""The sampler against formulas and `transformers`' own warpers and processors, on logits that are known."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch

from engine.model.sampler import sample, token_logprobs
from engine.types import Sample, SamplingParams

VOCABULARY = 500


def make(number: int = 0, *, banned=(), prompt=(), output=(), **params) -> Sample:
    """A sample whose random number is the `number`-th of a seeded series."""
    bits = random.Random(number).getrandbits(64)
    return Sample(
        SamplingParams(max_new_tokens=1, **params), 7, bits, tuple(banned), tuple(prompt), tuple(output)
    )


def frequencies(logits: torch.Tensor, draws: int = 20_000, **params) -> dict[int, float]:
    """How often each token is drawn from one row of logits."""
    counts: Counter[int] = Counter()
    for start in range(0, draws, 1000):
        rows = logits.expand(1000, -1)
        counts.update(sample(rows, [make(start + number, **params) for number in range(1000)]))
    return {token: count / draws for token, count in counts.items()}


def assert_follows(found: dict[int, float], expected: torch.Tensor, draws: int = 20_000):
    """No token outside the support, and every frequency within five standard deviations."""
    for token, probability in enumerate(expected.tolist()):
        deviation = math.sqrt(max(probability * (1 - probability), 1e-9) / draws)
        assert abs(found.get(token, 0.0) - probability) <= 5 * deviation, (
            token,
            probability,
            found.get(token),
        )
        assert probability > 0 or token not in found


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(40, generator=torch.Generator().manual_seed(3)) * 2


def test_greedy_takes_the_greatest(logits):
    many = torch.randn(5, VOCABULARY)
    assert sample(many, [make(temperature=0.0)] * 5) == many.argmax(-1).tolist()


def test_temperature_follows_softmax(logits):
    assert_follows(frequencies(logits, temperature=0.7), torch.softmax(logits / 0.7, -1))


@pytest.mark.parametrize(
    ("params", "warper"),
    [
        ({"top_k": 5}, lambda t: t.TopKLogitsWarper(5)),
        ({"top_p": 0.8}, lambda t: t.TopPLogitsWarper(0.8)),
        ({"min_p": 0.1}, lambda t: t.MinPLogitsWarper(0.1)),
        ({"top_k": 1}, lambda t: t.TopKLogitsWarper(1)),
        ({"top_p": 1e-9}, lambda t: t.TopKLogitsWarper(1)),
        ({"top_k": 10**9}, lambda t: t.TopKLogitsWarper(40)),
    ],
)
def test_truncation_equals_transformers(logits, params, warper):
    from transformers.generation import logits_process

    temperature = 1.3
    warped = warper(logits_process)(None, (logits / temperature)[None])[0]
    assert_follows(frequencies(logits, temperature=temperature, **params), torch.softmax(warped, -1))


def test_truncations_look_at_the_whole_distribution_each():
    """Joint, as SGLang's: top_k 3 and top_p 0.75 keep three of these; one after the other would keep two."""
    probabilities = torch.tensor([0.1, 0.4, 0.2, 0.3])
    found = frequencies(probabilities.log(), temperature=1.0, top_k=3, top_p=0.75)
    assert_follows(found, torch.tensor([0.0, 4 / 9, 2 / 9, 3 / 9]))


def test_top_p_wider_than_the_first_candidates():
    """A nearly flat distribution: the kept tokens are far more than are looked at first."""
    logits = torch.linspace(0.01, 0, 50_000)
    kept = [sample(logits[None], [make(number, top_p=0.5)])[0] for number in range(300)]
    cumulative = torch.softmax(logits.double(), -1).cumsum(-1)
    limit = int((cumulative < 0.5).sum())
    assert max(kept) <= limit + 1 and max(kept) > 0.9 * limit and min(kept) < 0.1 * limit


def test_ties_do_not_depend_on_how_many_are_looked_at():
    """bfloat16 heads give equal logits in numbers: 300 tokens at one height, of which top_k keeps the first by id."""
    logits = torch.zeros(2000)
    logits[100:400] = 5.0
    drawn = {sample(logits[None], [make(number, top_k=70)])[0] for number in range(2000)}
    assert drawn == set(range(100, 170))


def test_a_row_does_not_depend_on_its_batch():
    logits = torch.randn(8, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3
    items = [
        make(1, temperature=0.0),
        make(2),
        make(3, top_k=40),
        make(4, top_p=0.9, banned=(3, 4)),
        make(5, min_p=0.05, temperature=2.0),
        make(6, frequency_penalty=1.0, output=(5, 5, 6)),
        make(7, temperature=1e-30),
        make(8, top_k=300, top_p=0.999, logit_bias=((7, 3.0),)),
    ]
    before = logits.clone()
    together = sample(logits, items)
    alone = [sample(logits[row : row + 1], [item])[0] for row, item in enumerate(items)]
    backwards = sample(logits.flip(0), items[::-1])[::-1]
    assert together == alone == backwards
    assert torch.equal(logits, before)


def test_the_same_number_gives_the_same_token_and_others_differ():
    logits = torch.zeros(1, VOCABULARY)
    assert sample(logits, [make(5)]) == sample(logits, [make(5)])
    assert len({sample(logits, [make(number)])[0] for number in range(50)}) > 40


@pytest.mark.parametrize("random_bits", [0, 2**64 - 1])
@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 3}])
def test_extreme_random_numbers_stay_in_the_support(random_bits, params):
    logits = torch.full((1, 10), -torch.inf)
    logits[0, 3:6] = torch.tensor([1.0, 2.0, 0.5])
    item = Sample(SamplingParams(max_new_tokens=1, **params), 0, random_bits, (), (), ())
    token = sample(logits, [item])[0]
    assert token == (3 if random_bits == 0 else 5)


def test_tiny_temperature_is_greedy():
    logits = torch.randn(50, VOCABULARY, generator=torch.Generator().manual_seed(2))
    found = sample(logits, [make(number, temperature=1e-30) for number in range(50)])
    assert found == logits.argmax(-1).tolist()


def test_repetition_penalty_equals_transformers(logits):
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    history = [3, 7, 7, 11]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([history]), logits[None].clone())[0]
    found = frequencies(
        logits, temperature=1.0, repetition_penalty=1.7, prompt=history[:2], output=history[2:]
    )
    assert_follows(found, torch.softmax(expected, -1))


def test_frequency_and_presence_count_output_only(logits):
    expected = logits.clone()
    expected[7] -= 2 * 0.5 + 0.3
    expected[11] -= 1 * 0.5 + 0.3
    found = frequencies(
        logits, temperature=1.0, frequency_penalty=0.5, presence_penalty=0.3, prompt=(3, 3), output=(7, 11, 7)
    )
    assert_follows(found, torch.softmax(expected, -1))


def test_additive_penalties_come_before_the_repetition_penalty():
    logits = torch.tensor([[1.0, 0.0]])
    # 1 - 2 = -1 is negative and so multiplied: -2 < -1.5. The other order would give 0.5 - 2 = -1.5, a tie.
    item = make(
        temperature=0.0, presence_penalty=2.0, repetition_penalty=2.0, output=(0,), logit_bias=((1, -1.9),)
    )
    assert sample(logits, [item]) == [1]


def test_bias_and_bans():
    logits = torch.zeros(1, VOCABULARY)
    assert sample(logits, [make(temperature=0.0, logit_bias=((42, 1.0),))]) == [42]
    banned = {sample(logits, [make(number, banned=range(1, VOCABULARY))])[0] for number in range(20)}
    assert banned == {0}


def test_many_biases_are_added_each_to_its_own_logit(logits):
    values = {token_id: 0.25 * token_id - 5 for token_id in (3, 0, 39, 17)}
    expected = logits.clone()
    for token_id, bias in values.items():
        expected[token_id] += bias
    found = frequencies(logits, temperature=1.0, logit_bias=tuple(values.items()))
    assert_follows(found, torch.softmax(expected, -1))


def test_ids_that_the_model_does_not_have_harm_nothing():
    """sglang#40076: one bad request kills the server. Ids are checked at the door; this is the second wall."""
    logits = torch.zeros(1, VOCABULARY)
    items = [make(temperature=0.0, banned=(10**9, -1), logit_bias=((10**9, 5.0), (-3, 5.0)))]
    assert 0 <= sample(logits, items)[0] < VOCABULARY


def test_logits_that_are_not_numbers_give_some_token():
    logits = torch.full((3, VOCABULARY), torch.nan)
    for token in sample(logits, [make(temperature=0.0), make(1), make(2, top_p=0.5, top_k=4)]):
        assert 0 <= token < VOCABULARY


def test_logprobs_are_of_the_models_own_distribution(logits):
    rows = torch.stack((logits, logits * 2))
    expected = rows.double().log_softmax(-1)
    first, second = token_logprobs(rows, [5, 9], [20, 21], [0, 3])
    assert (first.position, first.token_id, first.top) == (20, 5, ())
    assert first.logprob == pytest.approx(float(expected[0, 5]), abs=1e-5)
    assert second.logprob == pytest.approx(float(expected[1, 9]), abs=1e-5)
    assert [token for token, _ in second.top] == expected[1].argsort(descending=True)[:3].tolist()
    assert [value for _, value in second.top] == pytest.approx(sorted(expected[1].tolist())[:-4:-1], abs=1e-5)


def test_more_alternatives_than_the_vocabulary_has(logits):
    (entry,) = token_logprobs(logits[None], [0], [0], [10**9])
    assert len(entry.top) == 40
    assert token_logprobs(torch.zeros(0, 40), [], [], []) == []
