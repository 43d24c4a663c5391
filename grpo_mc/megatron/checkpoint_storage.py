"""Reading and writing shards through torch.distributed.checkpoint, in Megatron-Core's torch_dist format.

Megatron-Core's own writer starts processes that it waits for without a bound, and copies every tensor that is a view
(with the distributed optimizer: all weights) before it writes the first. This one writes in the calling process, one
tensor at a time. Everything that can fail on one rank (a full disk) happens inside torch's save and load steps, which
tell every rank.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import shutil
import zipfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from grpo_mc.megatron.checkpoint_files import SECTIONS

_WEIGHTS, _OPTIMIZER = SECTIONS
_DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.uint8)
_METADATA = "torch.distributed.checkpoint.metadata"
_PICKLED = {
    *((_METADATA, name) for name in ("ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta")),
    *((_METADATA, name) for name in ("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    *(
        ("torch", str(dtype).removeprefix("torch."))
        for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.uint8)
    ),
}
"""What a checkpoint's metadata consists of: (module, name)."""


def _section(item: WriteItem) -> str:
    return _OPTIMIZER if item.index.fqn.startswith("optimizer.") else _WEIGHTS


def _save_tensor(tensor: torch.Tensor, stream: IO[bytes]) -> None:
    """torch.save with checksums; what the operating system refuses comes out as the OSError that it was."""
    with_checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        torch.save(tensor, stream)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    finally:
        torch.serialization.set_crc32_options(with_checksums)


class ShardWriter(FileSystemWriter):
    """Writes each rank's shards into one file a section, and synced."""

    def __init__(self, folder: Path, on_written: Callable[[list[str]], None]) -> None:
        """
        Args:
            on_written: Called on rank 0 with the names of all shard files, when every rank has written its own.
        """
        super().__init__(folder, overwrite=False)
        self.folder, self.on_written = folder, on_written

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # the folder is rank 0's to make, in prepare_global_plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        for section in SECTIONS:
            items = [item for item in plan.items if _section(item) == section]
            if items:
                results += self._write_file(f"{section}_{self.rank}.distcp", items, planner)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_file(self, name: str, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        results = []
        with open(self.folder / name, "xb") as stream:
            for item in items:
                tensor = planner.resolve_data(item).detach().cpu()  # type: ignore[union-attr]
                if tensor.untyped_storage().nbytes() != tensor.nbytes:
                    tensor = tensor.clone()  # torch.save writes whole storages
                offset = stream.tell()
                _save_tensor(tensor, stream)
                length = stream.tell() - offset
                results.append(WriteResult(item.index, length, _StorageInfo(name, offset, length)))
            stream.flush()
            os.fsync(stream.fileno())
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        torch.save({}, self.folder / "common.pt")  # Megatron-Core's loader expects one
        save_config(CheckpointingConfig("torch_dist", 1), str(self.folder))
        self.on_written([result.storage_data.relative_path for part in results for result in part])

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # no paths of this machine in the checkpoint


class _MetadataUnpickler(pickle.Unpickler):
    """Builds nothing else: a run directory may come from elsewhere."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PICKLED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a checkpoint's metadata")


class ShardReader(FileSystemReader):
    """Reads shards, each after its checksums; from `.metadata` nothing but metadata."""

    def _slice_file(self, file: IO[bytes], sinfo: _StorageInfo) -> IO[bytes]:
        """One stored tensor's bytes: a zip archive with checksums, which torch.save writes and torch.load ignores."""
        file.seek(sinfo.offset)
        content = io.BytesIO(file.read(sinfo.length))
        try:
            damaged = zipfile.ZipFile(content).testzip() is not None
        except zipfile.BadZipFile:
            damaged = True
        if damaged:
            raise OSError(errno.EIO, f"the content of {sinfo.relative_path} is not what was written")
        content.seek(0)
        return content

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as stream:
            metadata: Metadata = _MetadataUnpickler(stream).load()
        return metadata


def _by_key(shards: Sequence[ShardedTensor]) -> dict[str, list[Any]]:
    grouped: dict[str, list[Any]] = defaultdict(list)
    for shard in shards:
        grouped[shard.key].append(shard)
    return grouped


def write_shards(shards: Sequence[ShardedTensor], folder: Path, on_written: Callable[[list[str]], None]) -> None:
    """Writes all ranks' shards into a new folder; all ranks call together.

    Args:
        shards: This rank's; of those that several ranks hold only the main replica is written.
        on_written: See ShardWriter.

    Raises:
        CheckpointException: A rank failed; raised on every rank, with each failure.
    """
    main = [shard for shard in shards if is_main_replica(shard.replica_id)]
    dcp.save(
        mcore_to_pyt_state_dict(_by_key(main)),
        storage_writer=ShardWriter(folder, on_written),
        planner=MCoreSavePlanner(flatten_state_dict=False),
    )


def read_shards(shards: Sequence[ShardedTensor], folder: Path) -> None:
    """Fills the tensors of this rank's shards in place; all ranks call together.

    Raises:
        CheckpointException: A rank failed; raised on every rank, with each failure.
    """
    exact = [shard for shard in shards if not shard.allow_shape_mismatch]
    padded = {shard.key: shard for shard in shards if shard.allow_shape_mismatch}
    dcp.load(
        mcore_to_pyt_state_dict(_by_key(shards), is_loading=True),
        storage_reader=ShardReader(folder),
        planner=MCoreLoadPlanner(shapes_validation_sharded_tensors=exact, allow_shape_mismatch_sharded_tensors=padded),
    )
