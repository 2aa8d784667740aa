"""Who owns which layer, and who is whose neighbour: numbers worked out by hand and from public reports."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.topology import Topology, partition_layers, split_layers


def counts(ranges):
    return [end - start for start, end in ranges]


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (78, 4, [19, 19, 20, 20]),
        (61, 8, [7, 7, 7, 8, 8, 8, 8, 8]),
        (32, 3, [10, 11, 11]),
        (30, 2, [15, 15]),
        # sglang#9798: 94 over 8 gave 11 x 7 + 17; ml-explore/mlx-lm#1688: 10 over 3 lost two layers.
        (94, 8, [11, 11, 12, 12, 12, 12, 12, 12]),
        (10, 3, [3, 3, 4]),
        (5, 2, [2, 3]),
        (5, 5, [1, 1, 1, 1, 1]),
        (1, 1, [1]),
    ],
)
def test_the_last_stages_take_one_more(layers, stages, expected):
    ranges = split_layers(layers, stages)
    assert counts(ranges) == expected
    assert ranges[0][0] == 0 and ranges[-1][1] == layers


@given(st.integers(1, 200), st.data())
def test_each_layer_has_exactly_one_owner(layers, data):
    stages = data.draw(st.integers(1, layers))
    ranges = split_layers(layers, stages)
    assert [layer for start, end in ranges for layer in range(start, end)] == list(range(layers))
    assert max(counts(ranges)) - min(counts(ranges)) <= 1


@pytest.mark.parametrize("stages", [0, 6])
def test_a_stage_without_layers_is_refused(stages):
    # vllm#6114: the numbers belong into the message.
    with pytest.raises(ValueError, match=f"--pp-size {stages}: the model has 5 layers, .* from 1 to 5"):
        split_layers(5, stages)


def test_a_partition_is_taken_as_it_is():
    assert partition_layers((20, 20, 19, 19), 78, 4) == ((0, 20), (20, 40), (40, 59), (59, 78))
    assert partition_layers((3, 1, 1), 5, 3) == ((0, 3), (3, 4), (4, 5))


@pytest.mark.parametrize(
    ("partition", "stages", "words"),
    [
        ((4, 1), 3, "--pp-layer-partition 4,1: has 2 counts, but --pp-size is 3"),
        ((5, 0, 0), 3, "--pp-layer-partition 5,0,0: every stage needs at least 1 layer"),
        ((7, -1, -1), 3, "--pp-layer-partition 7,-1,-1: every stage needs"),
        ((3, 1, 2), 3, "--pp-layer-partition 3,1,2: sums to 6, but the model has 5 layers"),
    ],
)
def test_a_wrong_partition_is_refused_by_name(partition, stages, words):
    with pytest.raises(ValueError, match=words):
        partition_layers(partition, 5, stages)


def test_ranks_are_laid_out_pp_outer_tp_inner():
    # pp 3 x tp 2:  stage 0: ranks 0 1 | stage 1: ranks 2 3 | stage 2: ranks 4 5
    ranks = [Topology.build(rank, tp_size=2, pp_size=3, layer_count=8) for rank in range(6)]
    assert [(one.pp_rank, one.tp_rank) for one in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [list(one.layers) for one in ranks[::2]] == [[0, 1], [2, 3, 4], [5, 6, 7]]
    assert [one.layers for one in ranks[::2]] == [one.layers for one in ranks[1::2]]
    assert [one.previous_rank for one in ranks] == [None, None, 0, 1, 2, 3]
    assert [one.next_rank for one in ranks] == [2, 3, 4, 5, None, None]
    assert [one.is_leader for one in ranks] == [True] + [False] * 5
    assert [one.reports_tokens for one in ranks] == [False] * 4 + [True, False]
    assert [one.is_first_stage for one in ranks] == [True, True] + [False] * 4
    assert [one.is_last_stage for one in ranks] == [False] * 4 + [True, True]
    assert ranks[3].tag == "[PP1 TP1]" and ranks[3].world_size == 6


def test_a_world_of_one_is_leader_first_and_last():
    alone = Topology.build(0, tp_size=1, pp_size=1, layer_count=30)
    assert alone.is_leader and alone.is_first_stage and alone.is_last_stage and alone.reports_tokens
    assert alone.previous_rank is None and alone.next_rank is None
    assert alone.layers == range(30)


def test_a_partition_reaches_the_topology():
    ranks = [Topology.build(rank, tp_size=1, pp_size=2, layer_count=5, partition=(3, 2)) for rank in range(2)]
    assert [one.layers for one in ranks] == [range(3), range(3, 5)]


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_world_is_a_programmers_error(rank):
    with pytest.raises(AssertionError, match=rf"rank {rank} outside 0\.\.1"):
        Topology.build(rank, tp_size=1, pp_size=2, layer_count=5)
