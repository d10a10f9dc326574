"""How large the workloads are: on a GPU, on a CPU, and for a quick run."""

from typing import NamedTuple


class Size(NamedTuple):
    """A transformer is (width, layers, vocabulary)."""

    tree: tuple[int, int, int]  # for updates alone
    muon_tree: tuple[int, int, int]  # smaller where matrix products are slow
    transformer: tuple[int, int, int]
    tokens: tuple[int, int]  # batch, length
    convnet: tuple[int, list[int], int]  # width, blocks, classes
    images: tuple[int, int]  # batch, pixels
    many_leaves: tuple[int, int]  # leaves, width


GPU = Size(
    tree=(512, 4, 8000),
    muon_tree=(512, 4, 8000),
    transformer=(1024, 4, 16000),
    tokens=(8, 512),
    convnet=(64, [3, 4, 6, 3], 1000),
    images=(64, 224),
    many_leaves=(1000, 64),
)
CPU = GPU._replace(
    muon_tree=(128, 4, 1000),
    transformer=(128, 4, 1000),
    tokens=(2, 32),
    convnet=(16, [1, 1], 10),
    images=(4, 32),
    many_leaves=(1000, 16),
)
TINY = CPU._replace(
    tree=(32, 2, 100),
    muon_tree=(16, 1, 50),
    transformer=(32, 1, 50),
    tokens=(1, 8),
    convnet=(4, [1], 4),
    images=(1, 16),
    many_leaves=(3, 8),
)
QUICK = CPU._replace(
    tree=(128, 4, 1000),
    muon_tree=(64, 2, 500),
    transformer=(64, 1, 500),
    many_leaves=(50, 16),
)
SIZES = {"gpu": GPU, "cpu": CPU, "quick": QUICK, "tiny": TINY}
