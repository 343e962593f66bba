"""Every table and figure of the five papers: its name, its numbers, and the measurement that repeats it.

An entry without a measurement has the reason why it is not repeated here. `gc-bench paper NAME` measures an
entry by its name, such as `001-table1`. `pages` writes the entries into docs/papers, beside our numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["table", "figure"]


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A paper whose methods Gradwire has.

    Attributes:
        key: number of the paper, which begins the names of its entries.
        page: name of its page in docs/papers, without `.md`.
        title, authors, year, published: bibliographic data.
        tables, figures: numbers of all tables and figures that the paper has.
    """

    key: str
    page: str
    title: str
    authors: str
    year: int
    published: str
    tables: Sequence[str]
    figures: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A table or figure of a paper. It has either a measurement or a reason.

    Attributes:
        paper: key of the paper.
        kind: whether it is a table or a figure.
        number: its number in the paper.
        title: its title in English.
        theirs: the paper's numbers, or the content of its picture, as Markdown.
        measurement: name of the measurement that repeats it, in `repeats.MEASUREMENTS`; "" for none.
        differs: settings of the measurement that differ from the paper's.
        reason: why it is not repeated here; "" if it is.
    """

    paper: str
    kind: Kind
    number: str
    title: str
    theirs: str = "–"
    measurement: str = ""
    differs: str = ""
    reason: str = ""

    @property
    def name(self) -> str:
        """Name of the entry on the command line, such as `001-table1`."""
        return f"{self.paper}-{self.kind}{self.number}"


PAPERS = (
    Paper(
        key="000",
        page="000-thesis",
        title="Research on Gradient Compression Method for Distributed Deep Learning and Its Application",
        authors="Lu Tian'en; supervisor Xie Weiying",
        year=2024,
        published="Master's thesis, Xidian University, March 2024",
        tables=(
            "1.1",
            *("2.1", "2.2", "2.3"),
            *(f"3.{n}" for n in range(1, 7)),
            *(f"4.{n}" for n in range(1, 6)),
        ),
        figures=(
            *(f"1.{n}" for n in range(1, 4)),
            *(f"2.{n}" for n in range(1, 11)),
            *(f"3.{n}" for n in range(1, 8)),
            *(f"4.{n}" for n in range(1, 6)),
        ),
    ),
    Paper(
        key="001",
        page="001-seamgs",
        title="Accuracy-Aware Sparse Gradient Fusion Algorithm for Data-Parallel Deep Learning",
        authors="Li Hongliang, Zhang Meng, Wang Zichen, Li Xiang",
        year=2025,
        published="Journal of Jilin University (Science Edition), 2025, no. 5, p. 1356 (ISSN 1671-5489)",
        tables=("1",),
        figures=("1", "2"),
    ),
    Paper(
        key="002",
        page="002-4bit",
        title="4Bit-based Gradient Compression Method for Distributed Deep Learning System",
        authors="Jiang Wenbin, Fu Zhi, Peng Jing, Zhu Jian",
        year=2020,
        published="received 2020-03-16, revised 2020-05-18; the copy at hand does not name the journal",
        tables=("1", "2", "3"),
        figures=tuple(f"{n}" for n in range(1, 15)),
    ),
    Paper(
        key="003",
        page="003-cssgd",
        title="A Synchronized Gradient Descent Algorithm Based on Distributed Coding",
        authors="Li Bowen, Xie Zaipeng, Mao Yingchi, Xu Yuanyuan, Zhu Xiaorui, Zhang Ji",
        year=2021,
        published="Computer Engineering, 2021, 47(4), 68–76, 83. DOI 10.19678/j.issn.1000-3428.0057340",
        tables=("1", "2"),
        figures=tuple(f"{n}" for n in range(1, 16)),
    ),
    Paper(
        key="004",
        page="004-multi-step",
        title="A multi-step delay parameter update parallel optimization method for deep neural network",
        authors="Ju Tao, Kang Heting, Liu Shuai, Ding Xiaojian, Wang Longxiang",
        year=2025,
        published="Journal of Harbin Institute of Technology, 2025, no. 9. DOI 10.11918/202407052",
        tables=("1", "2", "3"),
        figures=tuple(f"{n}" for n in range(1, 17)),
    ),
)


def _drawings(paper: str, titles: dict[str, str]) -> Iterator[Entry]:
    """Yield entries of schematic drawings, by number and title, which have nothing to measure."""
    for number, title in titles.items():
        reason = "schematic drawing: nothing to measure"
        yield Entry(paper=paper, kind="figure", number=number, title=title, reason=reason)


_SHAPES = "Layer shapes of CIFAR-10 models with emulated computation, no GPU"
_DIGITS = (
    "`digits` unless `--data cifar10=PATH` is given, then ResNet-20; four simulated workers without a network"
)
_SCENE = "A made scene unless `--data hyperspectral=PATH` is given; fewer pixels, units and epochs"
_MAP = "map of a real scene, which is not shipped; its AUC and FPR are in table {}"
_LOOPBACK = "`digits` on this machine's loopback, four workers"
_DFN = "needs the paper's network DFN, which it does not define, and CIFAR-100"

_THESIS = (
    Entry(
        paper="000",
        kind="table",
        number="1.1",
        title="Size and error of well-known networks on ImageNet",
        theirs="parameters: AlexNet 60 M, VGGNet-19 143 M, GoogLeNet 6.8 M, ResNet-152 19.4 M",
        measurement="sizes",
        differs="The parameters of our layer tables; errors need ImageNet",
    ),
    *_drawings(
        "000",
        {
            "1.1": "Principle of Top-K",
            "1.2": "Principle of quantization",
            "1.3": "Principle of delayed communication",
            "2.1": "Layers of a neural network",
            "2.2": "Common activation functions",
            "2.3": "Training by SGD on one node",
            "2.4": "Data, model and pipeline parallelism",
            "2.5": "Topologies of data parallelism",
            "2.6": "Synchronous updates in these topologies",
            "2.7": "Steps of hyperspectral target detection",
            "2.8": "Structure of an adversarial autoencoder",
            "2.9": "Core of VGGNet and ResNet",
            "3.2": "Where GCAC stands in training",
            "4.1": "Local ratios from computation-aware allocation",
        },
    ),
    Entry(
        paper="000",
        kind="table",
        number="2.1",
        title="Parameters of large models",
        theirs="ResNet-50 25.6 M, VGGNet-19 143 M, and language models up to 175,000 M",
        measurement="sizes",
        differs="The parameters of our layer tables, which have no language models",
    ),
    Entry(
        paper="000",
        kind="table",
        number="2.2",
        title="Communication time of Allreduce algorithms",
        theirs="formulas from the literature, such as 2(α + β/N)(N − 1) for a ring",
        reason="formulas, and of exchanges without a server, which Gradwire does not have",
    ),
    Entry(
        paper="000",
        kind="table",
        number="2.3",
        title="Pixels of targets and background in the two scenes",
        theirs="Xiongan 165,647 of 5,925,000 are water (2.80 %), AeroRIT 68,576 of 4,560,000 (1.50 %)",
        reason="counts of two scenes that are not shipped",
    ),
    Entry(
        paper="000",
        kind="figure",
        number="2.10",
        title="Sample images of CIFAR-10",
        reason="pictures of a data set that is not shipped",
    ),
    *(
        Entry(paper="000", kind="table", number=number, title=title, reason=f"settings; {where} has them")
        for number, title, where in (
            ("3.1", "Tasks, networks and data sets", "examples/papers"),
            ("3.2", "Hyperparameters of GCAC", "`examples/papers/000-gcac.toml`"),
            ("4.1", "Hyperparameters of k-RNGC", "`examples/papers/000-krngc.toml`"),
        )
    ),
    Entry(
        paper="000",
        kind="figure",
        number="3.1",
        title="Distribution of gradients before and after selection by magnitude",
        theirs="picture: most gradients lie near 0; all between two lines become 0",
        measurement="distribution",
        differs="The largest layer of `digits` after one epoch",
    ),
    Entry(
        paper="000",
        kind="figure",
        number="3.3",
        title="Distribution of gradients before and after GCAC",
        theirs="picture: those near the approximate centroid are dropped, wherever it lies",
        measurement="distribution",
        differs="The largest layer of `digits` after one epoch",
    ),
    Entry(
        paper="000",
        kind="table",
        number="3.3",
        title="AUC and FPR of target detection with GCAC, L1, DGC and Top-K",
        theirs="AeroRIT: baseline 95.99 % / 1.16 %, GCAC 10× 95.99 / 1.18, 100× 87.28 / 5.04",
        measurement="detection",
        differs=_SCENE,
    ),
    *(
        Entry(paper="000", kind="figure", number=number, title=title, reason=_MAP.format(table))
        for number, title, table in (
            ("3.4", "Maps of detected targets, AeroRIT", "3.3"),
            ("3.5", "Maps of detected targets, Xiongan", "3.3"),
            ("4.3", "Maps of detected targets with k-RNGC, AeroRIT", "4.3"),
            ("4.4", "Maps of detected targets with k-RNGC, Xiongan", "4.3"),
        )
    ),
    Entry(
        paper="000",
        kind="figure",
        number="3.6",
        title="Accuracy and loss over epochs with GCAC",
        theirs="curves; they end as in table 3.4",
        measurement="thesis-accuracy",
        differs=_DIGITS,
    ),
    Entry(
        paper="000",
        kind="figure",
        number="3.7",
        title="Accuracy and loss over epochs with several compressors",
        theirs="curves; they end as in table 3.4",
        measurement="thesis-accuracy",
        differs=_DIGITS,
    ),
    Entry(
        paper="000",
        kind="table",
        number="3.4",
        title="Final accuracy with GCAC, L1, Top-K, DGC and Random at 10× and 100×",
        theirs="ResNet-56: baseline 93.07 %, GCAC 92.23 / 90.89, DGC 92.52 / 91.08, Random 88.84 / 75.53",
        measurement="thesis-accuracy",
        differs=_DIGITS,
    ),
    Entry(
        paper="000",
        kind="table",
        number="3.5",
        title="Time of an iteration and share of compressing",
        theirs="ResNet-56: GCAC 69 %, L1 69 %, Top-K 70 %, DGC 82 %",
        measurement="compressing",
        differs=_SHAPES,
    ),
    Entry(
        paper="000",
        kind="table",
        number="3.6",
        title="Time and accuracy with the exact and with the approximate centroid",
        theirs="VGGNet-16 8342.78 against 347.18 ms, 92.08 against 90.84 % at 100×",
        measurement="centroid",
        differs="One layer of ResNet-56, on a processor; both ways find the same element",
    ),
    Entry(
        paper="000",
        kind="table",
        number="4.2",
        title="Accuracy with and without the warm-up, k-RNGC 10×",
        theirs="without / wm5 / wm5o: ResNet-56 93.32 / 94.12 / 94.07 %",
        measurement="warm-up",
        differs=_DIGITS,
    ),
    Entry(
        paper="000",
        kind="figure",
        number="4.2",
        title="Accuracy with a warm-up of 1, 5 and 10 epochs",
        theirs="bars; more epochs are better, from 5 to 10 by little",
        measurement="warm-up",
        differs=_DIGITS,
    ),
    Entry(
        paper="000",
        kind="table",
        number="4.3",
        title="AUC and FPR of target detection with k-RNGC",
        theirs="AeroRIT: 10× 96.03 % / 1.29 %, 50× 95.21 / 1.76, 100× 94.83 / 2.13",
        measurement="detection",
        differs=_SCENE,
    ),
    Entry(
        paper="000",
        kind="figure",
        number="4.5",
        title="Accuracy and loss over epochs with k-RNGC",
        theirs="curves; they end as in table 4.4",
        measurement="krngc-accuracy",
        differs=_DIGITS,
    ),
    Entry(
        paper="000",
        kind="table",
        number="4.4",
        title="Final accuracy with k-RNGC at 10×, 50× and 100×",
        theirs="ResNet-56: baseline 93.07 %, 93.19 / 92.80 / 92.10",
        measurement="krngc-accuracy",
        differs=_DIGITS,
    ),
    Entry(
        paper="000",
        kind="table",
        number="4.5",
        title="Time of an iteration with k-RNGC and a delay of 1, 3 and 5",
        theirs="ResNet-56: 29 %, 55 % and 75 % of it compressing (and computing)",
        measurement="compressing",
        differs=_SHAPES,
    ),
)
_SEAMGS = (
    *_drawings("001", {"1": "Backward tasks and communication as a pipeline"}),
    Entry(
        paper="001",
        kind="table",
        number="1",
        title="Seconds of an iteration: P-SGD, Rand-K, LAGS, MGS, SEAMGS",
        theirs="SEAMGS is 1.90, 1.40, 1.52 and 1.64 times as fast as P-SGD (VGG16, ResNet-20, -56, -110)",
        measurement="seamgs",
        differs="Emulated computation with a share of communication of 0.5, no GPU, shaped links",
    ),
    Entry(
        paper="001",
        kind="figure",
        number="2",
        title="Validation accuracy over time",
        theirs="SEAMGS reaches 60 % 1.42 to 2.68 times sooner than three others, 80 % 2.35 to 14 times",
        measurement="target",
        differs="`digits` by real daemons behind shaped links of 1 Gbit/s",
    ),
)
_FOUR_BIT = (
    *_drawings("002", {"1": "Thresholds on the axis of gradients"}),
    *(
        Entry(
            paper="002",
            kind="figure",
            number=number,
            title=title,
            theirs=theirs,
            measurement=measurement,
            differs="Made images unless `--data cifar10=PATH` is given; the first steps, PyTorch",
        )
        for number, title, theirs, measurement in (
            (
                "2",
                "Share of gradients above 0.4 by layer, Inception",
                "curves; small in most layers",
                "gradients",
            ),
            ("3", "Mean gradient by layer, Inception", "curves; larger in early layers", "gradients"),
            (
                "4",
                "Share of gradients above 0.4 by layer, ResNet-110",
                "curves; none but conv0 and fc",
                "gradients-110",
            ),
            (
                "5",
                "Mean gradient by layer, ResNet-110",
                "curves; larger at the start of a stage",
                "gradients-110",
            ),
        )
    ),
    *(
        Entry(paper="002", kind="figure", number=number, title=title, reason=_DFN)
        for number, title in (
            ("6", "Share of gradients above 0.8 by layer, DFN"),
            ("7", "Mean gradient by layer, DFN"),
            ("12", "Accuracy over epochs, CIFAR-100 and DFN"),
        )
    ),
    Entry(
        paper="002",
        kind="table",
        number="1",
        title="The three groups of thresholds",
        theirs="0.04 … 0.6; 0.1 … 0.9; 0.01 … 0.09; by a mean of 0.1 to 0.5, above, below",
        measurement="thresholds",
    ),
    Entry(
        paper="002",
        kind="figure",
        number="8",
        title="Accuracy over epochs: 2bit, 4bit with one group, 4bit with three",
        theirs="curves; three groups above one group above 2bit",
        measurement="groups",
        differs=_DIGITS,
    ),
    *(
        Entry(
            paper="002",
            kind="figure",
            number=number,
            title=f"Accuracy over epochs: {title}",
            theirs=theirs,
            measurement=measurement,
            differs=differs,
        )
        for number, title, theirs, measurement, differs in (
            (
                "9",
                "CIFAR-10, Inception, 4 nodes",
                "4bit within about 5 points of baseline early",
                "curves-4",
                _DIGITS,
            ),
            ("10", "CIFAR-10, Inception, 2 nodes", "as figure 9", "curves-2", _DIGITS),
            (
                *("11", "CIFAR-100, Inception", "2bit clearly below 4bit and baseline", "curves-100"),
                "Made images of 100 classes unless `--data cifar100=PATH` is given; ResNet-20",
            ),
            (
                *("13", "CIFAR-10, ResNet-110", "as figure 12: 2bit below the others", "curves-resnet"),
                "Made images unless `--data cifar10=PATH` is given; ResNet-20 with `--quick`",
            ),
        )
    ),
    Entry(
        paper="002",
        kind="figure",
        number="14",
        title="Accuracy over epochs: ImageNet, ResNet-50",
        theirs="all three close together",
        reason="needs ImageNet and a GPU",
    ),
    *(
        Entry(
            paper="002",
            kind="table",
            number=number,
            title=f"Seconds of an epoch, {data} and Inception, 4 and 2 nodes",
            theirs=theirs,
            measurement="4bit",
            differs=_SHAPES + ", a share of communication of 0.25; ResNet-56 with `--quick`",
        )
        for number, data, theirs in (
            ("2", "CIFAR-10", "speed-ups of 2bit 1.373, 1.309; of 4bit 1.281, 1.218"),
            ("3", "CIFAR-100", "speed-ups of 2bit 1.265, 1.221; of 4bit 1.233, 1.193"),
        )
    ),
)
_EMULATED = "250,000 elements with emulated computation; `digits` for the number of steps; 4 nodes"
_CODED = (
    *_drawings(
        "003",
        {"1": "Redundant distribution", "2": "Coding", "3": "A gradient matrix split by columns"},
    ),
    Entry(
        paper="003", kind="table", number="1", title="The nodes' hardware", reason="settings, no measurement"
    ),
    Entry(
        paper="003",
        kind="table",
        number="2",
        title="Accuracy of one machine without a limit of time",
        theirs="a file to download, which the copy at hand lacks",
        measurement="one-machine",
        differs="`digits` in place of MNIST (DNN) and CIFAR-10 (CNN)",
    ),
    *(
        Entry(
            paper="003",
            kind="figure",
            number=number,
            title=title,
            theirs=theirs,
            measurement=f"coded-{network}",
            differs=_LOOPBACK + " instead of ten nodes",
        )
        for number, title, theirs, network in (
            ("4", "Accuracy over time of CSSGD, SSGD and ASGD, DNN", "all reach the final accuracy", "mlp"),
            ("5", "Accuracy over time of CSSGD, SSGD and ASGD, CNN", "all reach the final accuracy", "cnn"),
            ("6", "The accuracy by which times are compared, DNN", "82 %", "mlp"),
            ("7", "The accuracy by which times are compared, CNN", "70 %", "cnn"),
        )
    ),
    *(
        Entry(
            paper="003",
            kind="figure",
            number=number,
            title=title,
            theirs=theirs,
            measurement=measurement,
            differs=_EMULATED,
        )
        for number, title, theirs, measurement in (
            ("8", "Time to 82 %, DNN: SSGD and CSSGD", "bars; CSSGD is faster", "coded-time"),
            ("9", "Bytes to 82 %, DNN", "bars; CSSGD sends less than SSGD multicast", "coded-bytes"),
            ("10", "Time to 70 %, CNN: SSGD and CSSGD", "bars; CSSGD gains less", "coded-time"),
            ("11", "Bytes to 70 %, CNN", "bars; CSSGD sends less than SSGD multicast", "coded-bytes"),
            ("12", "Time of a batch by redundancy, DNN", "curve with a least value; 8 nodes", "redundancy"),
            ("13", "Time of a batch by redundancy, CNN", "curve with a least value; 8 nodes", "redundancy"),
            (
                *("14", "Time to 82 %, DNN: SSGD, ASGD, CSSGD with the best r"),
                *("53.97 % less time than SSGD, 26.89 % less than ASGD", "coded-time"),
            ),
            (
                *("15", "Time to 70 %, CNN: SSGD, ASGD, CSSGD with the best r"),
                *("39.11 % less time than SSGD, 26.37 % less than ASGD", "coded-time"),
            ),
        )
    ),
)
_MULTI_STEP = (
    *_drawings(
        "004",
        {
            "1": "Framework of multi-step delayed updates",
            "2": "Correction of parameters",
            "3": "Updates in three ways to train",
            "4": "Computation and communication as a graph",
            "5": "Tensors cut into parts",
            "6": "An iteration under three schedules",
            "7": "Two phases of overlap",
            "8": "Priorities while backward runs",
        },
    ),
    Entry(
        paper="004",
        kind="table",
        number="1",
        title="Hardware and software",
        reason="settings, no measurement",
    ),
    *(
        Entry(
            paper="004",
            kind="figure",
            number=number,
            title=f"{what}: accuracy and loss over epochs, {model}",
            theirs=f"curves; they end as in table {table}",
            measurement=measurement,
            differs=_LOOPBACK + "; one model instead of three",
        )
        for what, table, measurement, numbers in (
            ("SSGD, Local SGD and adaptive steps", "2", "multi-step", ("9", "10", "11")),
            ("Intervals of 1, 8, 16 and adaptive", "3", "intervals", ("12", "13", "14")),
        )
        for number, model in zip(numbers, ("VGG19", "ResNet-50", "ResNet-20"), strict=True)
    ),
    *(
        Entry(
            paper="004",
            kind="table",
            number=number,
            title=f"Accuracy, loss and seconds {title}",
            theirs=f"VGG19: {theirs}",
            measurement=measurement,
            differs=_LOOPBACK + "; validation accuracy, the paper's is of training",
        )
        for number, measurement, title, theirs in (
            (
                *("2", "multi-step", "of SSGD, Local SGD and adaptive steps"),
                "SSGD 0.8688, H = 8 0.8572, H = 16 0.8461, adaptive 0.8564, corrected 0.8651",
            ),
            (
                *("3", "intervals", "with intervals of 1, 8, 16 and adaptive, corrected"),
                "0.8688, 0.8606, 0.8563, adaptive 0.8651",
            ),
        )
    ),
    *(
        Entry(
            paper="004",
            kind="figure",
            number=number,
            title=title,
            theirs=theirs,
            measurement="local",
            differs="Emulated computation with the share that table 2 implies, shaped links",
        )
        for number, title, theirs in (
            ("15", "Computing and communicating of an epoch", "stacked bars"),
            ("16", "Speed-ups over SSGD", "3.81 (VGG19), 2.51 (ResNet-50), 1.49 (ResNet-20)"),
        )
    ),
)


def _position(entry: Entry) -> tuple[str, str, list[int]]:
    return entry.paper, entry.kind, [int(each) for each in entry.number.split(".")]


ENTRIES: Sequence[Entry] = sorted((*_THESIS, *_SEAMGS, *_FOUR_BIT, *_CODED, *_MULTI_STEP), key=_position)
BY_NAME = {entry.name: entry for entry in ENTRIES}
