"""Batches of any shape: every tensor is found and replaced once, whatever else is in there."""

from __future__ import annotations

import random
from collections import UserDict, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import pytest
import torch
from torch import nn

from nanproof.core.support._tree import all_tensors, map_tensors, positions, tensors_in

Pair = namedtuple("Pair", "first second")


@dataclass
class Node:
    """One of several that all know each other."""

    x: torch.Tensor
    others: list = field(default_factory=list)


def graph(count):
    nodes = [Node(torch.full((2,), float(i))) for i in range(count)]
    for node in nodes:
        node.others = nodes
    return nodes


def test_tensors_are_found_in_order_with_the_expressions_that_reach_them():
    batch = {
        "a": torch.zeros(1),
        "b": [torch.ones(1), (torch.ones(2), 3)],
        "c": Pair(torch.ones(3), None),
        "d": Node(torch.ones(4)),
    }
    batch |= {"d": Node(torch.ones(4)), "e": UserDict(f=torch.ones(5))}
    found = list(tensors_in(batch))
    names = ["batch['a']", "batch['b'][0]", "batch['b'][1][0]", "batch['c'].first", "batch['d'].x", "batch['e']['f']"]
    assert [name for name, _ in found] == names
    assert all(eval(name, {"batch": batch}) is tensor for name, tensor in found)


def test_what_refers_to_itself_is_looked_at_once():
    """Sixty nodes that all know each other: there are more ways through them than can be walked."""
    nodes = graph(60)
    assert [id(t) for _, t in tensors_in(nodes)] == [id(node.x) for node in nodes]
    doubled = map_tensors(nodes, lambda t: t * 2)
    assert [node.x[0].item() for node in doubled] == [2.0 * i for i in range(60)]
    assert positions({"nodes": nodes, "rows": torch.ones(60, 3)}) == {}


def test_samples_are_found_in_a_batch_that_refers_to_itself():
    batch = {"targets": [{"boxes": torch.ones(3, 4)}, {"boxes": torch.ones(2, 4)}]}
    batch["itself"] = batch
    assert positions(batch) == {id(batch["targets"][i]["boxes"]): i for i in range(2)}


def test_the_outer_list_is_that_of_the_samples():
    batch = [{"boxes": [{"corner": torch.ones(2)}, {"corner": torch.ones(2)}]}, {"boxes": []}]
    assert set(positions(batch).values()) == {0}


def test_what_is_shared_stays_shared():
    shared = [torch.ones(2)]
    first, second = map_tensors((shared, shared), torch.clone)
    assert first is second and first is not shared and first[0] is not shared[0]


def test_kinds_of_tuples_are_kept():
    packed, top = nn.utils.rnn.pack_sequence([torch.ones(2, 3), torch.ones(1, 3)]), torch.ones(2, 3).max(1)
    for batch in (packed, top, Pair(torch.ones(1), 2)):
        copied = map_tensors(batch, torch.clone)
        assert type(copied) is type(batch) and copied[0] is not batch[0] and torch.equal(copied[0], batch[0])


class Made(Mapping):
    """Makes its items as they are asked for."""

    def __len__(self):
        return 50

    def __iter__(self):
        return iter(range(50))

    def __getitem__(self, key):
        return {"x": torch.full((1,), float(key))}


def test_items_that_are_made_as_they_are_asked_for_are_all_found():
    assert [t.item() for _, t in tensors_in(Made())] == [float(i) for i in range(50)]


class Shut(dict):
    """Does not let itself be read."""

    def items(self):
        raise RuntimeError("not today")


def test_what_cannot_be_read_or_copied_stays_as_it_is():
    proxy, shut = MappingProxyType({"x": torch.ones(1)}), Shut(x=torch.ones(2))
    batch = {"proxy": proxy, "shut": shut, "x": torch.ones(3)}
    assert [name for name, _ in tensors_in(batch)] == ["batch['proxy']['x']", "batch['x']"]
    copied = map_tensors(batch, torch.clone)
    assert copied["proxy"] is proxy and copied["shut"] is shut and copied["x"] is not batch["x"]


def test_an_error_of_the_change_is_not_swallowed():
    with pytest.raises(ZeroDivisionError):
        map_tensors({"a": [UserDict(x=torch.ones(1))]}, lambda t: 1 / 0)


@pytest.mark.parametrize("levels", [90, 5000])
def test_depth_has_an_end(levels):
    batch = [torch.ones(1)]
    for _ in range(levels):
        batch = [batch]
    assert len(list(tensors_in(batch))) == (levels == 90)
    map_tensors(batch, torch.clone)


def test_nested_tensors_are_left_out():
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert list(tensors_in({"a": jagged, "b": 1})) == []


def test_items_of_a_list_are_samples_only_where_they_can_be():
    a, b = torch.ones(3), torch.ones(5)
    assert positions(([a, b], torch.ones(2))) == {id(a): 0, id(b): 1}
    assert positions({"pair": Pair(a, a), "weights": torch.ones(2)}) == {}
    assert positions([torch.ones(2, 3), torch.ones(2)]) == {}


@dataclass
class Late:
    """Has a field that nobody has set."""

    x: torch.Tensor
    later: torch.Tensor = field(init=False)


def test_a_field_that_was_not_set_is_passed_over():
    batch = Late(torch.ones(2))
    assert [name for name, _ in tensors_in(batch)] == ["batch.x"]
    assert map_tensors(batch, lambda t: t + 1).x.sum() == 4


@pytest.mark.parametrize("seed", range(40))
def test_all_tensors_are_those_that_the_walk_finds(seed):
    """In batches as people make them, and in containers of every kind; what is met twice may be there twice."""
    draw = random.Random(seed)

    def made(depth):
        kinds = ["tensor", "number", "text", "nothing"] + ["tuple", "list", "dict", "pair", "user", "node", "object"] * (
            depth > 0
        )
        kind, some = draw.choice(kinds), range(draw.randrange(4))
        if kind == "tensor":
            return torch.zeros(draw.randrange(3))
        if kind in ("tuple", "list"):
            return {"tuple": tuple, "list": list}[kind](made(depth - 1) for _ in some)
        if kind in ("dict", "user"):
            return {"dict": dict, "user": UserDict}[kind]({f"k{i}": made(depth - 1) for i in some})
        if kind == "pair":
            return Pair(made(depth - 1), made(depth - 1))
        if kind == "node":
            return Node(torch.zeros(1), [made(depth - 1) for _ in some])
        return {"number": 1.5, "text": "a", "nothing": None, "object": object()}[kind]

    batch = made(5)
    assert {id(t) for t in all_tensors(batch)} == {id(t) for _, t in tensors_in(batch)}


def test_all_tensors_of_what_refers_to_itself_come_to_an_end():
    batch = [torch.zeros(1)]
    batch += [batch, batch, {"again": batch}]
    assert {id(t) for t in all_tensors(batch)} == {id(batch[0])}
