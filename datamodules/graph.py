"""Graphs: planted motifs, citation networks, co-purchases and co-authorships. A loader yields the one graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_methods.core.checks import check_choice, check_range
from lightning_methods.core.io import safe_unpickle
from lightning_methods.core.random import make_generator
from lightning_methods.graph.ops import negative_edges, remove_self_loops, to_undirected, undirected_pairs
from lightning_methods.graph.types import Graph

__all__ = ["BAShapesDataModule", "NodeGraphDataModule", "TreeCyclesDataModule", "TreeGridDataModule"]


def _itself(graph: Graph) -> Graph:
    return graph


class _GraphDataModule(LightningDataModule):
    """One graph, with links held out for validation and test where they are wanted.

    Args:
        val_links: share of the edges held out for validation, in [0, 1).
        test_links: share held out for the test.
        steps_per_epoch: how often the training loader yields the graph.
        num_workers: accepted as everywhere; the graph is in memory already, so that workers have nothing to load.
        seed: of what is generated and of the splits.
    """

    def __init__(
        self,
        val_links: float = 0.0,
        test_links: float = 0.0,
        steps_per_epoch: int = 1,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_range("val_links", val_links, 0, 1, high_open=True)
        check_range("test_links", test_links, 0, 1 - val_links, high_open=True)
        check_range("steps_per_epoch", steps_per_epoch, 1)
        check_range("num_workers", num_workers, 0)
        self.val_links, self.test_links = val_links, test_links
        self.steps_per_epoch, self.num_workers, self.seed = steps_per_epoch, num_workers, seed
        self._graphs: dict[str, Graph] = {}

    def load_graph(self) -> Graph:
        """The whole graph."""
        raise NotImplementedError(f"{type(self).__name__} must implement load_graph.")

    def setup(self, stage: str | None = None) -> None:
        """Load or generate the graph and hold links out; a second call changes nothing."""
        if not self._graphs:
            self._graphs = split_links(self.load_graph(), self.val_links, self.test_links, self.seed)

    def _graph(self, split: str) -> Graph:
        self.setup()
        return self._graphs[split]

    @property
    def graph(self) -> Graph:
        """The training graph."""
        return self._graph("train")

    @property
    def num_features(self) -> int:
        """Features of a node."""
        return self.graph.x.shape[1]

    @property
    def num_classes(self) -> int:
        """Classes of the nodes."""
        return int(self.graph.y.max()) + 1

    def _loader(self, split: str, steps: int = 1) -> DataLoader:
        return DataLoader([self._graph(split)] * steps, batch_size=None, collate_fn=_itself)

    def train_dataloader(self) -> DataLoader:
        """The graph without the held-out links, ``steps_per_epoch`` times."""
        return self._loader("train", self.steps_per_epoch)

    def val_dataloader(self) -> DataLoader:
        """The same graph with the links of the validation, if any."""
        return self._loader("val")

    def test_dataloader(self) -> DataLoader:
        """The graph with all but the test's links, which it carries apart."""
        return self._loader("test")

    def predict_dataloader(self) -> DataLoader:
        """The graph of the test."""
        return self.test_dataloader()


def split_links(graph: Graph, val: float, test: float, seed: int) -> dict[str, Graph]:
    """Hold out undirected edges, with as many fixed pairs that are no edges of the whole graph.

    Training and validation see the training edges, the test those of the validation too.

    Args:
        graph: undirected.
        val: share of the edges.
        test: share of the edges.
        seed: of the choice.

    Raises:
        ValueError: nothing would be left for the training.
    """
    if val == test == 0:
        return dict.fromkeys(("train", "val", "test"), graph)
    pairs = undirected_pairs(graph.edge_index, graph.num_nodes)
    sizes = {"val": int(val * len(pairs)), "test": int(test * len(pairs))}
    if len(pairs) - sum(sizes.values()) < 1:
        raise ValueError(f"val_links={val} and test_links={test} leave none of the {len(pairs)} edges for training.")
    generator = make_generator(seed, "held-out links")
    pairs = pairs[torch.randperm(len(pairs), generator=generator)]
    counts = [sizes["test"], sizes["val"], len(pairs) - sum(sizes.values())]
    parts = dict(zip(("test", "val", "train"), pairs.split(counts), strict=True))
    edges = {
        "train": parts["train"],
        "val": parts["train"],
        "test": torch.cat([parts["train"], parts["val"]]),
    }
    graphs = {}
    for split, kept in edges.items():
        fields: dict[str, Any] = {"edge_index": to_undirected(kept.T, graph.num_nodes), "edge_weight": None}
        held_out = parts[split]
        if split != "train" and len(held_out):
            negative = negative_edges(graph.edge_index, graph.num_nodes, len(held_out), generator)
            fields["edge_label_index"] = torch.cat([held_out.T, negative], dim=1)
            fields["edge_label"] = torch.arange(2 * len(held_out)).lt(len(held_out)).long()
        graphs[split] = graph._replace(**fields)
    return graphs


def random_masks(n: int, shares: Sequence[float], generator: torch.Generator) -> list[Tensor]:
    """Masks of random disjoint parts; the last one takes the rest."""
    order = torch.randperm(n, generator=generator)
    ends = [round(n * sum(shares[: i + 1])) for i in range(len(shares))] + [n]
    masks = torch.zeros(len(ends), n, dtype=torch.bool)
    for mask, start, end in zip(masks, [0, *ends[:-1]], ends, strict=True):
        mask[order[start:end]] = True
    return list(masks)


# planted motifs

HOUSE = [(0, 1), (1, 2), (2, 3), (3, 0), (4, 0), (4, 1)]  # 0, 1 under the roof 4; 2, 3 the ground
HOUSE_LABELS = [1, 1, 2, 2, 3]
CYCLE = [(i, (i + 1) % 6) for i in range(6)]
GRID = [(3 * r + c, 3 * r + c + 1) for r in range(3) for c in range(2)]
GRID += [(3 * r + c, 3 * r + c + 3) for r in range(2) for c in range(3)]


def balanced_tree(depth: int) -> list[tuple[int, int]]:
    """Edges of the binary tree with 2^(depth + 1) - 1 nodes."""
    return [((child - 1) // 2, child) for child in range(1, 2 ** (depth + 1) - 1)]


def preferential_attachment(n: int, m: int, generator: torch.Generator) -> list[tuple[int, int]]:
    """Edges of a Barabasi-Albert graph: each node joins m different ones with probability by degree.

    It starts from a star of m + 1 nodes.
    """
    edges = [(0, other) for other in range(1, m + 1)]
    ends = [end for edge in edges for end in edge]  # a node stands here once for each of its edges
    for node in range(m + 1, n):
        targets: set[int] = set()
        while len(targets) < m:
            targets.add(ends[int(torch.randint(len(ends), (), generator=generator))])
        edges += [(other, node) for other in sorted(targets)]
        ends += [*sorted(targets), *[node] * m]
    return edges


class _MotifDataModule(_GraphDataModule):
    """A base graph with motifs attached to random nodes of it, and random edges over all.

    Args:
        num_motifs: how many; each is joined by one edge to a node of the base, different ones as long as there are.
        random_edges: further edges between random nodes, as a share of all edges.
        num_features: features of a node.
        noise_features: the last so many features are normal noise of deviation ``noise``; the others are 1.
        noise: see there.
        path: read the graph from this file of the authors instead (a pickle with adjacency, features, one-hot labels
            and masks of training, validation and test, and the matrix of the motifs' edges).
        **kwargs: ``val_links``, ``test_links``, ``steps_per_epoch``, ``num_workers``, ``seed``.
    """

    motif_edges: Sequence[tuple[int, int]]
    motif_labels: Sequence[int]

    def __init__(
        self,
        num_motifs: int,
        random_edges: float = 0.1,
        num_features: int = 10,
        noise_features: int = 0,
        noise: float = 0.1,
        path: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_range("num_motifs", num_motifs, 1)
        check_range("random_edges", random_edges, 0)
        check_range("num_features", num_features, 1)
        check_range("noise_features", noise_features, 0, num_features)
        check_range("noise", noise, 0)
        self.num_motifs, self.random_edges = num_motifs, random_edges
        self.feature_counts, self.noise = (num_features - noise_features, noise_features), noise
        self.path = path

    def base_edges(self, generator: torch.Generator) -> tuple[int, list[tuple[int, int]]]:
        """Number of nodes and edges of the base."""
        raise NotImplementedError(f"{type(self).__name__} must implement base_edges.")

    def load_graph(self) -> Graph:
        """Generate the graph, or read the authors' file."""
        if self.path is not None:
            return read_motif_pickle(Path(self.path))
        generator = make_generator(self.seed, type(self).__name__)
        base, edges = self.base_edges(generator)
        size = len(self.motif_labels)
        anchors = [torch.randperm(base, generator=generator) for _ in range(math.ceil(self.num_motifs / base))]
        anchors = torch.cat(anchors)[: self.num_motifs].tolist()
        for number, anchor in enumerate(anchors):
            start = base + number * size
            edges += [(start + u, start + v) for u, v in self.motif_edges] + [(anchor, start)]
        n = base + self.num_motifs * size
        edge_index = to_undirected(torch.tensor(edges).T, n)
        extra = negative_edges(edge_index, n, round(self.random_edges * edge_index.shape[1] / 2), generator)
        planted = torch.arange(n - base)
        y = torch.cat([torch.zeros(base, dtype=torch.int64), torch.tensor(self.motif_labels)[planted % size]])
        ones, noisy = self.feature_counts
        masks = random_masks(n, (0.8, 0.1), generator)
        return Graph(
            x=torch.cat([torch.ones(n, ones), self.noise * torch.randn(n, noisy, generator=generator)], dim=1),
            edge_index=to_undirected(torch.cat([edge_index, extra], dim=1), n),
            y=y,
            motif=torch.cat([torch.full((base,), -1), planted // size]),
            **dict(zip(("train_mask", "val_mask", "test_mask"), masks, strict=True)),
        )


class BAShapesDataModule(_MotifDataModule):
    """BA-Shapes: houses of five nodes on a Barabasi-Albert graph; by default 700 nodes.

    Source: Ying et al., "GNNExplainer", NeurIPS 2019. Classes: 0 the base, 1 the nodes under the roof, 2 the ground, 3
    the roof; ``motif`` is the house of a node, -1 in the base. With all features equal to 1 many nodes have the same
    embedding; ``noise_features`` tells them apart.

    Args:
        num_base: nodes of the base.
        attach: edges that each of them brings.
        num_motifs: number of houses.
        **kwargs: ``random_edges=0.1`` (share of all edges that is added between random nodes), ``num_features=10``,
            ``noise_features=0`` (of these, normal noise instead of 1), ``noise=0.1`` (its deviation), ``path=None``
            (the authors' ``syn1.pkl`` instead), ``val_links=0``, ``test_links=0`` (shares of held-out edges),
            ``steps_per_epoch=1`` (how often the training loader yields the graph), ``num_workers``, ``seed=0``.

    Raises:
        ValueError: an argument is out of range.
    """

    motif_edges = HOUSE
    motif_labels = HOUSE_LABELS

    def __init__(self, num_base: int = 300, attach: int = 5, num_motifs: int = 80, **kwargs: Any) -> None:
        super().__init__(num_motifs, **kwargs)
        check_range("attach", attach, 1)
        check_range("num_base", num_base, attach + 1)
        self.num_base, self.attach = num_base, attach

    def base_edges(self, generator: torch.Generator) -> tuple[int, list[tuple[int, int]]]:
        """The Barabasi-Albert graph."""
        return self.num_base, preferential_attachment(self.num_base, self.attach, generator)


class TreeCyclesDataModule(_MotifDataModule):
    """Tree-Cycles: cycles of six nodes on a balanced binary tree; by default 871 nodes.

    Class and motif as in :class:`BAShapesDataModule`, with class 1 for all nodes of cycles.

    Args:
        depth: of the tree, which has ``2^(depth + 1) - 1`` nodes.
        num_motifs: number of cycles.
        **kwargs: as of :class:`BAShapesDataModule`; the authors' file is ``syn3.pkl``.

    Raises:
        ValueError: an argument is out of range.
    """

    motif_edges = CYCLE
    motif_labels = [1] * 6

    def __init__(self, depth: int = 8, num_motifs: int = 60, **kwargs: Any) -> None:
        super().__init__(num_motifs, **kwargs)
        check_range("depth", depth, 1, 20)
        self.depth = depth

    def base_edges(self, generator: torch.Generator) -> tuple[int, list[tuple[int, int]]]:
        """The tree."""
        return 2 ** (self.depth + 1) - 1, balanced_tree(self.depth)


class TreeGridDataModule(TreeCyclesDataModule):
    """Tree-Grid: grids of three by three nodes on a balanced binary tree; by default 1231 nodes.

    Class and motif as in :class:`BAShapesDataModule`, with class 1 for all nodes of grids.

    Args:
        depth: of the tree, which has ``2^(depth + 1) - 1`` nodes.
        num_motifs: number of grids.
        **kwargs: as of :class:`BAShapesDataModule`; the authors' file is ``syn4.pkl``.

    Raises:
        ValueError: an argument is out of range.
    """

    motif_edges = GRID
    motif_labels = [1] * 9

    def __init__(self, depth: int = 8, num_motifs: int = 80, **kwargs: Any) -> None:
        super().__init__(depth, num_motifs, **kwargs)


def read_motif_pickle(path: Path) -> Graph:
    """Read ``syn1.pkl`` and its kin: nine arrays, from the adjacency to the matrix of the motifs' edges.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has other content.
    """
    from scipy.sparse.csgraph import connected_components

    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there. The authors' repository hjkng/unrexplainer has it in dataset/.")
    content = safe_unpickle(path)
    if not isinstance(content, (tuple, list)) or len(content) != 9:
        raise ValueError(f"{path} must hold nine arrays (adj, features, y and masks of three parts, edge labels).")
    arrays = [np.asarray(part.todense() if hasattr(part, "todense") else part) for part in content]
    adjacency, x, *rest, planted = (part[0] if part.ndim == 3 and len(part) == 1 else part for part in arrays)
    labels, masks = rest[:3], rest[3:]
    n = len(x)
    if adjacency.shape != (n, n) or planted.shape != (n, n):
        raise ValueError(f"{path}: features of {n} nodes, adjacency {adjacency.shape}, edge labels {planted.shape}.")
    planted = (planted > 0) | (planted > 0).T
    _, component = connected_components(planted, directed=False)
    inside = planted.any(axis=1)
    motif = np.full(n, -1)
    motif[inside] = np.unique(component[inside], return_inverse=True)[1]
    edges = torch.from_numpy(np.stack(adjacency.nonzero()))
    return Graph(
        x=torch.from_numpy(x.astype(np.float32)),
        edge_index=to_undirected(remove_self_loops(edges), n),
        y=torch.from_numpy(sum(part.astype(np.float64) for part in labels).argmax(axis=1)),
        motif=torch.from_numpy(motif),
        **{
            f"{name}_mask": torch.from_numpy(mask.reshape(-1).astype(bool))
            for name, mask in zip(("train", "val", "test"), masks, strict=True)
        },
    )


# graphs of papers, products and authors

PLANETOID = ("cora", "citeseer", "pubmed")
PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
NPZ = {
    "computers": "amazon_electronics_computers.npz",
    "photo": "amazon_electronics_photo.npz",
    "cs": "ms_academic_cs.npz",
    "physics": "ms_academic_phy.npz",
}


class NodeGraphDataModule(_GraphDataModule):
    """Citation networks (Cora, CiteSeer, PubMed), Amazon co-purchases and co-authorships, from their usual files.

    Citation networks are the eight files ``ind.<name>.{x, tx, allx, y, ty, ally, graph, test.index}`` of Planetoid,
    with its split of the nodes; the others one ``.npz`` file, with ``train_per_class`` and ``val_per_class`` random
    nodes of each class for training and validation and the rest for the test. The files are looked for in ``root``, in
    ``root/<name>`` and in the folder ``raw`` of either.

    Args:
        root: folder of the files.
        name: "cora", "citeseer", "pubmed"; "computers", "photo" (Amazon); "cs", "physics" (co-authorship).
        task: "node" keeps all edges; "link" holds ``test_links`` of them out.
        normalize_features: scale the features of each node to a sum of 1.
        val_links: share of the edges held out for the validation of task "link".
        test_links: share of the edges held out for its test; None is 0.1 for the task "link".
        train_per_class: see above.
        val_per_class: see above.
        download: fetch the files by torch_geometric (``pip install torch_geometric``) if they are not there.
        **kwargs: ``steps_per_epoch=1`` (how often the training loader yields the graph), ``num_workers``, ``seed=0``.

    Raises:
        ValueError: an unknown name or task, held-out links for the task "node", or a number out of range.
    """

    downloads = True

    def __init__(
        self,
        root: str = "data/graphs",
        name: Literal["cora", "citeseer", "pubmed", "computers", "photo", "cs", "physics"] = "cora",
        task: Literal["node", "link"] = "node",
        normalize_features: bool = True,
        val_links: float = 0.0,
        test_links: float | None = None,
        train_per_class: int = 20,
        val_per_class: int = 30,
        download: bool = False,
        **kwargs: Any,
    ) -> None:
        check_choice("name", name, (*PLANETOID, *NPZ))
        check_choice("task", task, ("node", "link"))
        if task == "node" and (val_links or test_links):
            raise ValueError("val_links and test_links are for task='link'; task='node' keeps all edges.")
        default = 0.1 if task == "link" else 0.0
        super().__init__(val_links=val_links, test_links=default if test_links is None else test_links, **kwargs)
        check_range("train_per_class", train_per_class, 1)
        check_range("val_per_class", val_per_class, 0)
        self.root, self.name, self.task, self.download = Path(root), name, task, download
        self.normalize_features = normalize_features
        self.per_class = (train_per_class, val_per_class)

    @property
    def file_names(self) -> list[str]:
        """The files that have to be there."""
        return [f"ind.{self.name}.{part}" for part in PARTS] if self.name in PLANETOID else [NPZ[self.name]]

    def find_folder(self) -> Path | None:
        """The folder with all the files, if there is one."""
        names = (
            self.name,
            self.name.capitalize(),
            {"citeseer": "CiteSeer", "pubmed": "PubMed", "cs": "CS"}.get(self.name),
        )
        for home in (self.root, *(self.root / name for name in names if name)):
            for folder in (home, home / "raw"):
                if all((folder / file).is_file() for file in self.file_names):
                    return folder
        return None

    def prepare_data(self) -> None:
        """Fetch the files if that is allowed and they are not there.

        Raises:
            FileNotFoundError: they are not there and ``download`` is False.
            ImportError: torch_geometric is not installed.
        """
        if self.find_folder() is not None:
            return
        if not self.download:
            raise FileNotFoundError(self._missing())
        try:
            from torch_geometric import datasets
        except ImportError:
            raise ImportError("download=True needs torch_geometric: pip install torch_geometric.") from None
        if self.name in PLANETOID:
            datasets.Planetoid(str(self.root), {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}[self.name])
        elif self.name in ("computers", "photo"):
            datasets.Amazon(str(self.root), self.name.capitalize())
        else:
            datasets.Coauthor(str(self.root), {"cs": "CS", "physics": "Physics"}[self.name])

    def _missing(self) -> str:
        where = (
            "https://github.com/kimiyoung/planetoid (folder data)"
            if self.name in PLANETOID
            else "https://github.com/shchur/gnn-benchmark (folder data/npz)"
        )
        return (
            f"{', '.join(self.file_names)} not found in {self.root}: get them from {where}, or set download=True "
            "(needs torch_geometric)."
        )

    def load_graph(self) -> Graph:
        """Read the files."""
        folder = self.find_folder()
        if folder is None:
            raise FileNotFoundError(self._missing())
        if self.name in PLANETOID:
            graph = read_planetoid(folder, self.name)
        else:
            graph = read_npz(folder / NPZ[self.name], self.per_class, make_generator(self.seed, "masks"))
        if not self.normalize_features:
            return graph
        total = graph.x.sum(dim=1, keepdim=True)
        return graph._replace(x=graph.x / torch.where(total > 0, total, 1))


def _dense(matrix: Any) -> Tensor:
    return torch.from_numpy(np.asarray(matrix.todense() if hasattr(matrix, "todense") else matrix, dtype=np.float32))


def read_planetoid(folder: Path, name: str) -> Graph:
    """Read the eight files of a citation network.

    The test nodes stand in ``tx`` and ``ty`` in the order of ``test.index``. CiteSeer's test range has numbers without
    a node there: these nodes get no features, class 0, and are in no mask.

    Raises:
        ValueError: the numbers of rows do not fit.
    """
    # Python 2 wrote the files: its names of lists and objects, and of the function that makes an object anew.
    old = ("__builtin__.list", "__builtin__.object", "copy_reg._reconstructor")
    allowed = ("builtins", "numpy", "scipy.sparse", "collections.defaultdict", *old)
    parts = {part: safe_unpickle(folder / f"ind.{name}.{part}", allowed) for part in PARTS[:-1]}
    test = torch.tensor([int(line) for line in (folder / f"ind.{name}.test.index").read_text().split()])
    x, tx, y, ty = (_dense(parts[part]) for part in ("allx", "tx", "ally", "ty"))
    if len(test) != len(tx) or len(tx) != len(ty) or len(x) != len(y):
        raise ValueError(
            f"{folder}: {len(test)} test nodes, but tx, ty, allx, ally have {[*map(len, (tx, ty, x, y))]}."
        )
    n = max(int(test.max()) + 1, len(x), len(parts["graph"]))
    features, classes = torch.zeros(n, x.shape[1]), torch.zeros(n, y.shape[1])
    features[: len(x)], classes[: len(y)] = x, y
    features[test], classes[test] = tx, ty
    masks = torch.zeros(3, n, dtype=torch.bool)
    labelled = len(parts["y"])
    masks[0, :labelled] = True
    masks[1, labelled : min(labelled + 500, len(x))] = True
    masks[2, test] = True
    pairs = [(int(u), int(v)) for u, others in parts["graph"].items() for v in others]
    edge_index = to_undirected(remove_self_loops(torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T), n)
    return Graph(
        features, edge_index, y=classes.argmax(dim=1), train_mask=masks[0], val_mask=masks[1], test_mask=masks[2]
    )


def read_npz(path: Path, per_class: tuple[int, int], generator: torch.Generator) -> Graph:
    """Read one of the benchmark's ``.npz`` files: adjacency and attributes as CSR matrices, and labels.

    Args:
        path: the file.
        per_class: training and validation nodes of each class.
        generator: of the split.
    """
    from scipy.sparse import csr_matrix

    with np.load(path, allow_pickle=False) as file:

        def matrix(name: str) -> Any:
            return csr_matrix(
                tuple(file[f"{name}_{part}"] for part in ("data", "indices", "indptr")), shape=file[f"{name}_shape"]
            )

        adjacency, x, y = matrix("adj").tocoo(), matrix("attr"), torch.from_numpy(file["labels"]).long()
    edges = torch.from_numpy(np.stack([adjacency.row, adjacency.col]).astype(np.int64))
    masks = torch.zeros(3, len(y), dtype=torch.bool)
    for label in y.unique():
        members = (y == label).nonzero().flatten()
        members = members[torch.randperm(len(members), generator=generator)]
        sizes = (per_class[0], per_class[0] + per_class[1])
        for mask, part in zip(masks, members.tensor_split(sizes), strict=True):
            mask[part] = True
    edge_index = to_undirected(remove_self_loops(edges), len(y))
    return Graph(_dense(x), edge_index, y=y, train_mask=masks[0], val_mask=masks[1], test_mask=masks[2])
