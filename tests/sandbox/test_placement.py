"""Measuring cores are dealt so that no two workers share one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuna.errors import BadInput
from tuna.sandbox.cores import CpuTopology, deal, read_places

#: Two sockets with four cores of two threads: node 0 has CPUs 0-3 and 8-11, node 1 has 4-7 and
#: 12-15.
TWO_SOCKETS = {cpu: CpuTopology(cpu // 4 % 2, (cpu % 8, cpu % 8 + 8)) for cpu in range(16)}


def test_each_device_gets_the_last_core_of_its_own_node() -> None:
    assert deal([0, 1], TWO_SOCKETS) == [(11,), (15,)]


def test_two_workers_do_not_share_a_physical_core_while_there_are_others() -> None:
    shares = deal([0, 0, 0, 0], TWO_SOCKETS)
    assert shares == [(11,), (10,), (9,), (8,)]
    assert deal([0] * 5, TWO_SOCKETS)[4] == (3,), "its own node all the same"


def test_cores_that_are_named_are_shared_out_equally() -> None:
    named = {cpu: place for cpu, place in TWO_SOCKETS.items() if cpu in (0, 1, 2, 3, 4, 5, 6, 7)}
    assert deal([0, 1], named, each=None) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert deal([1, 0, 0], named, each=None) == [(6, 7), (1, 3), (0, 2)]


def test_a_device_of_an_unknown_node_takes_any() -> None:
    assert deal([None, 0], TWO_SOCKETS) == [(15,), (11,)]


def test_a_node_without_a_free_core_borrows_but_does_not_take_anothers_last() -> None:
    two = {4: CpuTopology(1, (4,)), 5: CpuTopology(1, (5,))}
    assert deal([0, 1], two) == [(4,), (5,)]


def test_more_devices_than_cores_are_refused() -> None:
    with pytest.raises(BadInput, match="3 devices need as many measuring cores, and there are 2"):
        deal([0, 0, 0], {0: CpuTopology(), 1: CpuTopology()})


@given(
    nodes=st.lists(st.sampled_from([None, 0, 1]), min_size=1, max_size=8),
    cpus=st.sets(st.integers(0, 15), min_size=8),
    each=st.sampled_from([1, None]),
)
def test_no_core_is_dealt_twice_and_none_goes_without(
    nodes: list[int | None], cpus: set[int], each: int | None
) -> None:
    shares = deal(nodes, {cpu: TWO_SOCKETS[cpu] for cpu in cpus}, each=each)
    dealt = [cpu for share in shares for cpu in share]
    assert len(dealt) == len(set(dealt))
    assert set(dealt) <= cpus
    assert all(shares)


def test_places_are_read_from_the_kernels_tree(tmp_path: Path) -> None:
    for node, cpus in ((0, "0-1"), (1, "2-3")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    topology = tmp_path / "devices/system/cpu/cpu2/topology"
    topology.mkdir(parents=True)
    (topology / "thread_siblings_list").write_text("2-3\n")
    assert read_places([1, 2, 9], tmp_path) == {
        1: CpuTopology(0, (1,)),
        2: CpuTopology(1, (2, 3)),
        9: CpuTopology(None, (9,)),
    }
