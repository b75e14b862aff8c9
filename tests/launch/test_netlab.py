"""netlab: hosts that can be reached, links that are counted, and nothing left behind."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.launcher import run
from hvd_dyncomp.transport import mpi_settings
from netlab import link_rate, namespaces, shaping
from netlab.__main__ import main
from netlab.hosts import WITH_HOROVOD, hosts, why_not

pytestmark = pytest.mark.thorough

PROGRAM = str(Path(__file__).parents[2] / "launch" / "netlab")
NEIGHBOURS = str(Path(__file__).with_name("neighbours.py"))
MEGABYTES = 20

needs_namespaces = pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be made")


def left_behind(pid: int) -> list[str]:
    return [name for name in namespaces.present() if name.startswith(namespaces.prefix_of(pid))]


@needs_namespaces
@pytest.mark.parametrize("size", [2, 3])
def test_the_counters_equal_a_known_transfer(size):
    with hosts(size) as lab:
        counted = [lab.counters()]
        for _ in range(5):
            link_rate.measure(lab, MEGABYTES << 20)
            counted.append(lab.counters())
    transfers = [[now - then for then, now in zip(*pair, strict=True)] for pair in itertools.pairwise(counted)]
    assert all(sent[0] > MEGABYTES << 20 for sent in transfers)
    # On a busy machine TCP sends again what was only late.
    sent = min(transfers)
    # Headers, and nothing else, come on top; acknowledgements go the other way.
    assert sent[0] == pytest.approx(MEGABYTES << 20, rel=0.05)
    assert sum(sent[1:]) < 0.05 * sent[0]


@needs_namespaces
def test_a_link_carries_its_rate_and_the_rate_can_be_changed():
    with hosts(2, "50mbit") as lab:
        slow = link_rate.measure(lab, 4 << 20)
        lab.set_rate("400mbit")
        fast = link_rate.measure(lab, 32 << 20)
    # No upper limit but the rate itself, of which headers take 4 %; a busy machine may take more.
    assert 0.8 * 50e6 < slow < 50e6
    assert 0.8 * 400e6 < fast < 400e6


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_after_an_interruption(number):
    lab = lab_that_sleeps(612)
    lab.send_signal(number)
    assert lab.wait(timeout=30) == 128 + number
    assert not left_behind(lab.pid)
    assert not running("sleep\x00612")


@needs_namespaces
def test_what_a_killed_lab_left_is_swept_by_the_next():
    lab = lab_that_sleeps(613)
    lab.kill()
    lab.wait()
    with hosts(2):
        assert not left_behind(lab.pid)
    assert not running("sleep\x00613")


def lab_that_sleeps(seconds: int) -> subprocess.Popen:
    # os.environ: tests in this process may have initialized MPI; see launcher.run.
    lab = subprocess.Popen([sys.executable, PROGRAM, "--", "sleep", str(seconds)], env=dict(os.environ))
    wait_for(lambda: len(left_behind(lab.pid)) == 2 and running(f"sleep\x00{seconds}"))
    return lab


def running(command: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_text().startswith(command):
                return True
        except (OSError, UnicodeDecodeError):
            continue
    return False


def wait_for(condition, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@needs_namespaces
@pytest.mark.parametrize("launcher", WITH_HOROVOD)
def test_only_what_goes_to_another_host_passes_the_interface(launcher, tmp_path):
    # A link without a rate drops packets when the receiving core is busy, and what is sent again is counted again.
    with hosts(2, "1gbit", workers_per_host=2) as lab:
        path = tmp_path / "reports.json"
        command = lab.command([sys.executable, "-P", NEIGHBOURS, str(path), str(MEGABYTES << 20)], launcher=launcher)
        ended = run(command, timeout=100, env={**os.environ, **mpi_settings.DEFAULTS})
        assert ended.returncode == 0, ended.stdout
        reports = json.loads(path.read_text())
    assert [(report["local"], report["cross"]) for report in reports] == [
        *(([0, 2], [0, 2]), ([1, 2], [0, 2]), ([0, 2], [1, 2]), ([1, 2], [1, 2]))
    ]
    for report in reports:
        assert report["host"] == lab.addresses[report["cross"][0]], report
        # Two workers of a host each send to two of the other.
        assert report["across"] == pytest.approx(4 * (MEGABYTES << 20), rel=0.05), report
        assert report["inside"] < 0.01 * (MEGABYTES << 20), report


@needs_namespaces
def test_netlab_starts_several_workers_per_host_and_has_their_status():
    command = [sys.executable, PROGRAM, "--hosts", "2", "--workers-per-host", "2", "--"]
    # In one piece: mpirun puts its tags between pieces.
    said = "print(f'rank {hvd.rank()} {hvd.size()} {hvd.local_size()}', flush=True)"
    program = f"import horovod.torch as hvd; hvd.init(); {said}; hvd.barrier(); raise SystemExit(3)"
    ended = run([*command, sys.executable, "-c", program], timeout=100)
    assert ended.returncode == 3, ended.stdout
    assert all(f"rank {rank} 4 2" in ended.stdout for rank in range(4))
    assert ended.stdout.count(" sent 0.0") == 2  # a little, of each host


@needs_namespaces
def test_torchrun_places_its_workers_host_by_host():
    """Who and where they are, they learn from the environment."""
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "GLOO_SOCKET_IFNAME"
    # In one piece: all write into one pipe.
    words = f"['worker', socket.gethostname(), *map(os.environ.get, {names})]"
    program = f"import os, socket; os.write(1, ' '.join({words}).encode() + bytes([10]))"
    options = ["--hosts", "3", "--workers-per-host", "2", "--launcher", "torchrun"]
    ended = run([sys.executable, PROGRAM, *options, "--", sys.executable, "-c", program], timeout=100)
    assert ended.returncode == 0, ended.stdout
    said = sorted(line for line in ended.stdout.splitlines() if line.startswith("worker "))
    expected = [f"10.234.0.{rank // 2 + 1} {rank} 6 {rank % 2} 2 10.234.0.1 eth0" for rank in range(6)]
    assert said == [f"worker {line}" for line in expected]


@needs_namespaces
@pytest.mark.parametrize("fails", [0, 1])
def test_when_one_hosts_torchrun_fails_all_end(fails):
    """Whichever has the store; with a worker that would never notice."""
    program = f"import os, sys, time; sys.exit(5) if os.environ['RANK'] == '{fails}' else time.sleep(614)"
    command = [sys.executable, PROGRAM, "--launcher", "torchrun", "--", sys.executable, "-c", program]
    ended = run(command, timeout=100)
    assert ended.returncode == 1 and "exitcode  : 5" in ended.stdout, ended.stdout
    assert not running(f"{sys.executable}\x00-c\x00import os, sys, time")


def test_without_root_one_sentence_says_so(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit) as ended:
        main(["--", "true"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "netlab: error: network namespaces need root\n"


@pytest.mark.parametrize("rate", ["fast", "100", "-1gbit", "0mbit", "1 gbit", ""])
def test_a_bad_rate_is_named(rate):
    with pytest.raises(ValueError, match=repr(rate)):
        shaping.bits_per_second(rate)
