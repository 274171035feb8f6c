"""Tensors between processes over a runtime library built here: its device memory is host memory that processes share.

Copies, events and waits are queued as on a device, and run when a test says so: a missing wait gives wrong bits.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashrt.errors import InputError
from flashrt.runtime.cuda import Runtime, hand_over
from flashrt.runtime.cuda_driver import FUNCTIONS, LIBRARY, ROCM
from tests.runtime.cuda_peers import LIBRARIES, MIB, Ends, Peer, RefusedError, build_library


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("cudart")
    return {vendor: build_library(folder, vendor) for vendor in LIBRARIES}


@pytest.fixture(scope="module", params=list(LIBRARIES))
def processes(request: pytest.FixtureRequest, libraries: dict[str, Path]) -> Iterator[Ends]:
    ends = Ends(request.param, *(Peer(libraries[request.param]) for _ in range(3)))
    yield ends
    for peer in (ends.exporter, ends.importer, ends.second):
        peer.end()


@pytest.fixture
def ends(processes: Ends) -> Iterator[Ends]:
    yield processes
    processes.finish()


TENSORS = [
    *(f"pattern((3, 5), '{dtype}')" for dtype in ("float64", "float32", "float16", "bfloat16", "bool", "int64")),
    *(f"pattern((7,), '{dtype}', 1)" for dtype in ("uint8", "int8", "int16", "complex64", "float8_e4m3fn")),
    "pattern((), 'float32', 2)",
    "pattern((), 'bool', 2)",
    "pattern((0,))",
    "pattern((4, 0, 3), 'bfloat16')",
    "pattern((6, 4), 'bfloat16').T",
    "pattern((9, 8, 2), 'int32')[::2, 1:7:3]",
    "pattern((1, 5), 'float16').expand(4, 5)",
    "pattern((2, 3), 'complex64').conj()",
    "pattern((2, 3), 'complex64').mH.imag",
    "torch.nn.Parameter(pattern((3,), 'float32') * 0 + 1)",
    "pattern((1500, 1000), 'uint8', 5)",
]


def test_bits_arrive_equal(ends: Ends) -> None:
    ends.start()
    for tensor in TENSORS:
        message = ends.share(tensor)
        ends.importer.open(message)
        ends.release(message)
        assert len(json.dumps(message)) < 1024
        assert ends.importer.ask(f"bits(kept[{message['sequence']}])") == ends.exporter.ask(f"bits({tensor})"), tensor
    # All of them are still what they were: none lies in a slot that was used again.
    for number, tensor in enumerate(TENSORS):
        assert ends.importer.ask(f"bits(kept[{number}])") == ends.exporter.ask(f"bits({tensor})"), tensor


def test_a_handle_is_opened_once(ends: Ends) -> None:
    ends.start()
    for number in range(140):
        message = ends.share(f"pattern((100,), seed={number})")
        ends.importer.open(message)
        ends.release(message)
    for number in range(140):
        assert ends.importer.ask(f"bits(kept[{number}]) == bits(pattern((100,), seed={number}))")
    opened = ends.importer.ask("{key: value - before[key] for key, value in counts().items()}")
    assert opened["memory_opens"] == opened["mapped"] == ends.exporter.ask("counts()['allocated']") == 1
    assert opened["open_events"] == ends.exporter.ask("counts()['events']") == 4
    # 70 messages a slot: HIP's events are renewed twice each, after 32.
    assert opened["event_opens"] == (4 if ends.vendor == "cuda" else 8)


def test_the_pool_grows_with_size_and_with_messages_in_flight(ends: Ends) -> None:
    ends.start("max_in_flight=5, name='a.out to b.in'")
    small = [ends.share(f"pattern((100,), seed={number})") for number in range(5)]
    assert [message["place"]["pool"] for message in small] == [0, 0, 1, 1, 2]
    assert [message["place"]["pool_bytes"] for message in small] == [2 * MIB] * 5
    refused = ends.exporter.refusal("exporter.share(pattern((1,)))")
    assert refused.kind == "InputError"
    assert "channel 'a.out to b.in', device 0 (0000:01:00.0): expected at most 5 messages in flight" in refused.text
    assert "messages 0 to 4 not released" in refused.text
    for message in small[:3]:
        ends.importer.open(message)
    ends.release(small[2])
    large = [ends.share(f"pattern((3 * {MIB},), seed={number})") for number in range(3)]
    assert [message["place"]["pool"] for message in large] == [3, 3, 4]
    assert [message["place"]["pool_bytes"] for message in large] == [8 * MIB, 8 * MIB, 8 * MIB]
    for message in small[3:] + large:
        ends.importer.open(message)
    for number, message in enumerate(small):
        same = f"bits(kept[{message['sequence']}]) == bits(pattern((100,), seed={number}))"
        assert ends.importer.ask(same)
    for number, message in enumerate(large):
        same = f"bits(kept[{message['sequence']}]) == bits(pattern((3 * {MIB},), seed={number}))"
        assert ends.importer.ask(same)
    # A release counts once, and pools of either size serve again: what was never used first, then the longest free.
    ends.release(large[-1])
    ends.release(large[-1])
    again = [ends.share(f"pattern(({size},))") for size in (1, 3 * MIB, 3 * MIB)]
    assert [message["place"]["pool"] for message in again] == [0, 4, 3]
    refused = ends.exporter.refusal("exporter.release_through(11)")
    assert "expected a message before 11, got a release of message 11" in refused.text


def overwritten(ends: Ends, *, waits: bool) -> bool:
    """Send so that an unread slot comes up again; return whether its message arrived changed."""
    ends.start("max_in_flight=2")
    first = [ends.share(f"pattern((100,), seed={number})") for number in range(2)]
    ends.importer.run("fake.fakeDefer(1)")
    for message in first:
        ends.importer.open(message)
    assert ends.importer.ask("importer.is_idle()") is False
    ends.release(first[1])
    ends.exporter.run(f"Watched.waits = {waits}")
    ends.exporter.send("answer = exporter.share(pattern((100,), seed=2))")
    # CUDA: the copy is queued behind the wait. ROCm: the host waits. Without waits: the copy has run.
    reply = ends.exporter.reply()
    ends.importer.run("fake.fakeAdvance(1000)")
    third = reply["answer"] if "answer" in reply else ends.exporter.reply()["answer"]
    ends.exporter.run("Watched.waits = True")
    assert third["place"]["slot"] == first[0]["place"]["slot"]
    ends.importer.run("fake.fakeDefer(0)")
    ends.exporter.run("fake.fakeDefer(0)")
    ends.importer.open(third)
    assert ends.importer.ask("importer.is_idle()")
    assert ends.importer.ask("bits(kept[2]) == bits(pattern((100,), seed=2))")
    return not all(ends.importer.ask(f"bits(kept[{n}]) == bits(pattern((100,), seed={n}))") for n in range(2))


def test_a_slot_is_not_overwritten_before_it_is_read(ends: Ends) -> None:
    assert not overwritten(ends, waits=True)


def test_the_fake_device_shows_an_exporter_that_does_not_wait(ends: Ends) -> None:
    assert overwritten(ends, waits=False)


def read_early(ends: Ends, *, waits: bool) -> bool:
    """Open a message before the exporter's device has written it; return whether it arrived changed."""
    ends.start()
    ends.exporter.run("fake.fakeDefer(1)")
    message = ends.share("pattern((100,), seed=1)")
    ends.importer.run(f"Watched.waits = {waits}")
    ends.importer.open(message)
    ends.importer.run("Watched.waits = True")
    assert ends.importer.ask("importer.is_idle()") is not waits
    ends.exporter.run("fake.fakeAdvance(1000)")
    assert ends.importer.ask("importer.is_idle()")
    return not ends.importer.ask("bits(kept[0]) == bits(pattern((100,), seed=1))")


def test_a_message_is_not_read_before_it_is_written(ends: Ends) -> None:
    assert not read_early(ends, waits=True)


def test_the_fake_device_shows_an_importer_that_does_not_wait(ends: Ends) -> None:
    assert read_early(ends, waits=False)


def test_a_slot_waits_for_every_consumer(ends: Ends) -> None:
    ends.start("max_in_flight=1, num_consumers=2")
    first = ends.share("pattern((100,), seed=1)")
    ends.second.run("fake.fakeDefer(1)")
    ends.importer.open(first)
    ends.second.open(first)
    ends.release(first)
    ends.exporter.send("answer = exporter.share(pattern((100,), seed=2))")
    reply = ends.exporter.reply()
    ends.second.run("fake.fakeDefer(0)")
    second = reply["answer"] if "answer" in reply else ends.exporter.reply()["answer"]
    ends.exporter.run("fake.fakeDefer(0)")
    for peer in (ends.importer, ends.second):
        peer.open(second)
        assert peer.ask("importer.is_idle()")
        assert peer.ask("[bits(kept[n]) == bits(pattern((100,), seed=n + 1)) for n in range(2)]") == [True, True]


def test_a_dropped_message_frees_its_slot(ends: Ends) -> None:
    ends.start("max_in_flight=1")
    for number in range(70):
        message = ends.share(f"pattern((100,), seed={number})")
        if number % 3 == 0:
            ends.importer.open(message)
        ends.release(message)
    assert all(ends.importer.ask(f"bits(kept[{n}]) == bits(pattern((100,), seed={n}))") for n in range(0, 70, 3))


def test_streams_of_one_process_do_not_overtake_each_other_in_a_slot(ends: Ends) -> None:
    ends.start("max_in_flight=1")
    # ROCm's exporter waits on the host, for a device that goes on.
    ends.exporter.run(f"fake.fakeDefer({int(ends.vendor == 'cuda')}); exporter._device.queue = 1")
    dropped = ends.share("pattern((100,), seed=1)")
    ends.release(dropped)
    # This stream's turn comes first: only the wait holds it back.
    ends.exporter.run("exporter._device.queue = 0")
    message = ends.share("pattern((100,), seed=2)")
    ends.exporter.run("fake.fakeAdvance(1000)")
    ends.importer.open(message)
    assert ends.importer.ask("bits(kept[1]) == bits(pattern((100,), seed=2))")


@pytest.mark.parametrize("seed", range(4))
def test_messages_arrive_whole_whatever_the_devices_do_when(ends: Ends, seed: int) -> None:
    choose = random.Random(seed)
    limit = choose.choice((1, 2, 3, 5))
    ends.start(f"max_in_flight={limit}")
    ends.importer.run("fake.fakeDefer(1)")
    if ends.vendor == "cuda":
        ends.exporter.run("fake.fakeDefer(1)")
    waiting: list[dict[str, Any]] = []
    num_sent = num_opened = num_released = 0
    for _ in range(250):
        step = choose.choice(("share", "open", "release", "advance importer", "advance exporter"))
        if step == "share" and num_sent - num_released < limit:
            size = choose.choice((10, 1000, MIB + 1))
            ends.exporter.send(f"answer = exporter.share(pattern(({size},), seed={num_sent}))")
            reply = ends.exporter.reply()
            if "waiting" in reply:
                ends.importer.run("fake.fakeDefer(0)")
                reply = ends.exporter.reply()
                while "waiting" in reply:
                    reply = ends.exporter.reply()
                ends.importer.run("fake.fakeDefer(1)")
            waiting.append(reply["answer"])
            num_sent += 1
        elif step == "open" and waiting:
            ends.importer.open(waiting.pop(0))
            num_opened += 1
        elif step == "release" and num_released < num_opened:
            num_released = choose.randint(num_released + 1, num_opened)
            ends.exporter.run(f"exporter.release_through({num_released - 1})")
        elif step.startswith("advance"):
            peer = ends.importer if step.endswith("importer") else ends.exporter
            peer.run(f"fake.fakeAdvance({choose.randint(1, 4)})")
    assert num_opened > 10
    for peer in (ends.exporter, ends.importer, ends.exporter, ends.importer):
        peer.run("fake.fakeDefer(0)")
    while not ends.importer.ask("importer.is_idle()"):
        ends.exporter.run("runtime.is_complete(exporter._slots[0].ready[0])")
    same = "all(bits(value) == bits(pattern(value.shape, seed=number)) for number, value in kept.items())"
    assert ends.importer.ask(same)


def test_close_waits_for_copies_and_says_when_they_do_not_end(ends: Ends) -> None:
    ends.start()
    ends.exporter.run("fake.fakeDefer(1)")
    ends.importer.open(ends.share("pattern((100,), seed=1)"))
    refused = ends.importer.refusal("importer.close(timeout_s=0)")
    assert refused.kind == "ResourceMissingError"
    assert f"got 1 that wait for the exporter, process {ends.exporter.pid}; end this process" in refused.text
    refused = ends.exporter.refusal("exporter.close(timeout_s=0)")
    assert "expected copies that end within 0 s, got 1 that wait for an importer" in refused.text
    ends.exporter.run("fake.fakeDefer(0)")
    ends.importer.run("importer.close(); importer.close()")
    ends.exporter.run("exporter.close(); exporter.close()")
    # The tensor outlives the channel, and a closed end says so.
    assert ends.importer.ask("bits(kept[0]) == bits(pattern((100,), seed=1))")
    assert "share after close" in ends.exporter.refusal("exporter.share(pattern((1,)))").text


def test_no_descriptor_stays_open(ends: Ends) -> None:
    peers = (ends.exporter, ends.importer)
    before = [peer.ask("sorted(os.listdir('/proc/self/fd'))") for peer in peers]
    for _ in range(2):
        ends.start("max_in_flight=3")
        for size in (10, MIB + 1, 10):
            message = ends.share(f"pattern(({size},))")
            ends.importer.open(message)
        for peer in (ends.importer, ends.second):
            peer.run("importer.close()")
        ends.exporter.run("exporter.close()")
    assert [peer.ask("sorted(os.listdir('/proc/self/fd'))") for peer in peers] == before


def test_a_killed_exporter(ends: Ends, libraries: dict[str, Path]) -> None:
    victim = Peer(libraries[ends.vendor])
    try:
        ends.start()
        victim.run("exporter = CudaExporter(runtime, 0, device=HostDevice(0))")
        ends.importer.open(victim.ask("exporter.share(pattern((100,), seed=1))"))
        unopened = victim.ask("exporter.share(pattern((5 * 1024 * 1024,), seed=2))")
    finally:
        victim.kill()
    # What was complete stays; what was not opened yet says who is gone; closing leaves nothing.
    assert ends.importer.ask("bits(kept[0]) == bits(pattern((100,), seed=1))")
    refused = ends.importer.refusal(f"importer.open(json.loads({json.dumps(unopened)!r}))")
    assert refused.kind == "ResourceMissingError"
    assert f"process {victim.pid}, which exported it, has ended" in refused.text


def test_an_exporter_killed_before_its_copy(ends: Ends, libraries: dict[str, Path]) -> None:
    victim, importer = Peer(libraries[ends.vendor]), Peer(libraries[ends.vendor])
    try:
        victim.run("exporter = CudaExporter(runtime, 0, device=HostDevice(0)); fake.fakeDefer(1)")
        importer.run("importer, kept = CudaImporter(runtime, 0, device=HostDevice(0)), {}")
        importer.open(victim.ask("exporter.share(pattern((100,), seed=1))"))
        victim.kill()
        refused = importer.refusal("importer.close(timeout_s=0)")
        assert refused.kind == "ResourceMissingError"
        assert f"wait for the exporter, process {victim.pid} (which has ended)" in refused.text
    finally:
        victim.end()
        importer.end()


def test_out_of_memory_says_how_much_was_wanted(ends: Ends) -> None:
    ends.start("max_in_flight=4")
    ends.importer.open(ends.share("pattern((100,), seed=1)"))
    ends.exporter.environment(FAKE_CUDART_MEMORY_BYTES=str(20 * MIB))
    try:
        refused = ends.exporter.refusal(f"exporter.share(pattern((12 * {MIB},)))")
        assert ends.exporter.ask("counts()['last_error']") == 0
    finally:
        ends.exporter.environment(FAKE_CUDART_MEMORY_BYTES=None)
    assert refused.kind == "ResourceMissingError"
    wanted = f"expected {32 * MIB} bytes of device memory for 2 slots of {16 * MIB} bytes"
    assert wanted in refused.text
    assert f"out of memory); the channel holds {2 * MIB} bytes already" in refused.text
    assert "gpu_status" in refused.text
    message = ends.share(f"pattern((12 * {MIB},), seed=3)")
    assert message["sequence"] == 1
    ends.importer.open(message)
    assert ends.importer.ask(f"bits(kept[1]) == bits(pattern((12 * {MIB},), seed=3))")


def test_an_importer_out_of_memory_can_open_the_message_later(ends: Ends) -> None:
    ends.start()
    message = ends.share("pattern((100,), seed=1)")
    # Torch itself allocates here, and says so in its own words.
    ends.importer.run("""
def full(shape, dtype):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
importer._device.empty = full
""")
    refused = ends.importer.refusal(f"importer.open(json.loads({json.dumps(message)!r}))")
    assert refused.kind == "ResourceMissingError"
    assert "expected 100 bytes of device memory for message 0, got CUDA out of memory. Tried to" in refused.text
    ends.importer.run("del importer._device.empty")
    ends.importer.open(message)
    assert ends.importer.ask("bits(kept[0]) == bits(pattern((100,), seed=1))")


@pytest.mark.parametrize(("device", "importing"), [(1, 0), (0, 1), (1, 1)])
def test_devices_other_than_the_first(ends: Ends, device: int, importing: int) -> None:
    ends.start(device=device, importing=importing)
    message = ends.share("pattern((100,), seed=1)")
    assert message["bus"] == f"0000:0{device + 1}:00.0"
    ends.importer.open(message)
    assert ends.importer.ask("bits(kept[0]) == bits(pattern((100,), seed=1))")
    # Neither end leaves the thread on another device.
    assert [peer.ask("runtime.current_device()") for peer in (ends.exporter, ends.importer)] == [0, 0]


def test_a_device_that_the_importer_does_not_see_can_be_read(ends: Ends) -> None:
    ends.importer.environment(FAKE_CUDART_VISIBLE="1")
    try:
        ends.start(device=0, importing=0)
        ends.importer.open(ends.share("pattern((100,), seed=1)"))
        assert ends.importer.ask("importer._bus") == "0000:02:00.0"
        assert ends.importer.ask("bits(kept[0]) == bits(pattern((100,), seed=1))")
    finally:
        ends.importer.environment(FAKE_CUDART_VISIBLE=None)


@pytest.mark.parametrize("visible", [None, "1"])
def test_without_peer_access_both_devices_are_named(ends: Ends, visible: str | None) -> None:
    ends.importer.environment(FAKE_CUDART_NO_PEER="1", FAKE_CUDART_VISIBLE=visible)
    try:
        ends.start(device=0, importing=0 if visible else 1)
        message = ends.share("pattern((100,))")
        refused = ends.importer.refusal(f"importer.open(json.loads({json.dumps(message)!r}))")
    finally:
        ends.importer.environment(FAKE_CUDART_NO_PEER=None, FAKE_CUDART_VISIBLE=None)
    assert refused.kind == "InputError"
    assert "expected a device that can read device 0000:01:00.0, got device 0000:02:00.0" in refused.text
    assert "host memory" in refused.text


def test_what_is_no_tensor_of_the_device_is_refused(ends: Ends) -> None:
    ends.start()
    for value, got in (
        ("torch.empty(3, device='meta')", "torch.strided tensor of torch.float32 on meta"),
        ("torch.eye(3).to_sparse()", "torch.sparse_coo tensor of torch.float32 on cpu"),
        ("[1, 2]", "got list"),
    ):
        refused = ends.exporter.refusal(f"exporter.share({value})")
        assert refused.kind == "InputError"
        assert got in refused.text
        assert "expected a dense tensor on this device" in refused.text
    assert ends.share("pattern((1,))")["sequence"] == 0


@pytest.mark.parametrize(
    ("change", "got"),
    [
        ("del form['dtype']", "KeyError: 'dtype'"),
        ("form['dtype'] = 'save'", "no dtype 'save'"),
        ("form['shape'] = [101]", "100 bytes for uint8 [101]"),
        ("form['shape'] = [-1, -100]", "100 bytes for uint8 [-1, -100]"),
        ("form['place'] = None", "100 bytes nowhere"),
        ("form['nbytes'], form['shape'] = 0, [0]", "0 bytes in a slot"),
        ("form['place']['offset'] = 2 ** 21 - 99", "of a pool of 2097152"),
        ("form['place']['offset'] = -1", "100 bytes at -1"),
        ("form['place']['memory'] = 'AAAA'", "a handle of 3 bytes"),
        ("form['place']['ready'] = '?'", "Error"),
        ("form['place']['done'] = []", "a message for 0 consumers"),
        ("form = None", "TypeError"),
    ],
)
def test_a_changed_descriptor_is_refused(ends: Ends, change: str, got: str) -> None:
    ends.start()
    message = ends.share("pattern((100,))")
    refused = ends.importer.refusal(f"form = json.loads({json.dumps(message)!r})\n{change}\nimporter.open(form)")
    assert refused.kind == "InputError"
    assert got in refused.text
    assert "descriptor of a message for consumer 0" in refused.text


def test_the_exporting_process_cannot_open_its_own_message(ends: Ends) -> None:
    ends.start()
    ends.share("pattern((100,))")
    own = "CudaImporter(runtime, 0, device=HostDevice(0)).open(exporter.share(pattern((100,))))"
    assert "use hand_over within a process" in ends.exporter.refusal(own).text


@pytest.mark.parametrize(
    "function",
    [
        name
        for name in FUNCTIONS
        if name.startswith(("Ipc", "Event", "Malloc", "Memcpy", "Stream")) and "Close" not in name
    ],
)
def test_any_call_may_fail_and_the_next_message_arrives(ends: Ends, function: str) -> None:
    ends.start("max_in_flight=4")
    refusals = []
    for number in range(6):
        tensor = f"pattern((100,), seed={number})" if number < 5 else f"pattern(({MIB + 1},), seed={number})"
        for peer in (ends.exporter, ends.importer):
            peer.environment(FAKE_CUDART_FAIL=f"{function}:999" if number % 2 else None)
        try:
            message = ends.share(tensor)
        except RefusedError as error:
            refusals.append(error)
            ends.exporter.environment(FAKE_CUDART_FAIL=None)
            message = ends.share(tensor)
        try:
            ends.importer.open(message)
        except RefusedError as error:
            refusals.append(error)
            ends.importer.environment(FAKE_CUDART_FAIL=None)
            ends.importer.open(message)
        for peer in (ends.exporter, ends.importer):
            peer.environment(FAKE_CUDART_FAIL=None)
            assert peer.ask("counts()['last_error']") == 0
        assert message["sequence"] == number
        ends.release(message)
        assert ends.importer.ask(f"bits(kept[{number}])") == ends.exporter.ask(f"bits({tensor})")
    for refused in refusals:
        assert refused.kind == "ResourceMissingError"
        assert "error 999 (fake error)" in refused.text
        assert "start the run again" in refused.text
    # These are not called while messages go to and fro, but for ROCm's wait.
    assert refusals or function in {"EventDestroy", "EventQuery", "EventSynchronize"}


def test_close_goes_on_after_a_failure_and_names_all(ends: Ends) -> None:
    ends.start()
    ends.importer.open(ends.share("pattern((100,))"))
    ends.importer.environment(FAKE_CUDART_FAIL="IpcCloseMemHandle:999")
    try:
        refused = ends.importer.refusal("mapped = list(importer._memory.values()); importer.close()")
    finally:
        ends.importer.environment(FAKE_CUDART_FAIL=None)
    assert "IpcCloseMemHandle on device 0: expected success, got error 999" in refused.text
    assert ends.importer.ask("counts()['open_events']") == 0
    ends.importer.run("runtime.close_memory(*mapped)")


def test_hand_over_orders_the_streams_and_keeps_the_memory() -> None:
    happened: list[tuple[str, object]] = []

    class Stream:
        def record_event(self) -> str:
            happened.append(("recorded on", self))
            return "event"

        def wait_event(self, event: str) -> None:
            happened.append((f"{event} awaited by", self))

    class Tensor:
        def record_stream(self, stream: Stream) -> None:
            happened.append(("kept for", stream))

    first, second = Stream(), Stream()
    hand_over(Tensor(), first, first)
    assert happened == []
    hand_over(Tensor(), first, second)
    assert happened == [("recorded on", first), ("event awaited by", second), ("kept for", second)]


def test_the_environment_names_the_library(libraries: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIBRARY, str(libraries["rocm"]))
    assert Runtime.find().vendor is ROCM
    for name, got in (("/nowhere/libcudart.so", "/nowhere/libcudart.so"), ("libm.so.6", "neither cudaMalloc")):
        monkeypatch.setenv(LIBRARY, name)
        with pytest.raises(InputError) as caught:
            Runtime.find()
        assert got in caught.value.findings[0].got
        assert LIBRARY in caught.value.findings[0].fix


def in_child(source: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != LIBRARY}
    command = [sys.executable, "-P", "-c", source]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    return completed.stdout


def test_importing_loads_no_torch() -> None:
    assert in_child("import sys, flashrt.runtime.cuda; print('torch' in sys.modules)") == "False\n"


def test_the_library_that_torch_has_loaded_is_found_whatever_its_name(
    libraries: dict[str, Path], tmp_path: Path
) -> None:
    # As wheels do: a digest in the file's name, and a folder that no search path has.
    renamed = tmp_path / "libcudart-d0da41ae.so.12"
    renamed.write_bytes(libraries["cuda"].read_bytes())
    source = f"""
import ctypes, torch
from flashrt.errors import ResourceMissingError
from flashrt.runtime.cuda import Runtime
for version in (None, "99.1"):
    torch.version.cuda, torch.version.hip = version, None
    try:
        print(Runtime.find().library._name)
    except ResourceMissingError as error:
        print(error)
ctypes.CDLL({str(renamed)!r})
print(Runtime.find().library._name)
"""
    without_version, not_found, found = in_child(source).splitlines()
    assert "expected torch built for CUDA or ROCm, got torch" in without_version
    assert "expected libcudart.so.99, got no such library" in not_found
    assert found == str(renamed)
