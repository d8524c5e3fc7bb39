"""Checks between ranks: process group, one device per rank, all-reduce, and the same versions and recipe everywhere."""

import hashlib
import json
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from retouch.distributed.ranks import Ranks, init_distributed
from retouch.recipe.recipe import Recipe
from retouch.records.libraries import versions
from retouch_plan.doctor.findings import Finding, failed, ok

_LISTED_DIFFERENCES = 8


@dataclass(frozen=True)
class RankGroup:
    """The ranks, and a gloo process group for texts (None for one rank), which works even if communication between the GPUs
    fails."""

    ranks: Ranks
    group: "dist.ProcessGroup | None" = None

    def gather_texts(self, text: str) -> list[str]:
        """The texts of all ranks, in rank order. Sent as UTF-8 bytes in a tensor."""
        if self.group is None:
            return [text]
        content = torch.frombuffer(bytearray(text.encode()) or bytearray(1), dtype=torch.uint8)[: len(text.encode())]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks.world)]
        dist.all_gather(lengths, torch.tensor([len(content)]), group=self.group)
        longest = int(max(lengths))
        padded = torch.cat([content, content.new_zeros(longest - len(content))])
        all_padded = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(all_padded, padded, group=self.group)
        return [bytes(row[: int(length)].tolist()).decode() for row, length in zip(all_padded, lengths, strict=True)]

    def gather_failures(self, findings: Sequence[Finding]) -> dict[Finding, list[int]]:
        """The failures of all ranks without duplicates, each with the ranks that reported it."""
        texts = self.gather_texts(json.dumps([asdict(finding) for finding in findings if finding.status == "FAILED"]))
        ranks_of: dict[Finding, list[int]] = {}
        for rank, text in enumerate(texts):
            for entry in json.loads(text):
                ranks_of.setdefault(Finding(**entry), []).append(rank)
        return ranks_of


def join_ranks(device: str) -> RankGroup:
    """Join the process group that the launcher's environment variables describe.

    Raises torch.distributed.DistError if the ranks cannot connect, and ValueError for an unusable device.
    """
    ranks = init_distributed(device)
    return RankGroup(ranks, None if ranks.world == 1 else dist.new_group(backend="gloo"))


def check_rank_group(group: RankGroup, recipe: Recipe | None) -> Iterator[Finding]:
    """Run the checks between ranks; all ranks get the same findings. Ends after a failure that would make the next check hang."""
    yield ok("rendezvous", f"{group.ranks.world} rank{'s' * (group.ranks.world > 1)} connected")
    devices = check_devices(group.gather_texts(_device_name(group.ranks.device)))
    yield devices
    if devices.status == "FAILED":
        return
    yield check_all_reduce(group.ranks)
    # The platform string contains the kernel's version, which may differ between machines.
    own = {name: number for name, number in versions(Path.cwd()).items() if name != "platform"}
    yield check_same("versions", group.gather_texts(json.dumps(own)))
    if recipe is not None:
        digest = hashlib.sha256(json.dumps(recipe.document(), sort_keys=True).encode()).hexdigest()
        yield check_same("recipe", group.gather_texts(json.dumps({"hash": digest[:16]})))


def check_devices(names: Sequence[str]) -> Finding:
    """Check whether each rank has a CUDA device of its own. ``names``: ``_device_name`` of each rank, in rank order."""
    users: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        users.setdefault(name, []).append(rank)
    shared = {name: ranks for name, ranks in users.items() if "cuda" in name and len(ranks) > 1}
    listed = "\n".join(f"{name}: {rank_list(ranks)}" for name, ranks in (shared or users).items())
    if shared:
        text = f"several ranks use the same device:\n{listed}"
        return failed("devices", text, fix="retouch launch with --nproc at most the number of GPUs, or --gpus to choose them")
    return ok("devices", listed)


def _device_name(device: torch.device) -> str:
    """Host name and device; for a GPU also its UUID, which does not depend on CUDA_VISIBLE_DEVICES."""
    if device.type != "cuda":
        return f"{socket.gethostname()} {device}"
    return f"{socket.gethostname()} {device} {torch.cuda.get_device_properties(device).uuid}"


def check_all_reduce(ranks: Ranks) -> Finding:
    """Check whether sum, maximum and gather of known values are right on the ranks' devices."""
    values = (ranks.rank + 1) * torch.arange(1.0, 5.0)
    try:
        total, highest, rows = ranks.sum(values), ranks.max(values), ranks.gather(values)
    except dist.DistError as error:
        return failed("all-reduce", str(error).splitlines()[0], fix="NCCL_DEBUG=INFO retouch launch ...")
    base, world = torch.arange(1.0, 5.0), ranks.world
    correct = [
        torch.equal(total, base * (world * (world + 1) / 2)),
        torch.equal(highest, base * world),
        torch.equal(rows, torch.cat([(rank + 1) * base for rank in range(world)])),
    ]
    if not all(correct):
        text = f"wrong result for known values: sum {total.tolist()}, maximum {highest.tolist()}"
        return failed("all-reduce", text, fix="NCCL_DEBUG=INFO retouch launch ...")
    return ok("all-reduce", "sum, maximum and gather of known values are correct")


def check_same(subject: str, documents: Sequence[str]) -> Finding:
    """Check whether all ranks have the same values. ``documents``: a JSON object of texts from each rank, in rank order."""
    by_rank = [json.loads(document) for document in documents]
    names = sorted({name for each in by_rank for name in each})
    differing = [name for name in names if len({each.get(name) for each in by_rank}) > 1]
    if not differing:
        return ok(subject, "the same on all ranks")
    lines = [f"{name}: {_value_list([each.get(name) for each in by_rank])}" for name in differing[:_LISTED_DIFFERENCES]]
    fix = "start every rank with the same command, from the same environment and the same files"
    return failed(subject, "the ranks differ:\n" + "\n".join(lines), fix=fix)


def _value_list(values: Sequence[str | None]) -> str:
    by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(value or "none", []).append(rank)
    return "; ".join(f"{value} on {rank_list(ranks)}" for value, ranks in by_value.items())


def rank_list(ranks: Sequence[int]) -> str:
    """``rank 1``, or ``ranks 0, 2``."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
