"""Ranks in a tree of brokers."""

from hypothesis import given
from hypothesis import strategies as st

from zmdp.interop.flux.instance.attributes import host
from zmdp.interop.flux.instance.topology import BrokerTree, Topology, parent_of

TREE = {"root": None, "b": "root", "a": "root", "b1": "b", "a2": "a", "a1": "a", "deep": "b1"}


def topology_of(parents):
    topology = Topology()
    topology.update(BrokerTree(next(iter(parents)), parents))
    return topology


def test_before_anything_is_known_there_is_one_broker():
    topology = Topology()
    assert (topology.size, topology.rank(""), topology.broker(0), topology.broker(1)) == (1, 0, "", None)
    assert (topology.ancestors(0), topology.level(0), topology.max_level, topology.descendants(0)) == ([], 0, 0, 0)


def test_ranks_are_breadth_first_and_children_in_the_order_of_their_names():
    topology = topology_of(TREE)
    assert topology.names == ["root", "a", "b", "a1", "a2", "b1", "deep"]
    assert [topology.rank(name) for name in topology.names] == list(range(7))
    assert [topology.ancestors(rank) for rank in range(7)] == [[], [0], [0], [1, 0], [1, 0], [2, 0], [5, 2, 0]]
    assert [topology.level(rank) for rank in range(7)] == [0, 1, 1, 2, 2, 2, 3]
    assert topology.max_level == 3
    assert [topology.descendants(rank) for rank in range(7)] == [6, 2, 2, 0, 0, 1, 0]


def test_peers_without_a_parent_are_below_the_first_of_them():
    topology = topology_of({"c": None, "b": None, "x": "c"})
    assert topology.names == ["b", "c", "x"]
    assert [topology.ancestors(rank) for rank in range(3)] == [[], [0], [1, 0]]


def test_a_broker_that_vanishes_keeps_its_rank_and_new_ones_get_the_next():
    topology = topology_of(TREE)
    topology.update(BrokerTree("root", {"root": None, "b": "root", "b1": "b", "deep": "b1", "a3": "root"}))
    assert topology.names == ["root", "a", "b", "a1", "a2", "b1", "deep", "a3"]
    assert [topology.broker(rank) for rank in range(9)] == ["root", None, "b", None, None, "b1", "deep", "a3", None]
    assert topology.ancestors(3) == [1, 0]
    topology.update(BrokerTree("root", TREE))
    assert topology.broker(1) == "a"
    assert topology.broker(7) is None


def test_a_broker_that_loses_its_parent_stays_where_it_was():
    topology = topology_of(TREE)
    topology.update(BrokerTree("deep", {"deep": "b1", "b1": None}))
    assert topology.ancestors(5) == [2, 0]
    assert topology.ancestors(6) == [5, 2, 0]


def test_a_broker_that_gets_another_parent_moves_but_keeps_its_rank():
    topology = topology_of(TREE)
    topology.update(BrokerTree("root", {**TREE, "deep": "a"}))
    assert topology.rank("deep") == 6
    assert topology.ancestors(6) == [1, 0]


def test_brokers_that_report_each_other_as_parents_are_a_tree_all_the_same():
    topology = topology_of({"a": "b", "b": "a", "c": "c"})
    assert topology.names == ["a", "b", "c"]
    assert [topology.ancestors(rank) for rank in range(3)] == [[], [0], [0]]


NAMES = st.sampled_from("abcdefgh")
PARENTS = st.dictionaries(NAMES, st.none() | NAMES, min_size=1)


@given(st.lists(PARENTS, min_size=1, max_size=5))
def test_whatever_brokers_report_it_is_a_tree_and_ranks_do_not_change(reports):
    topology, before = Topology(), []
    for parents in reports:
        topology.update(BrokerTree(min(parents), parents))
        assert topology.names[: len(before)] == before
        assert sorted(topology.names) == sorted({*before, *parents})
        before = list(topology.names)
        for rank in range(topology.size):
            above = topology.ancestors(rank)
            assert len(set(above)) == len(above)
            assert rank not in above
            assert (above[-1:] == [0]) is (rank > 0)
        assert {topology.broker(rank) for rank in range(topology.size)} - {None} == set(parents)


def test_the_parent_is_that_of_a_link_that_is_up():
    def link(broker, kind, state):
        return {"broker": broker, "kind": kind, "state": state}

    assert parent_of({"links": []}) is None
    assert parent_of({"links": [link("p", "peer", "up"), link("c", "child", "up")]}) is None
    assert parent_of({"links": [link("", "parent", "opening")]}) is None
    assert parent_of({"links": [link("b", "parent", "up"), link("a", "parent", "standby")]}) == "a"


def test_names_that_a_host_list_cannot_contain_are_replaced():
    topology = topology_of({"a,b": None, "c[1-2]": "a,b", "d": "a,b", "e!f": "a,b"})
    assert [host(topology, rank) for rank in range(4)] == ["rank0", "rank1", "d", "rank3"]
