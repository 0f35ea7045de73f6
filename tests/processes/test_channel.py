"""Messages between processes, and how a program becomes one of several."""

import inspect
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from coordinator import Counting, Store
from helpers import python

import keras_tpu_dist as ktd
from keras_tpu_dist.processes.channel import (
    ENDED,
    FAILED,
    Absence,
    Channel,
    PeerError,
    _Agreement,
)
from keras_tpu_dist.processes.start import _bind_address, watch_peers
from keras_tpu_dist.processes.watch import Watch
from keras_tpu_dist.tools.launcher.launch import launch
from keras_tpu_dist.tools.shell.main import main


def said_by(words, calls=1):
    """What `agree` returned or raised in each of several threads that say these words."""
    store, results = Store(), {}

    def work(number, said):
        channel = Channel(store, number, len(words))
        try:
            for call in range(calls):
                results[number] = channel.agree(said, "Do the same.", [number, call])
        except PeerError as error:
            results[number] = error

    with ThreadPoolExecutor(len(words)) as pool:
        list(pool.map(work, *zip(*enumerate(words)), timeout=20))
    return results, store


def enter(store, number, what, value):
    """Has a process come to the first agreement."""
    agreement = _Agreement(Channel(store, number, 2), 1, what, "", None)
    agreement._enter(value)


def test_a_failure_is_no_matter_of_order():
    why = Absence(FAILED, "failed in fit of model 'a' with OSError: full")
    channel = Channel(Store(), 0, 2, lambda missing, waited_s: why)
    with pytest.raises(PeerError) as error:
        channel.agree("the first batch of an epoch", "Seed what shuffles it.")
    assert str(error.value) == (
        "If one process fails, the others end, too, because they would wait for it. Received: "
        "process 0: the first batch of an epoch; process 1: failed in fit of model 'a' with "
        "OSError: full. Fix the error in that process; its own output has the traceback."
    )


def test_who_comes_and_then_ends_has_come():
    store = Store()

    def why_not(missing, waited_s):
        # Between this process's look at who has come and its look at who has ended.
        enter(store, 1, "the rows of the next batches", 7)
        return Absence(ENDED, "has ended its program")

    channel = Channel(store, 0, 2, why_not)
    assert channel.agree("the rows of the next batches", "", 5) == [5, 7]


def test_agreement_gives_everybodys_values():
    results, store = said_by(["fit"] * 3, calls=4)
    assert results == {i: [[0, 3], [1, 3], [2, 3]] for i in range(3)}
    assert len(store.values) == 4  # three entries and a verdict: earlier ones are gone


def test_different_words_raise_everywhere():
    results, _ = said_by(["fit", "fit", "save"])
    for error in results.values():
        assert isinstance(error, PeerError)
        assert str(error) == (
            "All processes must make the same calls in the same order. Received: process 0: fit; "
            "process 1: fit; process 2: save. Do the same."
        )


def test_each_process_is_told_how_to_mend_its_own_call():
    store = Store()

    def work(i):
        what = "save" if i else "evaluate"
        with pytest.raises(PeerError) as error:
            Channel(store, i, 2).agree(what, f"Call {what} everywhere.")
        return str(error.value)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(work, range(2), timeout=20))
    for words, what in zip(found, ("evaluate", "save"), strict=True):
        assert "process 0: evaluate; process 1: save." in words
        assert words.endswith(f"Call {what} everywhere.")


LONG = {f"weight {i}": i for i in range(50)}


@pytest.mark.parametrize("number", [2, 3, 17])
@pytest.mark.parametrize(
    "values",
    [
        lambda i: None,
        lambda i: LONG,
        lambda i: i,
        lambda i: {**LONG, "own": i},
        lambda i: i if i % 2 else LONG,
    ],
)
@pytest.mark.parametrize("reduced", [False, True])
def test_values_short_and_long_alike_and_different(number, values, reduced):
    store = Store()

    def work(i):
        channel = Channel(store, i, number)
        reduce = lambda every: [len(every), every == [values(j) for j in range(number)]]  # noqa: E731
        found = [
            channel.agree("a call", "", values(i), reduce=reduce if reduced else None)
            for _ in range(3)
        ]
        assert found[0] == found[1] == found[2]
        return found[0]

    with ThreadPoolExecutor(number) as pool:
        found = list(pool.map(work, range(number), timeout=20))
    expected = [number, True] if reduced else [values(i) for i in range(number)]
    assert found == [expected] * number


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("size", [1, 100])
def test_a_value_that_cannot_be_combined_is_everybodys_error(bad, size):
    store = Store()

    def work(i):
        value = ["7" if i == bad else 7] * size
        try:
            return Channel(store, i, 3).agree("a call", "", value, reduce=sum_of)
        except PeerError as error:
            return str(error)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(work, range(3), timeout=20))
    assert all("must be plain data of a known form" in words for words in found)


def sum_of(values):
    return sum(number for value in values for number in value)


def test_many_processes_in_an_error_are_counted():
    results, _ = said_by(["fit"] * 20 + ["save"])
    words = str(results[20])
    assert "process 7: fit; process 20: save; 12 more: fit." in words
    assert len({str(error) for error in results.values()}) == 1


@pytest.mark.parametrize("size", [1, 400])
@pytest.mark.parametrize("same", [True, False])
def test_requests_and_bytes_are_linear_in_the_processes(size, same):
    """Four times the processes: at most five times of both."""

    def spent(number):
        store = Counting()

        def work(i):
            value = {f"weight {n}": 0 if same else i for n in range(size)}
            Channel(store, i, number).agree("a call", "", value, reduce=lambda every: True)

        with ThreadPoolExecutor(number) as pool:
            list(pool.map(work, range(number), timeout=60))
        return store.requests, store.bytes

    few, many = spent(8), spent(32)
    assert all(b <= 5 * a for a, b in zip(few, many, strict=True))


def test_a_beat_is_linear_in_the_processes():
    def spent(number):
        store = Counting()
        watches = [Watch(Channel(store, i, number), i, number, 60.0) for i in range(number)]
        for _ in range(3):
            store.requests = store.bytes = 0
            for watch in watches:
                watch._look()
        return store.requests, store.bytes

    few, many = spent(8), spent(32)
    assert all(b <= 5 * a for a, b in zip(few, many, strict=True))


def test_the_others_hear_of_an_end_from_process_0():
    store = Store()
    watches = [Watch(Channel(store, i, 4), i, 4, 60.0, together=False) for i in range(4)]
    for watch in watches:
        watch._look()
    Channel(store, 2, 4).write("gone", Absence(ENDED, "has ended its program after fit"))
    watches[3]._look()
    assert not watches[3]._gone
    watches[0]._look()
    watches[3]._look()
    assert watches[3]._gone == {2: (ENDED, "has ended its program after fit")}
    assert watches[3].why_not([2], 0.0).words == "has ended its program after fit"
    # Process 0 ends: each hears of all by itself.
    watches[0].ended()
    watches[3]._look()
    assert 0 in watches[3]._gone
    Channel(store, 1, 4).write("gone", Absence(ENDED, "has ended its program after save"))
    watches[3]._look()
    assert watches[3]._gone[1].words == "has ended its program after save"


def test_a_watch_knows_who_lives_and_who_is_late():
    store = Store()
    watches = [Watch(Channel(store, i, 2), i, 2, peer_timeout_s=5.0) for i in range(2)]
    channel = Channel(store, 1, 2)
    for watch in watches:
        watch.at("in fit", inside=True)
    channel.write("alive", [1, "in fit", True])
    watches[0]._listen(channel.read("alive"), [1])
    assert watches[0].why_not([1], waited_s=1.0) is None
    assert watches[0].why_not([1], waited_s=6.0).words == "still in fit after 5 s"
    watches[0].at("after fit", inside=False)
    assert watches[0].why_not([1], waited_s=600.0) is None  # it lives and is on its way
    # At a launch, it is not, unless this one is at a launch too.
    output: Any = SimpleNamespace(is_ready=lambda: False, is_deleted=lambda: False)
    watches[1].launched(output)
    watches[1]._beats = 1  # the one after that above
    watches[1]._look()
    watches[0]._listen(channel.read("alive"), [1])
    assert watches[0].why_not([1], waited_s=600.0).words == "still in fit after 5 s"
    watches[0].launched(output)
    assert watches[0].why_not([1], waited_s=600.0) is None
    channel.write("gone", Absence(FAILED, "failed in fit with OSError: full"))
    assert watches[0].why_not([1], waited_s=0.0) == (FAILED, "failed in fit with OSError: full")
    assert watches[0].why_not([0], waited_s=0.0) is None


def test_who_may_start_later_is_waited_for():
    store = Store()
    watch = Watch(Channel(store, 0, 2), 0, 2, peer_timeout_s=0.01, together=False)
    for _ in range(3):
        watch._look()
        time.sleep(0.02)
    assert not watch._gone
    assert watch.why_not([1], waited_s=200.0) is None
    assert watch.why_not([1], waited_s=301.0).words == "not heard from within 300 s"
    Channel(store, 1, 2).write("alive", [1, "in fit", 0])
    watch._listen(watch._channel.read("alive"), [1])
    assert watch.why_not([1], waited_s=301.0) is None
    time.sleep(0.02)
    watch._listen(watch._channel.read("alive"), [1])
    assert watch._gone[1].words == "silent for 0.01 s, last heard in fit"


def test_processes_without_a_coordinator_are_told_so(monkeypatch, caplog):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for _ in range(2):
        watch_peers()
    said = [record.getMessage() for record in caplog.records]
    assert sum("JAX has several processes but no coordinator" in words for words in said) == 1


def test_a_new_call_is_told_at_once(monkeypatch):
    # A process killed right after it began would be said to have been elsewhere.
    monkeypatch.setattr("keras_tpu_dist.processes.watch._BEAT_S", 600.0)
    store = Store()
    watch, channel = Watch(Channel(store, 1, 2), 1, 2, peer_timeout_s=5.0), Channel(store, 0, 2)

    def told():
        return channel.read("alive").get(1, [0, ""])[1]

    watch._thread.start()
    for where in ["in fit", "in save"]:
        watch.at(where, inside=True)
        end = time.monotonic() + 5
        while time.monotonic() < end and told() != where:
            time.sleep(0.01)
        assert told() == where
    watch.ended()
    watch._thread.join(5)
    assert not watch._thread.is_alive()


def test_a_process_beyond_the_last():
    words = r"process_id counts from 0 to num_processes - 1.*process_id=2"
    with pytest.raises(ValueError, match=words):
        ktd.initialize("host:1", 2, 2)


def test_too_late(devices):
    with pytest.raises(RuntimeError, match=r"initialize\(\) must run before JAX starts.*8 device"):
        ktd.initialize("localhost:1234", 2, 0)


def run(code, **environment):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | environment
    return python("-c", code, code=None, env=environment)


def test_nothing_given_and_nothing_found_is_one_process():
    done = run(
        "import keras_tpu_dist as ktd; ktd.initialize(); ktd.initialize(); import jax;"
        "print(jax.process_count()); ktd.initialize()"
    )
    assert (done.stdout.strip(), done.returncode) == ("1", 0), done.stderr
    assert done.stderr.count("this program runs as one process") == 1


# What Kaggle sets on its one host; JAX sees chips there, and reaches no metadata server.
KAGGLE = {
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_PROCESS_ADDRESSES": "local",
    "TPU_WORKER_ID": "0",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
}
ON_TPU = """
from jax._src.clusters import cloud_tpu_cluster as cluster
def unreachable(key):
    raise ConnectionError("metadata.google.internal")
cluster.running_in_cloud_tpu_vm, cluster.get_metadata = True, unreachable
import keras_tpu_dist as ktd
ktd.initialize(timeout_s=20)
import jax
print(jax.process_count(), jax.distributed.is_initialized())
"""


@pytest.mark.slow
def test_the_one_host_of_kaggle_is_one_process():
    done = run(ON_TPU, **KAGGLE)
    assert (done.stdout.strip(), done.returncode) == ("1 False", 0), done.stderr
    assert "initialize" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"TPU_WORKER_HOSTNAMES": "localhost,other", "TPU_PROCESS_ADDRESSES": "localhost,other"},
        {"MEGASCALE_NUM_SLICES": "2"},
    ],
)
def test_several_hosts_of_tpus_without_a_metadata_server(more):
    done = run(ON_TPU, **KAGGLE | more)
    assert done.returncode == 1
    assert "JAX asks the metadata server which hosts train together. Received: no" in done.stderr
    assert "metadata.google.internal" in done.stderr
    assert "If this host trains alone, leave ktd.initialize() out." in done.stderr


SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_NODELIST": "localhost",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
INITIALIZE = "import keras_tpu_dist as ktd; ktd.initialize(timeout_s=3); print('one process')"


@pytest.mark.slow
@pytest.mark.parametrize("process", ["0", "1"])
def test_under_slurm_the_error_has_what_jax_found_and_what_starts_the_others(process):
    done = run(INITIALIZE, **SLURM | {"SLURM_PROCID": process})
    assert done.returncode == 69
    for words in (
        "All processes must call ktd.initialize(). Received: coordinator='localhost:",
        f"num_processes=2, process_id={process}, found by JAX in='SLURM (SLURM_NTASKS=2)', wait",
        "SLURM must start this program in each of its tasks (`srun python train.py`)",
    ):
        assert words in done.stderr


@pytest.mark.slow
def test_what_was_given_is_in_the_error():
    done = run(INITIALIZE.replace("(timeout", "('localhost:1', 2, 1, timeout"), **SLURM)
    assert done.returncode == 69
    assert "coordinator='localhost:1', num_processes=2, process_id=1, waited_s=3" in done.stderr
    assert "srun" not in done.stderr


@pytest.mark.slow
def test_a_job_of_slurm_without_srun_says_so():
    done = run(INITIALIZE, **{n: SLURM[n] for n in ("SLURM_JOB_ID", "SLURM_NTASKS")})
    assert done.stdout.strip() == "one process", done.stderr
    assert "a SLURM job of 2 tasks, without SLURM_STEP_NODELIST, SLURM_PROCID," in done.stderr
    assert "start with `srun python train.py`" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["2", "second"])
def test_variables_of_slurm_that_contradict_are_no_single_process(wrong):
    done = run(INITIALIZE, **SLURM | {"SLURM_PROCID": wrong})
    assert "one process" not in done.stdout
    assert f"'SLURM_PROCID': '{wrong}'" in done.stderr
    assert "of which JAX says:" in done.stderr
    assert "srun python train.py" in done.stderr


@pytest.mark.slow
def test_some_arguments_are_not_enough():
    done = run("import keras_tpu_dist as ktd; ktd.initialize('localhost:1234')")
    assert "give all of coordinator, num_processes and process_id, or none" in done.stderr
    assert "coordinator='localhost:1234', num_processes=None" in done.stderr


@pytest.mark.slow
def test_a_second_call_as_another_process():
    with socket.create_server(("localhost", 0)) as free:
        here = f"localhost:{free.getsockname()[1]}"
    done = run(
        f"import keras_tpu_dist as ktd; ktd.initialize('{here}', 1, 0);"
        f"ktd.initialize(); ktd.initialize('{here}', 1, 0);"
        f"ktd.initialize('{here}', 4, 0)"
    )
    assert "A process can be initialized only once. Received:" in done.stderr
    assert "num_processes=4" in done.stderr


SCRIPT = """
import os, sys, time
number = int(os.environ["KTD_PROCESS_ID"])
print("here", number, sys.argv[1:], os.environ["XLA_FLAGS"].count("device_count=3"))
if number:
    sys.exit(int(sys.argv[1]))
time.sleep(60 if int(sys.argv[1]) else 0)
"""


@pytest.mark.parametrize("code", [pytest.param(0, marks=pytest.mark.slow), 7])
def test_launch(code, tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    found = launch([sys.executable, str(script), str(code)], 2, 3, grace_s=0.5)
    assert found == code
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == [f"[{i}] here {i} ['{code}'] 1" for i in range(2)]


def wait_until(true, seconds=20):
    end = time.monotonic() + seconds
    while time.monotonic() < end and not true():
        time.sleep(0.05)
    return true()


def is_gone(number):
    """Whether a process has ended, be it that nobody has asked how."""
    try:
        return pathlib.Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("how", ["terminate", "kill"])
def test_launch_that_is_ended_ends_what_it_started(how, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, time; print(os.getpid()); time.sleep(600)")
    launcher = [sys.executable, "-m", "keras_tpu_dist", "launch", "--processes", "2", str(script)]
    with subprocess.Popen(launcher, stdout=subprocess.PIPE, text=True) as process:
        numbers = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
        getattr(process, how)()
        code = process.wait(60)
    killed = how == "kill"
    assert code == (-signal.SIGKILL if killed else 128 + signal.SIGTERM)
    # Only a launcher that is killed does not wait for them.
    assert wait_until(lambda: all(map(is_gone, numbers)), 20 if killed else 0)


_CHILD = """
import os, time
from keras_tpu_dist.processes.start import end_with_launcher
end_with_launcher()
print(os.getpid(), flush=True)
time.sleep(600)
"""
# As the launcher does it where the system does not end what it started.
_PARENT = """
import os, subprocess, sys
os.environ["KTD_LAUNCHER"] = str(os.getpid())
subprocess.run(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("shell", [[], ["sh", "-c", '"$@"; true', "sh"]])
def test_a_process_ends_with_its_launcher(shell):
    parent = [sys.executable, "-c", _PARENT, *shell, sys.executable, "-c", _CHILD]
    with subprocess.Popen(parent, stdout=subprocess.PIPE, text=True) as process:
        number = int(process.stdout.readline())
        time.sleep(2)
        assert not is_gone(number)
        process.kill()
    assert wait_until(lambda: is_gone(number))


_LISTENS = """
import os, pathlib
import keras_tpu_dist as ktd
ktd.initialize()
import jax
jax.devices()
own = set()
for path in pathlib.Path("/proc/self/fd").iterdir():
    try:
        own.add(os.readlink(path)[len("socket:["):-1])
    except FileNotFoundError:
        pass  # the one by which this folder is read
for name in ("tcp", "tcp6"):
    for line in pathlib.Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
        parts = line.split()
        if parts[3] == "0A" and parts[9] in own:
            host, port = parts[1].split(":")
            print("port", int(port, 16) == int(os.environ["KTD_COORDINATOR"].split(":")[1]), host)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_launch_listens_on_the_loopback(tmp_path, capfd):
    (tmp_path / "script.py").write_text(_LISTENS)
    assert launch([sys.executable, str(tmp_path / "script.py")], 2, 1) == 0
    lines = capfd.readouterr().out.splitlines()
    # 127.0.0.1, or the same within IPv6.
    found = [line.split()[-1] for line in lines if line.startswith("[0] port True")]
    assert found
    assert all(host in ("0100007F", "0000000000000000FFFF00000100007F") for host in found), lines


def test_only_a_loopback_address_is_bound(monkeypatch):
    monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)
    for host in ("127.0.0.1", "localhost", "[::1]"):
        assert _bind_address(f"{host}:1234") == f"{host}:1234"
    for address in ("10.0.0.1:1234", None, "128.0.0.1:1"):
        assert _bind_address(address) is None
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "[::]:1234")
    assert _bind_address("127.0.0.1:1234") is None


HAS_TLS = "mtls_cert_file" in inspect.signature(jax.distributed.initialize).parameters


_WITH_TLS = """
import os, sys
import jax
import keras_tpu_dist as ktd
folder, own = sys.argv[1:]
jax.distributed.initialize(
    os.environ["KTD_COORDINATOR"], int(os.environ["KTD_NUM_PROCESSES"]),
    int(os.environ["KTD_PROCESS_ID"]), initialization_timeout=20,
    mtls_cert_file=f"{folder}/{own}.pem", mtls_key_file=f"{folder}/{own}.key",
    mtls_ca_file=f"{folder}/run.pem", verify_secure_credentials=True,
)
ktd.initialize()
from keras_tpu_dist.processes.channel import agree
print(agree("being one", "", 7))
"""


def certificate(folder, name):
    """A certificate for this host that nobody but itself has signed."""
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.pem"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TLS or not shutil.which("openssl"), reason="needs TLS and openssl")
@pytest.mark.parametrize("own", ["run", "stranger"])
def test_processes_with_certificates(own, tmp_path, capfd):
    for name in ("run", "stranger"):
        certificate(tmp_path, name)
    (tmp_path / "script.py").write_text(_WITH_TLS)
    found = launch([sys.executable, str(tmp_path / "script.py"), str(tmp_path), own], 2, 1)
    output = capfd.readouterr().out
    assert (found == 0, output.count("[7, 7]")) == ((True, 2) if own == "run" else (False, 0)), (
        output
    )


def test_what_connects_the_processes_says_nothing(tmp_path, capfd):
    (tmp_path / "script.py").write_text(
        "print('[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer '"
        "'ranks is : 1')\nprint('of the script')"
    )
    assert launch([sys.executable, str(tmp_path / "script.py")], 1, 1) == 0
    assert capfd.readouterr().out == "[0] of the script\n"


@pytest.mark.slow
def test_launch_from_the_shell(tmp_path, capfd):
    (tmp_path / "script.py").write_text(SCRIPT)
    arguments = ["--processes", "2", "--devices", "3", str(tmp_path / "script.py"), "0"]
    assert main(["launch", *arguments]) == 0
    assert main(["launch", "--processes", "0", "script.py"]) == 2
    assert "at least one process" in capfd.readouterr().err
    assert main(["launch", "--devices", "3", "-m", "keras_tpu_dist", "topologies"]) == 0
    assert "[1]" in capfd.readouterr().out
