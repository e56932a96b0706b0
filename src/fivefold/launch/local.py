"""Starts local ranks and reports how they ended.

PyTorch's elastic agent forks them after torch is imported, so that they start at once. They meet in files of a
temporary folder and communicate over the loopback interface only.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path

import torch

from fivefold.errors import CommunicationError, UserError
from fivefold.host import cores
from fivefold.host.memory import oom_kills
from fivefold.launch import ranks as ranks_
from fivefold.launch.ranks import Ranks

_PR_SET_PDEATHSIG = 1  # sys/prctl.h


def start_ranks(
    work: Callable[[Ranks], int | None],
    world: int,
    fork: bool,
    advice: Callable[[bool], str] = lambda _: "",
    expendable: range = range(0),
) -> int | None:
    """Runs `work` on `world` local ranks, on GPUs if there are any. Returns the signal that stopped them, or None.

    work: returns the signal that stopped it, or None. fork: forks the ranks on CPUs. This is quick, but only
    safe if the process has not used torch's threads. Otherwise ranks are spawned, and `work` is pickled. advice: text
    to add to the message when a rank has failed; it is told if the system killed one because memory ran out.
    expendable: ranks whose end does not stop the others.

    Raises:
        UserError: there are fewer GPUs than ranks, or a rank failed. The message names the rank and the failure.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < gpus < world:
        raise UserError(
            f"{world} ranks on this machine need {world} GPUs, but it has {gpus}. To use its CPU, put "
            "CUDA_VISIBLE_DEVICES= (with no value) before the command"
        )
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    start_method = "fork" if fork and not torch.cuda.is_available() else "spawn"
    # _verdict says in one message what the agent logs about a failed rank.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    handled = ["SIGTERM", "SIGINT"]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # ignored under nohup: it stays so
        handled.append("SIGHUP")
    with (
        tempfile.TemporaryDirectory(prefix="fivefold-") as folder,
        _environment(
            {
                ranks_.STORE_FILE: f"{folder}/store",
                "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
                "NCCL_SOCKET_IFNAME": "lo",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # no TCP store: it would listen on every interface
                "TOKENIZERS_PARALLELISM": "false",
                "OMP_NUM_THREADS": str(max(1, cores() // world)),
            }
        ),
    ):
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=world, run_id=uuid.uuid4().hex,
            rdzv_backend="c10d", rdzv_endpoint=f"{folder}/rendezvous", rdzv_configs={"store_type": "file"},
            max_restarts=0, monitor_interval=0.1, start_method=start_method, local_addr="127.0.0.1",
            shutdown_timeout=600, logs_specs=DefaultLogsSpecs(log_dir=folder), signals_to_handle=",".join(handled),
        )  # fmt: skip
        kills = oom_kills()
        try:
            elastic_launch(config, _rank_main)(work, Path(folder), expendable)
        except SignalException as error:
            return int(error.sigval)
        except ChildFailedError as error:
            stopped = Path(folder, "stopped")
            if stopped.exists():  # the signal went to a rank, not to us
                return int(stopped.read_text())
            raise _verdict(error, Path(folder), advice, kills) from None
        return None


def _rank_main(work: Callable[[Ranks], int | None], folder: Path, expendable: range) -> None:
    """Runs one forked rank. The agent stops all ranks when one fails. So one that may fail runs in a process of its
    own."""
    rank = int(os.environ["RANK"])
    if rank not in expendable:
        _run_rank(work, folder)
        return
    child = multiprocessing.get_context("fork").Process(target=_run_rank, args=(work, folder))
    child.start()
    pid = child.pid
    assert pid is not None
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    child.join()
    code = child.exitcode or 0
    if code < 0 or code == 1:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        print(f"rank {rank} has ended ({how}); the others go on", file=sys.stderr, flush=True)
    elif code:
        raise SystemExit(code)


def _run_rank(work: Callable[[Ranks], int | None], folder: Path) -> None:
    """Does a rank's work. A user's mistake goes to the parent in a file, not as a traceback."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the loop takes over
    if sys.platform == "linux":  # when the launcher is killed, its ranks stop, too, and save
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        with ranks_.join() as ranks:
            stopped = work(ranks)
            if stopped is not None:
                (folder / "stopped").write_text(str(stopped))
                # A plain return would wait for the agent, which is waiting for us.
                raise SystemExit(128 + stopped)
    except SignalException as error:  # torch's own handler, before the loop's is there
        raise SystemExit(128 + error.sigval) from None
    except UserError as error:
        (folder / f"error-{os.environ['RANK']}").write_text(str(error))
        raise SystemExit(2) from None
    except CommunicationError as error:
        (folder / f"lost-{os.environ['RANK']}").write_text(str(error))
        raise SystemExit(1) from None
    except Exception:
        (folder / f"failed-{os.environ['RANK']}").touch()
        print(f"rank {os.environ['RANK']} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def _verdict(error: object, folder: Path, advice: Callable[[bool], str], kills: int | None) -> UserError:
    """The failure of the ranks in one message. kills: processes that the system had killed for want of memory when the
    ranks started."""
    said = sorted(folder.glob("error-*"))
    if said:
        return UserError(said[0].read_text())
    # The agent names the rank that ended first. That may be one that only lost the rank that failed.
    failed = sorted(folder.glob("failed-*"), key=lambda file: file.stat().st_mtime_ns)
    lost = {int(file.name.removeprefix("lost-")): file.read_text() for file in folder.glob("lost-*")}
    failures = getattr(error, "failures", {})
    rank, failure = min(failures.items(), key=lambda item: item[1].timestamp)
    code = failure.exitcode
    if failed:
        rank, code = int(failed[0].name.removeprefix("failed-")), 1
    elif rank in lost:
        return UserError(lost[rank] + advice(False))
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    if code == -signal.SIGKILL and kills is not None and (oom_kills() or 0) > kills:
        text = (
            f"rank {rank} was killed by the system ({how}), because memory ran out; the others were stopped"
        )
        return UserError(text + advice(True))
    text = f"rank {rank} failed first ({how}); the others were stopped. Its own message is above"
    return UserError(text + advice(False))


class _environment:
    """Sets environment variables inside the block, except those that the user has set."""

    def __init__(self, values: dict[str, str]):
        self.values = {k: v for k, v in values.items() if k not in os.environ}

    def __enter__(self) -> None:
        os.environ.update(self.values)

    def __exit__(self, *_: object) -> None:
        for key in self.values:
            os.environ.pop(key, None)
