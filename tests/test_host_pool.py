"""Host pools: counts that all stages share, memory that is taken only when it is there, and checksums."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace

import pytest
import torch

from engine.distributed.memory import HostMemory
from engine.distributed.parallel_state import GroupCoordinator
from engine.mem_cache import sizing
from engine.mem_cache.pool import host
from engine.mem_cache.pool.device import DeviceKVPool, DeviceStatePool, StatePart
from engine.mem_cache.pool.host import HostKVCache, HostStore, MambaPoolHost, sync_fixed_hicache_size
from tests.ranks import PATIENCE_S, results, starting_ranks

CPU = torch.device("cpu")
GB = 10**9
PLENTY = HostMemory(10**15, 10**15)


def never(*_):
    raise AssertionError("not to be called")


def alone(size: int, _: float) -> int:
    return size


def into(asked: list[int], answer: int | None = None):
    """An agreement that notes what it is asked and gives one answer, or what it was asked."""

    def agree(size: int, _: float) -> int:
        asked.append(size)
        return size if answer is None else answer

    return agree


def on_meta(shape, dtype):
    return torch.empty(shape, dtype=dtype, device="meta")


def device_pool(bytes_per_token: int, tokens: int = 4096, page_size: int = 16) -> DeviceKVPool:
    layers = 1 if bytes_per_token else 0
    return DeviceKVPool(layers, tokens // page_size, page_size, (bytes_per_token,), torch.uint8, CPU)


def kv_pool(
    device: DeviceKVPool, *, gb=0.0, ratio=2.0, agree=alone, allocator=never, probe=never
) -> HostKVCache:
    return HostKVCache(
        device, ratio, gb, device.page_size, allocator=allocator, memory_probe=probe, agree=agree
    )


def state_pool(layers: int, slots: int = 20) -> DeviceStatePool:
    """1,000 bytes of convolution (bf16) and 8,000 of recurrent state (fp32) in each layer."""
    parts = StatePart((100, 5), torch.bfloat16), StatePart((2, 10, 100), torch.float32)
    return DeviceStatePool(layers, slots, *parts, CPU)


# ---- agreement ----------------------------------------------------------------------------------


def test_each_reason_to_keep_the_own_number_comes_before_the_next_is_looked_at(monkeypatch):
    def no_set_up():
        raise AssertionError("the pipeline parallel group is not initialized")

    looks = [
        (host.dist, "is_available", lambda: False),
        (host.dist, "is_initialized", lambda: False),
        (host, "get_pp_group", no_set_up),
        (host, "get_pp_group", lambda: GroupCoordinator(0, (3,), None)),
    ]
    passing = {"is_available": lambda: True, "is_initialized": lambda: True}
    for place, name, _ in looks:
        monkeypatch.setattr(place, name, never)
    monkeypatch.setattr(host.dist, "all_reduce", never)
    assert [sync_fixed_hicache_size(1234, size) for size in (0, 0.0, -1)] == [1234] * 3
    for place, name, answer in looks:
        monkeypatch.setattr(place, name, answer)
        assert sync_fixed_hicache_size(1234, 100) == 1234
        if name in passing:
            monkeypatch.setattr(place, name, passing[name])


def test_without_any_set_up_a_size_stays_as_it_is():
    """sglang#29258: one process, no groups, no torch.distributed."""
    assert sync_fixed_hicache_size(8_023_106, 100) == 8_023_106


@pytest.mark.parametrize(("least", "lines"), [(7_621_951, 1), (8_023_106, 0)])
def test_the_least_of_the_pp_group_is_taken_and_told(monkeypatch, caplog, least, lines):
    """sglang#29258: the group is the PP group's, on the CPU; a rank whose number is lowered says so once."""
    reduced = []

    def all_reduce(tensor, *, op, group):
        reduced.append((tensor.dtype, tensor.device.type, tensor.tolist(), op, group))
        tensor.clamp_(max=least)

    group = GroupCoordinator(1, (1, 3), "the PP group")
    monkeypatch.setattr(host.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(host.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(host, "get_pp_group", lambda: group)
    with caplog.at_level(logging.INFO):
        assert sync_fixed_hicache_size(8_023_106, 100.0) == least
    assert reduced == [(torch.int64, "cpu", [8_023_106], torch.distributed.ReduceOp.MIN, "the PP group")]
    assert len(caplog.records) == lines
    for record in caplog.records:
        assert record.levelno == logging.INFO
        assert "8023106" in record.getMessage() and "7621951" in record.getMessage()


@pytest.fixture
def run(tmp_path):
    with starting_ranks(tmp_path) as start:
        yield start


POOLS = """
import logging
from engine.distributed.memory import HostMemory
from engine.mem_cache.pool.device import DeviceKVPool, DeviceStatePool, StatePart
from engine.mem_cache.pool.host import HostKVCache, MambaPoolHost

parallel_state.initialize(topology, store)
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")
logging.getLogger("engine").addHandler(handler)
logging.getLogger("engine").setLevel(logging.INFO)

def on_meta(shape, dtype):
    return torch.empty(shape, dtype=dtype, device="meta")

options = dict(allocator=on_meta, memory_probe=lambda: HostMemory(10**12, 10**12))

def kv(layers, record_bytes, gb, page_size, ratio=2.0, tokens=65536):
    device = DeviceKVPool(layers, tokens // page_size, page_size, (record_bytes,), torch.uint8, torch.device("cpu"))
    return HostKVCache(device, ratio, gb, page_size, **options)

def show(pool):
    taken, lines[:] = list(lines), []
    return [pool.local_size, pool.size, pool.byte_count, taken]

def state(layers, gb, ratio=2.0):
    parts = StatePart((100, 5), torch.bfloat16), StatePart((2, 10, 100), torch.float32)
    return MambaPoolHost(DeviceStatePool(layers, 20, *parts, torch.device("cpu")), ratio, gb, **options)

"""


@pytest.mark.process
def test_four_stages_agree_by_their_least(run):
    """sglang#29258: GLM-5.2 FP8, 78 layers over 4 stages, 100 GB each, pages of 64. Beside it every other path."""
    work = (
        POOLS
        + """
layers = [19, 19, 20, 20][place.rank]
glm = kv(layers, 656, 100, 64)
result["glm"] = show(glm)
glm.allocate()
result["shape"] = list(glm.store.bytes.shape)
result["ratio"] = show(kv(layers, 656, 0, 64, ratio=2.5))
result["layerless"] = show(kv([0, 3, 2, 3][place.rank], 256, 0.001536, 1, tokens=512))
result["states"] = show(state([3, 0, 4, 4][place.rank], 0.00036))
result["free states"] = show(state(0, 1.0))
"""
    )
    children, folder = run(work, 4, 1)
    assert [one.code for one in children.wait(PATIENCE_S)] == [0] * 4
    found = results(folder, 4)
    info = "INFO host pool: room for {} here, but only {} on another stage; all take that"
    lowered = [[info.format(8_023_106, 7_621_951)]] * 2 + [[]] * 2
    assert [result["glm"] for result in found] == [
        [local, 7_621_952, 7_621_952 * price, lines]
        for local, price, lines in zip(
            (8_023_168, 8_023_168, 7_621_952, 7_621_952),
            (12_464, 12_464, 13_120, 13_120),
            lowered,
            strict=True,
        )
    ]
    # Stages with fewer layers pin less than they may: 95.000 of 100 GB.
    assert found[0]["glm"][2] == 95_000_009_728
    assert found[1]["shape"] == [119_093, 64 * 12_464]
    # By ratio there is nothing to agree upon: 163,840 tokens, and a page.
    assert [result["ratio"][:2] for result in found] == [[163_904] * 2] * 4
    assert [result["ratio"][3] for result in found] == [[]] * 4
    # vllm#51752: a stage without layers takes part, sets no limit, and has the others' count at no price.
    any_number = sizing.NO_CONSTRAINT
    local = [any_number, 2_001, 3_001, 2_001]
    assert [result["layerless"][:3] for result in found] == [
        [own, 2_001, 2_001 * price] for own, price in zip(local, (0, 768, 512, 768), strict=True)
    ]
    assert [result["states"][:3] for result in found] == [
        [own, 11, 11 * price]
        for own, price in zip((14, any_number, 11, 11), (27_000, 0, 36_000, 36_000), strict=True)
    ]
    # Should no stage pay anything, the ratio says how many.
    assert [result["free states"][:3] for result in found] == [[any_number, 41, 0]] * 4


@pytest.mark.process
def test_the_least_stays_inside_each_pp_group(run):
    """sglang#29258: a cure went over the whole world at first. Ranks 0 and 2 have 4 GB, ranks 1 and 3 have 1."""
    work = POOLS + "result['kv'] = show(kv([3, 3, 2, 2][place.rank], 256, [4, 1, 4, 1][place.rank], 16))"
    children, folder = run(work, 2, 2)
    assert [one.code for one in children.wait(PATIENCE_S)] == [0] * 4
    found = [result["kv"][:2] for result in results(folder, 4)]
    assert found == [
        [5_208_336, 5_208_336],
        [1_302_096, 1_302_096],
        [7_812_512, 5_208_336],
        [1_953_136, 1_302_096],
    ]


# ---- counts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gb", "price", "page_size", "raw", "size"),
    [
        (100, 12_464, 64, 8_023_106, 8_023_168),
        (100, 13_120, 64, 7_621_951, 7_621_952),
        (100, 131_072, 64, 762_939, 762_944),
        (1, 768, 16, 1_302_083, 1_302_096),
        (0.001536, 768, 16, 2_000, 2_016),
        (0.001536, 512, 16, 3_000, 3_008),
        # sglang#35540: exactly 125 pages of 16 x 768 bytes are 126; the rule is kept for equal numbers, and said.
        (0.001536, 768, 1, 2_000, 2_001),
        (0.000001, 768, 16, 1, 16),
        (1e-12, 768, 16, 0, 16),
    ],
)
def test_a_fixed_size_is_priced_by_the_token_and_agreed_before_it_is_rounded(gb, price, page_size, raw, size):
    asked = []

    def agree(tokens, host_size):
        asked.append((tokens, host_size))
        return tokens

    pool = kv_pool(device_pool(price, page_size=page_size), gb=gb, agree=agree)
    assert asked == [(raw, gb)]
    assert (pool.local_size, pool.size, pool.pages, pool.byte_count) == (
        size,
        size,
        size // page_size,
        size * price,
    )


@pytest.mark.parametrize(("ratio", "size"), [(2.0, 8_208), (1.5, 6_160), (0.001, 16)])
def test_a_ratio_follows_the_device(ratio, size):
    asked = []
    pool = kv_pool(device_pool(768), ratio=ratio, agree=lambda tokens, gb: asked.append(gb) or tokens)
    assert (pool.local_size, pool.size, asked) == (size, size, [0.0])


def test_the_agreed_count_is_taken_and_the_own_one_kept():
    pool = kv_pool(device_pool(512), gb=0.001536, agree=lambda tokens, gb: 2_000)
    assert (pool.local_size, pool.size) == (3_008, 2_016)
    states = MambaPoolHost(
        state_pool(3), 2.0, 0.00036, allocator=never, memory_probe=never, agree=lambda slots, gb: 10
    )
    # 9,000 bytes a layer: 27,000 a slot; 360,000 bytes hold 13, and a slot is a page.
    assert (states.local_size, states.size, states.byte_count) == (14, 11, 297_000)
    assert states.bytes_per_slot == 3 * sizing.state_record_bytes(
        500, 2_000, convolution_bytes=2, recurrent_bytes=4
    )


def test_pools_of_any_stages_come_to_the_same_count():
    """sglang#29258, vllm#51752: any split, stages without layers among them, any budget and type."""
    generator = random.Random(29_258)
    for _ in range(500):
        page_size, tokens = generator.randrange(1, 65), generator.randrange(1, 10**6)
        dtype = generator.choice((torch.float32, torch.bfloat16, torch.uint8))
        record = generator.choice(((2, 8, 128), (2, 3, 64), (576,)))
        devices = [
            DeviceKVPool(generator.randrange(12), tokens // page_size + 1, page_size, record, dtype, CPU)
            for _ in range(generator.randrange(1, 9))
        ]
        gb = generator.choice((0.0, 10 ** generator.uniform(-3, 1)))
        ratio = generator.uniform(0.01, 8)
        raw: list[int] = []
        for device in devices:
            kv_pool(device, gb=gb, ratio=ratio, agree=into(raw))
        assert len(raw) == len(devices), "a stage did not come to the collective"
        pools = [kv_pool(device, gb=gb, ratio=ratio, agree=into([], min(raw))) for device in devices]
        assert len({pool.size for pool in pools}) == 1 and pools[0].pages >= 1
        assert all(pool.size <= pool.local_size for pool in pools) or min(raw) == sizing.NO_CONSTRAINT
        if gb:
            page_bytes = [page_size * device.bytes_per_token for device in devices]
            assert all(
                pool.byte_count <= gb * GB + page for pool, page in zip(pools, page_bytes, strict=True)
            )


def test_a_host_pool_that_is_not_larger_than_the_devices_is_said_to_be_so(caplog):
    """sglang#30106: under write-through it fills with mirrors."""
    assert kv_pool(device_pool(768), gb=0.0031).size == 4_048
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "4048 add little to the 4096 on the device" in caplog.text
    caplog.clear()
    kv_pool(device_pool(768), gb=0.01)
    assert not caplog.records


def test_pages_of_two_sizes_are_a_programmers_error():
    with pytest.raises(AssertionError, match="pages of 32 and 16 tokens"):
        HostKVCache(device_pool(768), 2.0, 0.0, 32, allocator=never, memory_probe=never)


@pytest.mark.parametrize(
    ("record_shape", "dtype", "price"),
    [
        (
            (2, 3, 64),
            torch.float32,
            sizing.attention_record_bytes(3, 64, 64, tp_size=1, item_bytes=4),
        ),
        ((576,), torch.bfloat16, sizing.latent_record_bytes(512, 64, item_bytes=2)),
        ((656,), torch.uint8, sizing.sparse_latent_record_bytes(512, 64)),
    ],
)
def test_every_record_shape_is_paid_as_it_was_priced(record_shape, dtype, price):
    device = DeviceKVPool(5, 4, 16, record_shape, dtype, CPU)
    pool = kv_pool(device, allocator=on_meta, probe=lambda: PLENTY)
    assert pool.bytes_per_token == 5 * price
    pool.allocate()
    assert pool.store.bytes.nbytes == pool.byte_count == 9 * 16 * 5 * price
    device.allocate()
    assert device.records.nbytes == device.byte_count == 64 * 5 * price


# ---- memory -------------------------------------------------------------------------------------


def test_no_memory_is_taken_before_it_is_asked_for():
    taken = []

    def allocator(shape, dtype):
        taken.append((shape, dtype))
        return on_meta(shape, dtype)

    pool = kv_pool(device_pool(768), gb=100, allocator=allocator, probe=lambda: PLENTY)
    states = MambaPoolHost(
        state_pool(3), 2.0, 1.0, allocator=allocator, memory_probe=lambda: PLENTY, agree=alone
    )
    assert taken == []
    with pytest.raises(AssertionError, match="no memory yet"):
        _ = pool.store
    pool.allocate()
    states.allocate()
    assert taken == [((8_138_021, 12_288), torch.uint8), ((37_038, 27_000), torch.uint8)]
    for again in (pool, states):
        with pytest.raises(AssertionError, match="memory already"):
            again.allocate()


@pytest.mark.parametrize("short", [0, 1])
def test_memory_that_has_gone_meanwhile_is_refused_in_one_line(short):
    memory = HostMemory(8 * GB, 12_288 * 82 - short)
    pool = kv_pool(device_pool(768), gb=0.001, allocator=on_meta, probe=lambda: memory)
    if short:
        with pytest.raises(
            ValueError, match=r"^host pool of 1,007,616 bytes: .* only 1,007,615 available now$"
        ):
            pool.allocate()
    else:
        pool.allocate()


@pytest.mark.parametrize(
    ("code", "problem"), [(0, None), (2, "0.00 GB of host memory cannot be pinned: CUDA error 2")]
)
def test_pinned_memory_is_registered_as_it_is(monkeypatch, code, problem):
    registered = []

    def register(address, size, flags):
        registered.append((address, size, flags))
        return code

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    assert host.pinned_memory((3, 0), torch.uint8).shape == (3, 0) and not registered
    if problem is None:
        memory = host.pinned_memory((3, 5), torch.uint8)
        assert memory.shape == (3, 5) and registered == [(memory.data_ptr(), 15, 0)]
    else:
        with pytest.raises(RuntimeError, match=problem):
            host.pinned_memory((3, 5), torch.uint8)


# ---- checksums ----------------------------------------------------------------------------------


def test_every_damaged_bit_of_a_page_is_seen():
    """LMCache#4991: what is not what was stored is never served."""
    store = HostStore(3, 40, host.pageable_memory, lambda: PLENTY)
    store.bytes.random_(0, 256)
    for page in range(3):
        store.seal(page)
        store.check(page)
    for place in range(40):
        for bit in range(8):
            store.rows[1, place] ^= 1 << bit
            with pytest.raises(ValueError, match=r"its checksum is [0-9a-f]{8}, and was [0-9a-f]{8} when"):
                store.check(1)
            store.check(0)
            store.check(2)
            store.rows[1, place] ^= 1 << bit
    store.check(1)


def test_a_page_that_was_never_written_is_not_served():
    store = HostStore(2, 40, lambda shape, dtype: torch.zeros(shape, dtype=dtype), lambda: PLENTY)
    with pytest.raises(ValueError, match="was 00000000"):
        store.check(1)


def test_a_page_is_sealed_anew_whenever_it_is_written():
    store = HostStore(1, 8, lambda shape, dtype: torch.zeros(shape, dtype=dtype), lambda: PLENTY)
    for value in (1, 2):
        store.bytes.fill_(value)
        store.seal(0)
        store.check(0)
    store.bytes.fill_(1)
    with pytest.raises(ValueError, match="its checksum is"):
        store.check(0)


def test_pages_of_a_stage_without_layers_have_no_bytes_and_are_always_right():
    store = HostStore(4, 0, host.pageable_memory, lambda: PLENTY)
    store.check(3)
    store.seal(3)
    store.check(3)
