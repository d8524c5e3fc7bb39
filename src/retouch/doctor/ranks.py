"""Do the ranks find each other, add up right, have a device each, and run the same thing?"""

import hashlib
import json
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from retouch.distributed.ranks import Ranks, init_distributed
from retouch.doctor.findings import Finding, failed, ok
from retouch.recipe.recipe import Recipe
from retouch.records.libraries import versions

_LISTED = 8


@dataclass(frozen=True)
class Meeting:
    """The ranks, and a way for them to exchange texts on the CPU, which works where their devices do not; None for one rank."""

    ranks: Ranks
    group: "dist.ProcessGroup | None" = None

    def texts(self, mine: str) -> list[str]:
        """What every rank says, in the order of ranks. Sent as UTF-8 bytes in a tensor."""
        if self.group is None:
            return [mine]
        content = torch.frombuffer(bytearray(mine.encode()) or bytearray(1), dtype=torch.uint8)[: len(mine.encode())]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.ranks.world)]
        dist.all_gather(lengths, torch.tensor([len(content)]), group=self.group)
        longest = int(max(lengths))
        padded = torch.cat([content, content.new_zeros(longest - len(content))])
        all_padded = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(all_padded, padded, group=self.group)
        return [bytes(text[: int(length)].tolist()).decode() for text, length in zip(all_padded, lengths, strict=True)]

    def failures(self, mine: Sequence[Finding]) -> dict[Finding, list[int]]:
        """What failed on any rank, each once, with the ranks that it failed on."""
        said = self.texts(json.dumps([asdict(finding) for finding in mine if finding.status == "FAILED"]))
        where: dict[Finding, list[int]] = {}
        for rank, text in enumerate(said):
            for entry in json.loads(text):
                where.setdefault(Finding(**entry), []).append(rank)
        return where


def meet(device: str) -> Meeting:
    """Join the ranks that the launcher's variables describe. torch.distributed.DistError where they do not come together."""
    ranks = init_distributed(device)
    return Meeting(ranks, None if ranks.world == 1 else dist.new_group(backend="gloo"))


def check_ranks_together(meeting: Meeting, recipe: Recipe | None) -> Iterator[Finding]:
    """All that concerns the ranks together; the same findings on every rank. Ends early where going on would hang."""
    yield ok("rendezvous", f"{meeting.ranks.world} rank{'s' * (meeting.ranks.world > 1)} found each other")
    devices = check_devices(meeting.texts(_device_name(meeting.ranks.device)))
    yield devices
    if devices.status == "FAILED":
        return
    yield check_all_reduce(meeting.ranks)
    # The kernel's name may differ from machine to machine; nothing of ours depends on it.
    mine = {name: number for name, number in versions(Path.cwd()).items() if name != "platform"}
    yield check_same("versions", meeting.texts(json.dumps(mine)))
    if recipe is not None:
        digest = hashlib.sha256(json.dumps(recipe.document(), sort_keys=True).encode()).hexdigest()
        yield check_same("recipe", meeting.texts(json.dumps({"hash": digest[:16]})))


def check_devices(names: Sequence[str]) -> Finding:
    """One device a rank: no CUDA device may be named twice. ``names``: as ``_device_name`` gives them, in the order of ranks."""
    users: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        users.setdefault(name, []).append(rank)
    shared = {name: ranks for name, ranks in users.items() if "cuda" in name and len(ranks) > 1}
    listed = "\n".join(f"{name}: {ranks_named(ranks)}" for name, ranks in (shared or users).items())
    if shared:
        text = f"ranks share a device:\n{listed}"
        return failed("devices", text, mend="retouch launch with --nproc at most the number of GPUs, or --gpus to choose them")
    return ok("devices", listed)


def _device_name(device: torch.device) -> str:
    """The machine and the device; a GPU by its own number, which does not depend on which of them a process may see."""
    if device.type != "cuda":
        return f"{socket.gethostname()} {device}"
    return f"{socket.gethostname()} {device} {torch.cuda.get_device_properties(device).uuid}"


def check_all_reduce(ranks: Ranks) -> Finding:
    """Sums, maxima and gathered rows of known values, on the ranks' devices."""
    mine = (ranks.rank + 1) * torch.arange(1.0, 5.0)
    try:
        total, highest, rows = ranks.sum(mine), ranks.max(mine), ranks.gather(mine)
    except dist.DistError as error:
        return failed("all-reduce", str(error).splitlines()[0], mend="NCCL_DEBUG=INFO retouch launch ...")
    base, world = torch.arange(1.0, 5.0), ranks.world
    right = [
        torch.equal(total, base * (world * (world + 1) / 2)),
        torch.equal(highest, base * world),
        torch.equal(rows, torch.cat([(rank + 1) * base for rank in range(world)])),
    ]
    if not all(right):
        text = f"known values came back wrong: a sum of {total.tolist()}, a maximum of {highest.tolist()}"
        return failed("all-reduce", text, mend="NCCL_DEBUG=INFO retouch launch ...")
    return ok("all-reduce", "sum, maximum and order of known values are right")


def check_same(subject: str, said: Sequence[str]) -> Finding:
    """Whether all ranks say the same; ``said``: a JSON object of texts from each, in the order of ranks."""
    given = [json.loads(text) for text in said]
    names = sorted({name for each in given for name in each})
    odd = [name for name in names if len({each.get(name) for each in given}) > 1]
    if not odd:
        return ok(subject, "the same on all ranks")
    lines = [f"{name}: {_by_rank([each.get(name) for each in given])}" for name in odd[:_LISTED]]
    mend = "start every rank with the same command, from the same environment and the same files"
    return failed(subject, "the ranks differ:\n" + "\n".join(lines), mend=mend)


def _by_rank(values: Sequence[str | None]) -> str:
    by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(value or "none", []).append(rank)
    return "; ".join(f"{value} on {ranks_named(ranks)}" for value, ranks in by_value.items())


def ranks_named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
