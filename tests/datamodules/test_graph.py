from __future__ import annotations

import pickle
from collections import defaultdict

import networkx as nx
import numpy as np
import pytest
import scipy.sparse as sp
import torch

from datamodules import BAShapesDataModule, NodeGraphDataModule, TreeCyclesDataModule, TreeGridDataModule
from lightning_methods.graph import Graph, to_undirected, undirected_pairs

HOUSE = nx.Graph([(0, 1), (1, 2), (2, 3), (3, 0), (4, 0), (4, 1)])


@pytest.mark.parametrize(
    ("module", "nodes", "motif", "edges"),
    [
        (BAShapesDataModule(), 700, HOUSE, 5 + 5 * 294 + 80 * 7),
        (TreeCyclesDataModule(), 871, nx.cycle_graph(6), 510 + 60 * 7),
        (TreeGridDataModule(), 1231, nx.grid_2d_graph(3, 3), 510 + 80 * 13),
    ],
)
def test_motifs_are_planted(module, nodes, motif, edges):
    module.random_edges = 0.0
    graph = module.graph
    assert graph.num_nodes == nodes
    pairs = undirected_pairs(graph.edge_index, nodes)
    assert 2 * len(pairs) == graph.edge_index.shape[1]
    assert len(pairs) == edges
    whole = nx.Graph(pairs.tolist())
    assert nx.is_connected(whole)
    size = motif.number_of_nodes()
    assert torch.equal(graph.motif.unique(return_counts=True)[1][1:], torch.full((module.num_motifs,), size))
    assert torch.equal(graph.y > 0, graph.motif >= 0)
    for number in (0, module.num_motifs - 1):
        members = (graph.motif == number).nonzero().flatten().tolist()
        assert nx.is_isomorphic(whole.subgraph(members), motif)
        outside = [(u, v) for u, v in whole.edges(members) if graph.motif[u] != graph.motif[v]]
        assert len(outside) == 1
        assert min(int(graph.motif[end]) for end in outside[0]) == -1
    masks = torch.stack([graph.train_mask, graph.val_mask, graph.test_mask])
    assert (masks.sum(dim=0) == 1).all()
    assert masks.sum(dim=1).tolist() == pytest.approx([0.8 * nodes, 0.1 * nodes, 0.1 * nodes], abs=2)


def test_roles_in_a_house():
    graph = BAShapesDataModule(num_base=10, num_motifs=3, random_edges=0).graph
    house = nx.Graph(undirected_pairs(graph.edge_index, 25).tolist()).subgraph(range(10, 15))
    roof = [node for node in house if graph.y[node] == 3]
    assert len(roof) == 1
    assert sorted(house[roof[0]]) == [node for node in house if graph.y[node] == 1]
    assert graph.y[10:15].sort().values.tolist() == [1, 1, 2, 2, 3]


def test_random_edges_features_and_seed():
    clean, noisy = (BAShapesDataModule(num_base=60, attach=3, num_motifs=12, random_edges=share) for share in (0, 0.1))
    edges = clean.graph.edge_index.shape[1]
    assert noisy.graph.edge_index.shape[1] == edges + 2 * round(0.1 * edges / 2) or (
        noisy.graph.edge_index.shape[1] > 1.07 * edges  # two draws of one pair count once
    )
    module = BAShapesDataModule(num_base=60, attach=3, num_motifs=12, noise_features=4, noise=0.5)
    assert (module.graph.x[:, :6] == 1).all()
    assert module.graph.x[:, 6:].std().item() == pytest.approx(0.5, rel=0.15)
    again = BAShapesDataModule(num_base=60, attach=3, num_motifs=12, noise_features=4, noise=0.5)
    assert torch.equal(again.graph.x, module.graph.x)
    assert torch.equal(again.graph.edge_index, module.graph.edge_index)
    other = BAShapesDataModule(num_base=60, attach=3, num_motifs=12, seed=1)
    assert not torch.equal(other.graph.edge_index, again.graph.edge_index)
    assert (module.num_features, module.num_classes) == (10, 4)


def test_preferential_attachment_has_hubs():
    graph = BAShapesDataModule(num_motifs=1, random_edges=0).graph
    degree = torch.bincount(graph.edge_index[0])[:300]
    assert degree.min() >= 5 or degree.min() == 1  # leaves of the first star may stay
    assert degree.max() > 6 * degree.float().mean() / 2


def test_loaders_yield_the_one_graph():
    module = BAShapesDataModule(num_base=20, num_motifs=2, steps_per_epoch=3)
    module.setup("fit")
    first = module.graph
    module.setup("test")
    batches = list(module.train_dataloader())
    assert len(batches) == 3
    assert all(isinstance(batch, Graph) and batch.x is first.x for batch in batches)
    assert len(list(module.val_dataloader())) == len(list(module.test_dataloader())) == 1


def test_held_out_links():
    module = BAShapesDataModule(val_links=0.1, test_links=0.2)
    whole = BAShapesDataModule().graph
    train, val, test = (
        next(iter(loader)) for loader in (module.train_dataloader(), module.val_dataloader(), module.test_dataloader())
    )
    total = whole.edge_index.shape[1] // 2

    def pairs(edge_index):
        return set(map(tuple, undirected_pairs(edge_index, 700).tolist()))

    everything = pairs(whole.edge_index)
    held = {}
    for name, graph, share in (("val", val, 0.1), ("test", test, 0.2)):
        positive = graph.edge_label_index[:, graph.edge_label == 1]
        negative = graph.edge_label_index[:, graph.edge_label == 0]
        assert positive.shape == negative.shape == (2, int(share * total))
        held[name] = pairs(positive)
        assert len(held[name]) == int(share * total)
        assert not pairs(negative) & everything
    assert train.edge_label is None
    assert torch.equal(train.edge_index, val.edge_index)
    parts = (pairs(train.edge_index), held["val"], held["test"])
    assert sum(map(len, parts)) == total
    assert set.union(*parts) == everything
    assert pairs(test.edge_index) == parts[0] | parts[1]


# the authors' pickles


def test_pickle_of_the_authors(tmp_path):
    source = BAShapesDataModule(num_base=10, num_motifs=3, random_edges=0).graph
    n = source.num_nodes
    adjacency = torch.zeros(n, n).index_put((source.edge_index[0], source.edge_index[1]), torch.ones(1)).numpy()
    inside = (source.motif[:, None] == source.motif[None]) & (source.motif >= 0)
    planted = np.triu(adjacency * inside.numpy())  # one direction is enough
    one_hot = torch.nn.functional.one_hot(source.y, 4).numpy()
    masks = [mask.numpy() for mask in (source.train_mask, source.val_mask, source.test_mask)]
    content = (adjacency, source.x.double().numpy(), *(one_hot * mask[:, None] for mask in masks), *masks, planted)
    (tmp_path / "syn1.pkl").write_bytes(pickle.dumps(content))
    graph = BAShapesDataModule(path=str(tmp_path / "syn1.pkl")).graph
    for name in ("x", "edge_index", "y", "motif", "train_mask", "val_mask", "test_mask"):
        assert torch.equal(getattr(graph, name), getattr(source, name)), name
    with pytest.raises(FileNotFoundError, match="hjkng/unrexplainer"):
        TreeCyclesDataModule(path=str(tmp_path / "syn3.pkl")).setup()


# citation networks


def write_planetoid(folder, name, gap):
    """7 nodes in allx (3 labelled), test nodes 7 .. 9, of which ``gap`` has no row."""
    rng = np.random.default_rng(0)
    test = [i for i in (9, 7, 8) if i != gap]
    x = sp.csr_matrix((rng.random((7, 4)) * (rng.random((7, 4)) < 0.6)).astype(np.float32))
    tx = sp.csr_matrix((1 + np.arange(4 * len(test)).reshape(-1, 4)).astype(np.float32))
    y = np.eye(3, dtype=np.int32)[rng.integers(3, size=7)]
    ty = np.eye(3, dtype=np.int32)[[i % 3 for i in range(len(test))]]
    graph = defaultdict(list, {i: [(i + 1) % 10] for i in range(10)} | {0: [1, 1, 0, 9]})
    parts = {"x": x[:3], "y": y[:3], "allx": x, "ally": y, "tx": tx, "ty": ty, "graph": graph}
    folder.mkdir(parents=True)
    for part, value in parts.items():
        (folder / f"ind.{name}.{part}").write_bytes(pickle.dumps(value, protocol=0 if name == "cora" else 2))
    (folder / f"ind.{name}.test.index").write_text("".join(f"{i}\n" for i in test))
    return parts, test


@pytest.mark.parametrize(("name", "place", "gap"), [("cora", "raw", None), ("citeseer", "CiteSeer/raw", 8)])
def test_planetoid(tmp_path, name, place, gap):
    parts, test = write_planetoid(tmp_path / place, name, gap)
    module = NodeGraphDataModule(str(tmp_path), name, normalize_features=False)
    module.prepare_data()
    graph = module.graph
    assert graph.num_nodes == 10
    assert torch.equal(graph.x[:7], torch.from_numpy(parts["allx"].toarray()))
    for row, node in enumerate(test):
        assert graph.x[node].tolist() == parts["tx"].toarray()[row].tolist()
        assert graph.y[node] == parts["ty"][row].argmax()
    assert graph.y[:7].tolist() == parts["ally"].argmax(1).tolist()
    if gap is not None:
        assert graph.x[gap].abs().sum() == 0
        assert not graph.test_mask[gap]
    assert graph.train_mask.nonzero().flatten().tolist() == [0, 1, 2]
    assert graph.val_mask.nonzero().flatten().tolist() == [3, 4, 5, 6]
    assert graph.test_mask.nonzero().flatten().tolist() == sorted(test)
    ring = torch.arange(10)
    assert torch.equal(graph.edge_index, to_undirected(torch.stack([ring, ring.roll(-1)]), 10))  # no loop, no double
    normalised = NodeGraphDataModule(str(tmp_path), name).graph.x
    sums = graph.x.sum(1)
    torch.testing.assert_close(normalised, graph.x / torch.where(sums > 0, sums, 1)[:, None])
    links = NodeGraphDataModule(str(tmp_path), name, task="link", test_links=0.2)
    assert next(iter(links.test_dataloader())).edge_label.tolist() == [1, 1, 0, 0]
    assert links.graph.edge_index.shape[1] == 16


def test_a_pickle_with_code_is_refused(tmp_path):
    write_planetoid(tmp_path / "raw", "cora", None)
    (tmp_path / "raw" / "ind.cora.graph").write_bytes(pickle.dumps(print))
    with pytest.raises(pickle.UnpicklingError, match="not plain data"):
        NodeGraphDataModule(str(tmp_path), "cora").setup()


# products and authors


def test_npz(tmp_path):
    rng = np.random.default_rng(0)
    n = 90
    adjacency = sp.random(n, n, 0.05, format="csr", dtype=np.float32, random_state=0)
    x = sp.csr_matrix(rng.random((n, 5)).astype(np.float32))
    labels = rng.permutation(np.repeat(np.arange(3), 30))
    arrays = {"labels": labels, "class_names": np.array(["a", None], dtype=object)}
    for name, matrix in (("adj", adjacency), ("attr", x)):
        arrays |= {f"{name}_{part}": getattr(matrix, part) for part in ("data", "indices", "indptr", "shape")}
    np.savez(tmp_path / "amazon_electronics_photo.npz", **arrays)
    module = NodeGraphDataModule(str(tmp_path), "photo", train_per_class=4, val_per_class=5)
    module.prepare_data()
    graph = module.graph
    dense = (adjacency.toarray() + adjacency.toarray().T) > 0
    np.fill_diagonal(dense, False)
    assert torch.equal(graph.edge_index, torch.from_numpy(dense).nonzero().T)
    torch.testing.assert_close(graph.x, torch.from_numpy(x.toarray() / x.toarray().sum(1)[:, None]))
    for mask, each in ((graph.train_mask, 4), (graph.val_mask, 5), (graph.test_mask, 21)):
        assert torch.bincount(graph.y[mask]).tolist() == [each] * 3
    assert not (graph.train_mask & graph.val_mask | graph.train_mask & graph.test_mask).any()


def test_what_is_missing_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"ind.cora.x.*kimiyoung/planetoid"):
        NodeGraphDataModule(str(tmp_path), "cora").prepare_data()
    with pytest.raises(FileNotFoundError, match=r"ms_academic_cs.npz.*gnn-benchmark"):
        NodeGraphDataModule(str(tmp_path), "cs").setup()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: NodeGraphDataModule("x", "coral"), "Did you mean 'cora'"),
        (lambda: NodeGraphDataModule("x", task="edges"), "task must be"),
        (lambda: NodeGraphDataModule("x", test_links=0.1), "task='link'"),
        (lambda: BAShapesDataModule(val_links=0.6, test_links=0.5), "test_links must be"),
        (lambda: BAShapesDataModule(num_base=3), "num_base must be"),
        (lambda: BAShapesDataModule(noise_features=11), "noise_features must be"),
        (lambda: TreeGridDataModule(depth=0), "depth must be"),
        (lambda: TreeCyclesDataModule(steps_per_epoch=0), "steps_per_epoch must be"),
    ],
)
def test_bad_options(call, message):
    with pytest.raises(ValueError, match=message):
        call()
