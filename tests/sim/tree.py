"""A radix cache beside a dictionary of prefixes: random acts are played on both, and both must say the same.

The dictionary has one entry for each cached page, under its salt and the ids from the start of the prompt to its
end. It knows by the page which tiers hold it, its recency and its locks, so it also says in which order each tier
must evict, and what each copy between the tiers must cover.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

from engine.mem_cache.allocator import PageAllocator
from engine.mem_cache.hicache import HiCache
from engine.mem_cache.radix_cache import Node, RadixCache, pack
from engine.mem_cache.tier import DEVICE, HOST
from engine.scheduler.digest import Accumulator
from engine.types import Transfer, TransferResult, WritePolicy


class Cache:
    """A tree with its allocators and copies, and what tests do with them."""

    def __init__(
        self,
        page_size: int = 2,
        pages: int = 64,
        host_pages: int = 0,
        write_policy: WritePolicy = "write_through",
    ) -> None:
        self.events = Accumulator()
        self.allocator = PageAllocator(pages, self.events)
        self.host_allocator = PageAllocator(host_pages, self.events)
        self.tree = RadixCache(page_size, self.allocator, self.events, self.host_allocator)
        self.copies = HiCache(self.tree, write_policy, self.events)
        self.page_size = page_size

    def insert(self, text: str, salt: bytes = b"") -> list[int]:
        """Cache a prompt whose pages are written as letters; returns the pages that now hold it."""
        key = self.key(text)
        node, found = self.tree.match(salt, key, 1000)
        self.tree.lock(node)
        self.allocator.hold(found)
        own = self.allocator.allocate(len(text) - len(found))
        node, held = self.tree.extend(node, salt, key[len(found) * self.page_size * 4 :], own, 1)
        self.tree.unlock(node)
        self.allocator.release(found + own)
        return found + held

    def back_up(self, text: str) -> list[int]:
        """Copy a cached prompt to the host, where it is not there yet; returns the host's new pages."""
        node, _ = self.tree.match(b"", self.key(text), 1000)
        self.copies.matched(node)
        return [page for transfer in self.settle() for page in transfer.host_pages]

    def settle(self) -> tuple[Transfer, ...]:
        """Let all planned copies end well."""
        transfers = self.copies.plan()
        for transfer in transfers:
            self.copies.settle(TransferResult(transfer_id=transfer.transfer_id, ok=True))
        return transfers

    def load(self, text: str) -> Transfer:
        """Begin to copy what the host alone has of a prompt back to the device."""
        key = self.key(text)
        node, pages = self.tree.match(b"", key, 1000)
        end, host_pages = self.tree.match_host(node, b"", key[len(pages) * self.page_size * 4 :], 1000)
        self.copies.load(end, host_pages, self.allocator.allocate(len(host_pages)))
        [transfer] = self.copies.plan()
        return transfer

    def found(self, text: str, salt: bytes = b"") -> int:
        return self.tree.peek(salt, self.key(text), 1000).pages

    def found_on_host(self, text: str) -> int:
        """Pages that only the host has, behind those on the device."""
        return self.tree.peek(b"", self.key(text), 1000).host_pages

    def key(self, text: str) -> bytes:
        return pack([ord(letter) + i for letter in text for i in range(self.page_size)])

    def evicted(self, count: int, tier: int = DEVICE) -> list[int]:
        allocator = self.tree.tiers[tier].allocator
        before = set(allocator.free_pages())
        self.tree.evict(self.tree.tiers[tier], count)
        return [page for page in allocator.free_pages() if page not in before]


Prefix = tuple[bytes, bytes]
"""Salt and the ids of a whole number of pages."""


@dataclass
class Held:
    """A cached page in the model: its number in each tier that holds it, its recency and the step that filled it."""

    pages: list[int | None]
    stamp: tuple[int, int] = (0, 0)
    step: int = 0


@dataclass
class Holder:
    """A sequence of the model: it holds its pages and locks its path."""

    salt: bytes
    key: bytes
    node: Node
    pages: list[int]


class Model:
    """What the tree should hold, without a tree: each cached prefix in whole pages, one entry a page."""

    def __init__(self, width: int, host_pages: int) -> None:
        self.width = width
        self.pages: dict[Prefix, Held] = {}
        self.host_free = deque(range(host_pages))
        self.touches = 0

    def prefixes(self, salt: bytes, key: bytes) -> list[Prefix]:
        return [(salt, key[:end]) for end in range(self.width, len(key) + 1, self.width)]

    def matching(self, tier: int, salt: bytes, key: bytes, pages_max: int) -> list[Prefix]:
        """The prefixes that a tier holds, from the first page on."""
        found = []
        for prefix in self.prefixes(salt, key)[:pages_max]:
            if not self.holds(tier, prefix):
                break
            found.append(prefix)
        return found

    def holds(self, tier: int, prefix: Prefix) -> bool:
        return prefix in self.pages and self.pages[prefix].pages[tier] is not None

    def put(self, tier: int, prefix: Prefix, page: int, step: int = 0) -> None:
        held = self.pages.setdefault(prefix, Held([None, None]))
        assert held.pages[tier] is None
        held.pages[tier] = page
        held.step = step if tier == DEVICE else held.step

    def drop(self, tier: int, prefix: Prefix) -> int:
        held = self.pages[prefix]
        page, held.pages[tier] = held.pages[tier], None
        if held.pages == [None, None]:
            del self.pages[prefix]
        assert page is not None
        return page

    def touch(self, prefixes: list[Prefix]) -> None:
        self.touches += 1
        for depth, prefix in enumerate(prefixes):
            self.pages[prefix].stamp = (self.touches, -depth)

    def leaves(self, tier: int, locked: set[Prefix]) -> list[Prefix]:
        """What a tier can let go of now."""
        held = [prefix for prefix in self.pages if self.holds(tier, prefix)]
        parents = {(salt, key[: -self.width]) for salt, key in held}
        return [prefix for prefix in held if prefix not in parents and prefix not in locked]

    def evict(self, tier: int, count: int, locked: set[Prefix]) -> list[int]:
        """Evict page by page: the oldest leaf; on the host, what the device holds too comes after all else."""
        evicted: list[int] = []
        while len(evicted) < count and (leaves := self.leaves(tier, locked)):
            oldest = min(leaves, key=lambda p: (tier == HOST and self.holds(DEVICE, p), self.pages[p].stamp))
            evicted.append(self.drop(tier, oldest))
        if tier == HOST:
            self.host_free += evicted
        return evicted

    def forget(self, first: Prefix, locked: set[Prefix]) -> None:
        """The host loses a page and all that follows it, as far as it is unlocked. The order is not the model's."""
        below = [p for p in self.pages if p[0] == first[0] and p[1].startswith(first[1])]
        while leaves := [prefix for prefix in self.leaves(HOST, locked) if prefix in below]:
            for prefix in leaves:
                self.drop(HOST, prefix)


@dataclass
class Copying:
    """A copy under way in the model: which prefixes it covers, and its pages."""

    transfer: Transfer
    covered: list[Prefix]


class Play:
    """Plays random acts on tree and model and compares them."""

    def __init__(self, seed: int, page_size: int, host_pages: int = 0) -> None:
        self.draw = random.Random(seed)
        self.page_size = page_size
        self.cache = Cache(page_size, pages=40, host_pages=host_pages)
        self.model = Model(page_size * 4, host_pages)
        self.holders: list[Holder] = []
        self.copying: dict[int, Copying] = {}
        self.step = 1

    def random_key(self) -> bytes:
        return self.cache.key("".join(self.draw.choice("abc") for _ in range(self.draw.randint(0, 7))))

    def locked(self) -> set[Prefix]:
        """Paths of sequences and of copies. A node that has grown under its copy is locked to its new end."""
        ends = [(holder.salt, holder.key) for holder in self.holders]
        ends += [self.path(copy.node) for copy in self.cache.copies.under_way.values()]
        return {prefix for salt, key in ends for prefix in self.model.prefixes(salt, key)}

    def match(self, salt: bytes, key: bytes, pages_max: int) -> tuple[Node, list[int], list[Prefix]]:
        right = self.model.matching(DEVICE, salt, key, pages_max)
        node, pages = self.cache.tree.match(salt, key, pages_max)
        assert pages == [self.model.pages[prefix].pages[DEVICE] for prefix in right]
        self.model.touch(right)
        return node, pages, right

    # ---- sequences ----

    def open(self) -> None:
        salt, key = self.draw.choice((b"", b"s")), self.random_key()
        node, pages, right = self.match(salt, key, self.draw.randint(0, 8))
        if len(self.holders) < 6:
            self.cache.tree.lock(node)
            self.cache.allocator.hold(pages)
            self.holders.append(Holder(salt, right[-1][1] if right else b"", node, pages))

    def grow(self) -> None:
        if not self.holders:
            return
        holder, more = self.draw.choice(self.holders), self.random_key()
        count = len(more) // self.model.width
        if not 0 < count <= self.cache.allocator.available:
            return
        own = self.cache.allocator.allocate(count)
        prefixes = self.model.prefixes(holder.salt, holder.key + more)
        new = prefixes[len(holder.pages) :]
        for prefix, mine in zip(new, own, strict=True):
            if not self.model.holds(DEVICE, prefix):
                self.model.put(DEVICE, prefix, mine, self.step)
        holder.node, held = self.cache.tree.extend(holder.node, holder.salt, more, own, self.step)
        assert held == [self.model.pages[prefix].pages[DEVICE] for prefix in new]
        self.model.touch(prefixes)
        for mine, kept in zip(own, held, strict=True):
            if mine != kept:
                self.cache.allocator.hold([kept])
                self.cache.allocator.release([mine])
        holder.key, holder.pages = holder.key + more, holder.pages + held
        if self.draw.random() < 0.5:
            self.cache.copies.inserted(holder.node)

    def close(self) -> None:
        if self.holders:
            holder = self.holders.pop(self.draw.randrange(len(self.holders)))
            self.cache.tree.unlock(holder.node)
            self.cache.allocator.release(holder.pages)

    # ---- eviction ----

    def evict(self) -> None:
        tier, count = self.draw.choice((DEVICE, DEVICE, HOST)), self.draw.randint(0, 9)
        allocator = self.cache.tree.tiers[tier].allocator
        free = allocator.available
        right = self.model.evict(tier, count, self.locked())
        assert self.cache.tree.evict(self.cache.tree.tiers[tier], count) == len(right)
        assert allocator.free_pages()[free:] == right

    def flush(self) -> None:
        if not self.holders and not self.copying:
            held = sum(self.model.holds(DEVICE, prefix) for prefix in self.model.pages)
            assert self.cache.tree.flush() == held
            self.model.pages = {}
            self.model.host_free = deque(self.cache.host_allocator.free_pages())

    # ---- copies ----

    def back_up(self) -> None:
        """Begin the copies that are wanted: each covers what the host lacks of a path, as much as there is room for."""
        node, _, _ = self.match(self.draw.choice((b"", b"s")), self.random_key(), 8)
        self.cache.copies.matched(node)
        free = {prefix for copying in self.copying.values() for prefix in copying.covered}
        path = self.model.prefixes(*self.path(node)) if node.parent else []
        transfers = self.cache.copies.plan()
        for transfer in transfers:
            copy = self.cache.copies.under_way[transfer.transfer_id]
            prefixes = self.model.prefixes(*self.path(copy.node))
            saved = self.model.matching(HOST, *self.path(copy.node), 1000)
            on_device = self.model.matching(DEVICE, *self.path(copy.node), 1000)[len(saved) :]
            locked = self.locked_but(transfers, transfer) | set(prefixes)
            self.model.evict(HOST, len(on_device) - len(self.model.host_free), locked)
            covered = on_device[: len(self.model.host_free)]
            assert transfer.kind == "backup" and copy.start == len(saved)
            assert list(transfer.device_pages) == [self.model.pages[p].pages[DEVICE] for p in covered]
            assert list(transfer.host_pages) == [self.model.host_free.popleft() for _ in covered]
            self.copying[transfer.transfer_id] = Copying(transfer, covered)
        # What no other copy touches is not put off.
        lacking = [prefix for prefix in path if not self.model.holds(HOST, prefix)]
        if lacking and not free & set(path) and self.cache.host_allocator.page_count:
            covered = {prefix for copying in self.copying.values() for prefix in copying.covered}
            room = len(self.model.host_free) + len(self.model.leaves(HOST, self.locked() | set(path)))
            assert set(lacking) & covered or not room

    def locked_but(self, transfers: tuple[Transfer, ...], first: Transfer) -> set[Prefix]:
        """What was locked before `first` of these transfers, which began in this order, and those after it."""
        later = [transfer.transfer_id for transfer in transfers[transfers.index(first) :]]
        ends = [(holder.salt, holder.key) for holder in self.holders]
        copies = self.cache.copies.under_way.items()
        ends += [self.path(copy.node) for number, copy in copies if number not in later]
        return {prefix for salt, key in ends for prefix in self.model.prefixes(salt, key)}

    def load(self) -> None:
        """Begin to load what only the host has of a prompt, unless it is on its way."""
        salt, key, pages_max = self.draw.choice((b"", b"s")), self.random_key(), self.draw.randint(0, 8)
        node, pages, right = self.match(salt, key, pages_max)
        covered = self.model.matching(HOST, salt, key, pages_max)[len(right) :]
        if not covered or self.under_way(covered) or len(covered) > self.cache.allocator.available:
            return
        rest = key[len(pages) * self.model.width :]
        end, host_pages = self.cache.tree.match_host(node, salt, rest, pages_max - len(pages))
        assert host_pages == [self.model.pages[prefix].pages[HOST] for prefix in covered]
        self.cache.copies.load(end, host_pages, self.cache.allocator.allocate(len(covered)))
        transfer = self.cache.copies.under_way[self.cache.copies.next_transfer_id - 1].transfer
        self.cache.copies._planned.remove(transfer)
        assert transfer.kind == "load" and list(transfer.host_pages) == host_pages
        self.copying[transfer.transfer_id] = Copying(transfer, covered)

    def under_way(self, prefixes: list[Prefix]) -> bool:
        """Whether any of these is on its way to the device."""
        loads = [copying for copying in self.copying.values() if copying.transfer.kind == "load"]
        return any(prefix in copying.covered for copying in loads for prefix in prefixes)

    def settle(self) -> None:
        """A copy ends, the oldest or another, well or not."""
        if not self.copying:
            return
        self.step += 1  # A step begins with what has settled.
        number, ok = self.draw.choice(list(self.copying)), self.draw.random() < 0.8
        copying = self.copying.pop(number)
        loads = copying.transfer.kind == "load"
        free = self.cache.host_allocator.available
        came = self.cache.copies.settle(TransferResult(transfer_id=number, ok=ok))
        assert came == (len(copying.covered) if loads and ok else 0)
        if ok:
            tier = DEVICE if loads else HOST
            pages = copying.transfer.device_pages if loads else copying.transfer.host_pages
            for prefix, page in zip(copying.covered, pages, strict=True):
                if not self.model.holds(tier, prefix):  # Else it was computed meanwhile, and that stays.
                    self.model.put(tier, prefix, page)
        elif loads:
            self.model.forget(copying.covered[0], self.locked())
        freed = self.cache.host_allocator.free_pages()[free:]
        assert loads or freed == ([] if ok else list(copying.transfer.host_pages))
        self.model.host_free += freed

    # ---- comparison ----

    def peek(self) -> None:
        salt, key, pages_max = self.draw.choice((b"", b"s")), self.random_key(), self.draw.randint(0, 8)
        right = self.model.matching(DEVICE, salt, key, pages_max)
        host = self.model.matching(HOST, salt, key, pages_max)[len(right) :]
        locked = self.locked()
        found = self.cache.tree.peek(salt, key, pages_max, self.step)
        assert found.pages == len(right)
        assert found.evictable_pages == sum(prefix not in locked for prefix in right)
        assert found.fresh_pages == sum(self.model.pages[prefix].step == self.step for prefix in right)
        assert (found.host_pages, found.in_transfer) == (len(host), self.under_way(host))

    def path(self, node: Node) -> Prefix:
        """What the way from the root to the end of a node spells."""
        key = edge = b""
        while node.parent is not None:
            key, edge, node = node.key + key, node.edge, node.parent
        return edge[: -self.model.width], key

    def compare(self) -> None:
        """Each tier holds what the model says; locks, evictable pages and holders are those of the model."""
        locked = self.locked()
        own = [page for holder in self.holders for page in holder.pages]
        transfers = [copying.transfer for copying in self.copying.values()]
        targets = (
            [page for transfer in transfers if transfer.kind == "load" for page in transfer.device_pages],
            [page for transfer in transfers if transfer.kind == "backup" for page in transfer.host_pages],
        )
        for tier in self.cache.tree.tiers:
            held: dict[Prefix, int] = {}
            for node in self.cache.tree.nodes():
                salt, path = self.path(node)
                above = len(path) - len(node.key)
                for place, page in enumerate(node.held[tier.index], start=1):
                    held[(salt, path[: above + place * self.model.width])] = page
            right = {prefix: self.model.pages[prefix].pages[tier.index] for prefix in self.model.pages}
            assert held == {prefix: page for prefix, page in right.items() if page is not None}
            assert tier.pages_total == len(held)
            assert tier.pages_unlocked == sum(prefix not in locked for prefix in held)
            holders = [*held.values(), *targets[tier.index], *(own if tier.index == DEVICE else ())]
            for page in range(tier.allocator.page_count):
                assert tier.allocator.references[page] == holders.count(page)
