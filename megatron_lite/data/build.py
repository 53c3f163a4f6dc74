"""Build the train, validation and test datasets that the flags describe.

Every process calls `build_datasets`; the index cache decides who does the work, so no
rank is special and no barrier is needed. Nothing here depends on the layout.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_lite.data.blend import BlendIndex, normalize_weights
from megatron_lite.data.block_check import BlockCheck
from megatron_lite.data.cache import IndexCache
from megatron_lite.data.gpt_dataset import BlendedDataset, GPTDataset, MockSource, TokenSource
from megatron_lite.data.indexed import IndexedDataset, bin_path
from megatron_lite.data.meta import DatasetMeta
from megatron_lite.data.native import IndexBackend, load_backend
from megatron_lite.data.sample_index import (
    ALGORITHM_VERSION,
    IndexPlan,
    SampleIndex,
    build_index,
    plan_index,
)
from megatron_lite.data.splits import (
    DEFAULT_SPLIT,
    SPLIT_NAMES,
    BlendPaths,
    parse_data_path,
    parse_split,
    read_data_args,
    split_slice,
)
from megatron_lite.errors import UserError

INDEX_ARRAYS = ("document_index", "sample_index", "shuffle_index")
TrainableDataset = GPTDataset | BlendedDataset


class DataSettings(Protocol):
    """The part of the configuration that describes data (Megatron's names)."""

    @property
    def data_path(self) -> Sequence[str] | None: ...
    @property
    def data_args_path(self) -> str | None: ...
    @property
    def split(self) -> str | None: ...
    @property
    def train_data_path(self) -> Sequence[str] | None: ...
    @property
    def valid_data_path(self) -> Sequence[str] | None: ...
    @property
    def test_data_path(self) -> Sequence[str] | None: ...
    @property
    def data_cache_path(self) -> str | None: ...
    @property
    def mock_data(self) -> bool: ...
    @property
    def mmap_bin_files(self) -> bool: ...
    @property
    def mid_level_dataset_surplus(self) -> float: ...
    @property
    def eod_mask_loss(self) -> bool: ...
    @property
    def seq_length(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def require_native(self) -> bool: ...


@dataclass(frozen=True)
class Datasets:
    """The three parts, None where one is empty or not asked for; `blocks` watches the files."""

    train: TrainableDataset | None
    valid: TrainableDataset | None
    test: TrainableDataset | None
    facts: Mapping[str, Any] = field(default_factory=dict)
    blocks: BlockCheck = field(default_factory=BlockCheck)

    def fingerprint(self) -> dict[str, Any]:
        """Describe everything that determines the order of samples, JSON-able.

        Paths are left out (a corpus may move); so is the number of samples asked for
        (a longer run within the same epochs keeps its order).
        """
        return dict(self.facts)


@dataclass(frozen=True)
class _Request:
    """One part as the flags describe it."""

    name: str
    paths: BlendPaths | None  # None: mock data
    bounds: tuple[float, float]
    num_samples: int


def build_datasets(
    config: DataSettings,
    *,
    train_samples: int,
    valid_samples: int,
    test_samples: int,
    vocab_size: int,
    eod: int | None,
    pad: int | None = None,
    is_builder: bool = True,
) -> Datasets:
    """Open the data and build (or load) its indices.

    Args:
        config: see `DataSettings`.
        train_samples: samples the run will consume; valid and test likewise, 0 for none.
        valid_samples: all validation rounds together.
        test_samples: the final round.
        vocab_size: the model's true vocabulary.
        eod: the tokenizer's EOD id, None if it has none.
        pad: the tokenizer's padding id, None if it has none.
        is_builder: this process speaks; warnings appear once instead of per rank.

    Raises:
        UserError: missing files, contradicting flags, empty train part, a dataset made for
            a larger vocabulary.
        DamagedError: a damaged dataset.
    """

    def announce(message: str) -> None:
        if is_builder:
            print(message, file=sys.stderr, flush=True)

    requested = dict(zip(SPLIT_NAMES, (train_samples, valid_samples, test_samples), strict=True))
    requests = _read_requests(config, requested, announce)
    assembler = _Assembler(config, vocab_size, eod, pad, announce)
    built: dict[str, TrainableDataset | None] = dict.fromkeys(SPLIT_NAMES)
    facts: dict[str, Any] = {
        "algorithm_version": ALGORITHM_VERSION,
        "seed": config.seed,
        "sequence_length": config.seq_length,
        "split": [list(request.bounds) for request in requests],
    }
    for request in requests:
        if request.num_samples > 0:
            built[request.name], facts[request.name] = assembler.assemble(request)
    if train_samples > 0 and built["train"] is None:
        raise UserError("the flags give the training part no data (see --split and --data-path)")
    blocks = BlockCheck(assembler.files())
    return Datasets(built["train"], built["valid"], built["test"], facts, blocks)


def _read_requests(
    config: DataSettings, requested: Mapping[str, int], announce: Callable[[str], None]
) -> list[_Request]:
    """Combine the path flags and `--split` into one request per part."""
    own = {name: getattr(config, f"{name}_data_path") for name in SPLIT_NAMES}
    shared = list(config.data_path or [])
    if config.data_args_path:
        if shared:
            raise UserError("--data-path and --data-args-path exclude each other")
        shared = read_data_args(config.data_args_path)
    if any(own.values()):
        if shared or config.split or config.mock_data:
            raise UserError(
                "--train/valid/test-data-path exclude --data-path, --data-args-path, "
                "--split and --mock-data"
            )
        return [
            _Request(
                name, parse_data_path(words, f"--{name}-data-path"), (0.0, 1.0), requested[name]
            )
            for name, words in own.items()
            if words
        ]
    if config.mock_data and shared:
        raise UserError("--mock-data excludes --data-path")
    if not config.mock_data and not shared:
        raise UserError("no data: give --data-path PREFIX..., --train-data-path or --mock-data")
    split = config.split
    if split is None:
        split = DEFAULT_SPLIT
        announce(f'warning: --split not given; using "{DEFAULT_SPLIT}" (train, valid, test)')
    paths = None if config.mock_data else parse_data_path(shared)
    return [
        _Request(name, paths, bounds, requested[name])
        for name, bounds in zip(SPLIT_NAMES, parse_split(split), strict=True)
    ]


class _Assembler:
    """Opens each source once and builds datasets from it."""

    def __init__(
        self,
        config: DataSettings,
        vocab_size: int,
        eod: int | None,
        pad: int | None,
        announce: Callable[[str], None],
    ) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._eod = eod
        self._pad = pad
        self._announce = announce
        self._backend: IndexBackend = load_backend(config.require_native, announce)
        self._sources: dict[str, tuple[TokenSource, dict[str, Any]]] = {}

    def files(self) -> list[Path]:
        """Token files that were opened."""
        return [bin_path(name) for name in self._sources if name]

    def assemble(self, request: _Request) -> tuple[TrainableDataset | None, list[dict[str, Any]]]:
        """Build one part, and the facts that fix its order."""
        names = ("",) if request.paths is None else request.paths.prefixes
        for name in names:
            self._open(name)
        empty = [name for name in names if self._is_empty(name, request)]
        if empty:
            if request.name == "train" or len(empty) < len(names):
                raise UserError(
                    f"the {request.name} part of {empty[0] or 'the mock data'} is empty: "
                    f"{len(self._sources[empty[0]][0].lengths)} sequences, --split gives it "
                    f"[{request.bounds[0]:g}, {request.bounds[1]:g})"
                )
            if request.bounds[0] < request.bounds[1]:
                self._announce(f"warning: the {request.name} part holds no sequence; it is off")
            return None, []
        if len(names) == 1:
            dataset, facts = self._build_one(names[0], 0, request, request.num_samples)
            return dataset, [facts]
        assert request.paths is not None
        if request.paths.weights is None:
            return self._blend_whole(request, names)
        return self._blend_weighted(request, names, request.paths.weights)

    def _blend_weighted(
        self, request: _Request, names: Sequence[str], given: Sequence[float]
    ) -> tuple[BlendedDataset, list[dict[str, Any]]]:
        weights = normalize_weights(list(given))
        shares = [int(np.ceil(request.num_samples * w)) for w in weights]
        index = BlendIndex(weights, sum(shares), self._backend)
        surplus = self._config.mid_level_dataset_surplus
        datasets, facts = [], []
        for number, (name, share, count) in enumerate(
            zip(names, shares, index.counts.tolist(), strict=True)
        ):
            # Megatron's request; the greedy rule can ask one sample more of a tiny share.
            samples = max(int(np.ceil(share * (1 + surplus))), count)
            dataset, fact = self._build_one(name, number, request, samples)
            datasets.append(dataset)
            facts.append({**fact, "weight": float(weights[number])})
        return BlendedDataset(datasets, index), facts

    def _blend_whole(
        self, request: _Request, names: Sequence[str]
    ) -> tuple[BlendedDataset, list[dict[str, Any]]]:
        """Without weights: one epoch of each, mixed in proportion to their samples."""
        parts = [self._build_one(name, i, request, None) for i, name in enumerate(names)]
        datasets = [dataset for dataset, _ in parts]
        sizes = np.array([len(dataset) for dataset in datasets], dtype=np.int64)
        if sizes.sum() < request.num_samples:
            raise UserError(
                f"--data-path without weights is one epoch of each dataset: {sizes.sum()} "
                f"{request.name} samples, but the run needs {request.num_samples}; give "
                f"weights to repeat them, or train for at most {sizes.sum()} samples"
            )
        weights = normalize_weights(sizes.tolist())
        index = BlendIndex(weights, request.num_samples, self._backend, sizes)
        facts = [
            {**fact, "weight": float(weight)}
            for (_, fact), weight in zip(parts, weights, strict=True)
        ]
        return BlendedDataset(datasets, index), facts

    def _open(self, name: str) -> None:
        if name in self._sources:
            return
        if not name:
            if self._eod is None:
                raise UserError("--mock-data ends documents with EOD; this tokenizer has none")
            mock = MockSource(self._vocab_size, self._eod, self._config.seq_length)
            self._sources[name] = (mock, mock.identity())
            return
        dataset = IndexedDataset(name, use_mmap=self._config.mmap_bin_files)
        self._check_source(dataset)
        self._sources[name] = (dataset, dataset.identity())

    def _check_source(self, dataset: IndexedDataset) -> None:
        if dataset.dtype.kind not in "iu":
            raise UserError(
                f"dataset {dataset.prefix} holds {dataset.dtype.name} values, not token ids"
            )
        meta: DatasetMeta | None = dataset.meta
        if meta is None:
            return
        if meta.vocab_size > self._vocab_size:
            raise UserError(
                f"dataset {dataset.prefix} was made with a vocabulary of {meta.vocab_size} "
                f"({meta.tokenizer_type}); the model's has {self._vocab_size}"
            )
        if (
            self._config.eod_mask_loss
            and None not in (meta.eod, self._eod)
            and meta.eod != self._eod
        ):
            raise UserError(
                f"--eod-mask-loss: dataset {dataset.prefix} ends documents with id {meta.eod}, "
                f"the tokenizer's EOD is {self._eod}"
            )

    def _is_empty(self, name: str, request: _Request) -> bool:
        first, last = split_slice(request.bounds, len(self._sources[name][0].lengths))
        return first >= last

    def _build_one(
        self, name: str, number: int, request: _Request, num_samples: int | None
    ) -> tuple[GPTDataset, dict[str, Any]]:
        source, identity = self._sources[name]
        first, last = split_slice(request.bounds, len(source.lengths))
        lengths = source.lengths[first:last]
        plan = plan_index(
            num_sequences=last - first,
            tokens_per_epoch=int(lengths.sum(dtype=np.int64)),
            max_length=int(lengths.max()),
            sequence_length=self._config.seq_length,
            num_samples=num_samples,
            name=f"{request.name} part of {source.name}",
        )
        dataset = GPTDataset(
            source,
            self._index(name, source, first, plan, num_samples),
            sequence_length=self._config.seq_length,
            vocab_size=self._vocab_size,
            eod_mask=self._eod_to_mask(source),
            pad=self._pad,
            number=number,
        )
        facts = {
            **identity,
            "slice": [first, last],
            "epochs": plan.epochs,
            "separate_last_epoch": plan.separate_last_epoch,
            "samples": plan.num_samples,
        }
        return dataset, facts

    def _index(
        self, name: str, source: TokenSource, first: int, plan: IndexPlan, num_samples: int | None
    ) -> SampleIndex:
        identity = self._sources[name][1]
        facts = {
            # The index depends on lengths only, so the sampled token hash stays out of the key.
            **{key: value for key, value in identity.items() if key != "bin_sampled_sha256"},
            "sequence_length": plan.sequence_length,
            "samples": num_samples,
            "seed": self._config.seed,
            "slice": [first, first + plan.num_sequences],
            "algorithm_version": ALGORITHM_VERSION,
        }

        def build() -> dict[str, Any]:
            index = build_index(
                source.lengths, first, plan, self._config.seed, self._backend.build_sample_index
            )
            arrays = (index.documents, index.samples, index.shuffle)
            return dict(zip(INDEX_ARRAYS, arrays, strict=True))

        cache = IndexCache(self._cache_root(name), self._announce)
        arrays = cache.get(facts, INDEX_ARRAYS, build)
        return SampleIndex(*(arrays[key] for key in INDEX_ARRAYS))

    def _cache_root(self, name: str) -> Path | None:
        if self._config.data_cache_path:
            return Path(self._config.data_cache_path)
        return Path(name).parent / "cache" / "GPTDataset_indices" if name else None

    def _eod_to_mask(self, source: TokenSource) -> int | None:
        if not self._config.eod_mask_loss:
            return None
        meta = source.meta if isinstance(source, IndexedDataset) else None
        eod = self._eod if self._eod is not None or meta is None else meta.eod
        if eod is None:
            raise UserError("--eod-mask-loss needs a tokenizer with an EOD token")
        return eod
