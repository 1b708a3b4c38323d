"""Ranks are judged from the records that they leave, across scrapes, restarts and attempts."""

from __future__ import annotations

import array
import random
import threading

import msgspec
import pytest

from records import living, make_device, make_record
from torchmem.baseline_cli import collect
from torchmem.errors import ConfigError
from torchmem.model import REFTYPE_LABELS, Phase, RefType
from torchmem.wire import record as wire
from torchmem_exporter import catalog
from torchmem_exporter.budget import Budget
from torchmem_exporter.drift import judge as judge_module
from torchmem_exporter.drift.baseline import encode
from torchmem_exporter.drift.composition import Composition, Part
from torchmem_exporter.drift.held import HeldRun, held_run
from torchmem_exporter.drift.judge import SAVE_SECONDS, Grower, Judge, grown, learned
from torchmem_exporter.exposition import Exposition
from torchmem_exporter.reading import state as state_module
from torchmem_exporter.reading.lifecycle import State
from torchmem_exporter.reading.reader import Rank, Reader
from torchmem_exporter.reading.state import StateFile

MIB = 1 << 20
MODULES = ["(outside modules)", "(root)", "layers.0.mlp", "layers.1.mlp", "layers.2.mlp"]
USUAL = 100 * MIB
RING = 512
DEADLINE_SECONDS = 20.0


class Job:
    """One rank of a job whose memory is known step by step; ``leak`` is held by one module from a step on."""

    def __init__(self, *, leak_from=None, leak_bytes=0, leaker="layers.1.mlp", attempt="first", seed=0):
        self.leak_from, self.leak_bytes, self.leaker = leak_from, leak_bytes, leaker
        self.attempt = attempt
        self.random = random.Random(seed)
        self.rows = []

    def leaked(self, step):
        return self.leak_bytes * max(0, step - self.leak_from) if self.leak_from is not None else 0

    def run(self, num_steps):
        """Goes on for some steps."""
        for _ in range(num_steps):
            step = len(self.rows) + 1
            noise = self.random.randrange(64) * 512
            leaked = self.leaked(step)
            self.rows.append((step, 1_700_000_000.0 + step, USUAL + leaked + noise, USUAL // 2 + leaked))
        return self

    def record(self):
        """What the rank would have left now."""
        cells = {(m, int(RefType.ACTIVATION)): USUAL // 3 for m in range(2, 5)}
        step, _, peak, end = self.rows[-1]
        cells[MODULES.index(self.leaker), int(RefType.ACTIVATION)] += self.leaked(step)
        cells[1, int(RefType.TEMPORARY)] = peak - sum(cells.values())
        book = wire.pack_cells(wire.Cell(*key, num_bytes) for key, num_bytes in cells.items())
        rest = wire.pack_cells([wire.Cell(1, int(RefType.OTHER), end)])
        books = {"step_peak": book, "usage": rest, "active_peak": b"", "usage_bytes": end, "step_peak_bytes": peak}
        device = make_device(0, 1, **books, limit_bytes=1000 * MIB, other_bytes=0)
        ring = self.rows[-RING:]
        other = int(RefType.OTHER)
        columns = wire.Ring(
            steps=array.array("q", [row[0] for row in ring]).tobytes(),
            ended_at=array.array("d", [row[1] for row in ring]).tobytes(),
            phases=array.array("q", [int(Phase.FORWARD | Phase.OPTIMIZER)] * len(ring)).tobytes(),
            devices=[
                wire.RingDevice(
                    name=device.name,
                    step_peak=b"".join(total(other, row[2]) for row in ring),
                    step_end=b"".join(total(other, row[3]) for row in ring),
                )
            ],
        )
        return make_record(0, 1, devices=[device], modules=MODULES, ring=columns, step=step, attempt=self.attempt)

    def rank(self):
        """The rank as the reader would show it."""
        return Rank("j/rank-0.record", self.record(), State.RUNNING, has_memory=True)


def total(reftype, num_bytes):
    """A row of the ring."""
    return array.array("q", [num_bytes if r == reftype else 0 for r in range(len(REFTYPE_LABELS))]).tobytes()


@pytest.fixture
def state(tmp_path):
    return StateFile(tmp_path / "state")


def verdict(judge, job):
    """What is known of the job's one device."""
    return judge.judge(job.rank())["cuda:0"]


def go_on(judge, job, num_steps, every=100):
    """Runs the job, judged now and then."""
    for _ in range(num_steps // every):
        found = verdict(judge, job.run(every))
    return found


def test_a_leak_is_found_and_its_module_named(state):
    """Nobody would be told, or somebody would be told the wrong module."""
    found = go_on(Judge(state), Job(leak_from=600, leak_bytes=MIB // 8), 1200)
    assert found.judgement.is_floor_growing
    assert found.judgement.exhausted_at > 1_700_001_200.0
    (grower,) = found.growers
    assert (grower.module, grower.reftype) == ("layers.1.mlp", "activation")
    assert grower.num_bytes > 60 * MIB


def test_a_flat_job_is_left_alone(state):
    """Everybody would be told, all the time, and stop listening."""
    found = go_on(Judge(state), Job(), 1500)
    assert found.judgement.baseline_bytes == pytest.approx(USUAL, rel=0.01)
    assert (found.judgement.is_level_drifting, found.judgement.is_floor_growing) == (False, False)
    assert found.growers == ()


def test_what_is_usual_is_seen_as_soon_as_the_baseline_is_known(state):
    """Of a job that goes wrong the moment after, nobody would be told who grew."""
    judge, job = Judge(state), Job()
    found = verdict(judge, job.run(1))
    while found.judgement.baseline_bytes is None:
        assert found.growers is None
        found = verdict(judge, job.run(1))
    assert found.growers == ()


def test_who_grew_is_unknown_where_nothing_usual_was_seen(state):
    """A sidecar that comes to a job that has leaked for long would say that nobody has grown."""
    found = verdict(Judge(state), Job(leak_from=300, leak_bytes=MIB).run(RING))
    assert found.judgement.drift_ratio > 0.05
    assert found.growers is None


def test_what_was_learned_outlives_the_sidecar(state):
    """A restart of the sidecar would take the drifted level for the usual one."""
    job = Job(leak_from=700, leak_bytes=MIB // 4)
    judge = Judge(state, clock=lambda: 1_700_000_700.0)
    before = go_on(judge, job, 700)
    judge.save(is_due=True)
    after = go_on(Judge(StateFile(state.path)), job, 500)
    assert after.judgement.baseline_bytes == before.judgement.baseline_bytes
    assert after.growers[0].module == "layers.1.mlp"
    assert after.judgement.num_resets == {"attempt": 0, "configuration": 0, "manual": 0}


def test_a_new_attempt_is_learned_anew(state):
    """A restarted job would be held against what it was before it was changed."""
    judge = Judge(state)
    go_on(judge, Job(), 700)
    found = verdict(judge, Job(attempt="second").run(10))
    assert found.judgement.baseline_bytes is None
    assert found.judgement.num_resets["attempt"] == 1


def test_an_unchanged_record_is_judged_once(state):
    """Every scrape would cost as much as a new step."""
    judge, rank = Judge(state), Job().run(700).rank()
    assert judge.judge(rank) is judge.judge(rank)


def test_state_is_written_now_and_then(tmp_path):
    """The disk would be written with every scrape, or never."""
    now = [0.0]
    state = StateFile(tmp_path / "state")
    judge = Judge(state, clock=lambda: now[0])
    verdict(judge, Job().run(5))
    judge.save()
    assert not state.path.exists()
    now[0] = SAVE_SECONDS
    judge.save()
    assert set(learned(StateFile(state.path))) == {"llama-pretrain"}


def test_what_is_long_gone_is_forgotten(tmp_path):
    """The state of a node that has run for a year would hold every job that ever was."""
    now = [1_700_000_000.0]
    judge = Judge(StateFile(tmp_path / "state"), clock=lambda: now[0])
    verdict(judge, Job().run(5))
    now[0] += 8 * 24 * 3600.0
    judge.save(is_due=True)
    assert learned(StateFile(tmp_path / "state")) == {}


def test_what_is_kept_is_bounded(tmp_path, monkeypatch):
    """A node with many short jobs would keep more than a restarted sidecar reads, and so nothing at all."""
    monkeypatch.setattr(judge_module, "MAX_SECTION_BYTES", 4_000)
    judge = Judge(StateFile(tmp_path / "state"), clock=lambda: 1_700_000_000.0)
    for number in range(20):
        rank = Job().run(5 + number).rank()
        identity = msgspec.structs.replace(rank.record.identity, train_job=f"job-{number:02}")
        judge.judge(Rank("j", msgspec.structs.replace(rank.record, identity=identity), State.RUNNING, has_memory=True))
    judge.save(is_due=True)
    kept = sorted(learned(StateFile(tmp_path / "state")))
    assert 1 < len(kept) < 20
    assert kept == [f"job-{number:02}" for number in range(20 - len(kept), 20)], "those that stepped last"


def test_records_of_ranks_that_are_gone_are_let_go(state):
    """The last record of each job of a week would stay in the sidecar's memory."""
    judge, job = Judge(state), Job()
    before = go_on(judge, job, 700)
    judge.release([])
    assert judge._judged == {}
    assert go_on(judge, job, 100).judgement.baseline_bytes == before.judgement.baseline_bytes


@pytest.mark.parametrize("section", [b"\xc1", msgspec.msgpack.encode([1, 2]), msgspec.msgpack.encode({"a": 3})])
def test_a_state_that_makes_no_sense_is_none(tmp_path, section):
    """One bad file would keep the sidecar from starting."""
    state = StateFile(tmp_path / "state")
    state._sections["drift"] = msgspec.Raw(section)
    assert verdict(Judge(state), Job().run(5)).judgement.baseline_bytes is None
    assert state.num_failures == 1


def composed(**held):
    """A composition of activations, {layer: MiB}."""
    parts = [Part(f"layers.{name[1:]}.mlp", "activation", size * MIB) for name, size in held.items()]
    return Composition(parts=sorted(parts, key=lambda part: -part.num_bytes))


def test_one_layer_that_grew_is_named_by_itself():
    """Somebody would have to search all layers for the one."""
    found = grown(composed(l0=10, l1=10, l2=10), composed(l0=10, l1=30, l2=11), MIB)
    assert found == (Grower("layers.1.mlp", "activation", 20 * MIB),)


def test_layers_that_grew_alike_are_named_together():
    """One layer would be blamed for what all do."""
    found = grown(composed(l0=10, l1=10, l2=10), composed(l0=20, l1=20, l2=20), MIB)
    assert found == (Grower("layers.*.mlp", "activation", 30 * MIB),)


def test_who_grew_little_is_not_named():
    """The list would be full of noise."""
    assert grown(composed(l0=10), composed(l0=11), 2 * MIB) == ()


def test_a_slow_disk_holds_up_no_scrape(tmp_path, monkeypatch):
    """A state file on a disk that hangs would cost the scrapes of that time."""
    is_writing, may_end = threading.Event(), threading.Event()

    def write(_path, _content):
        is_writing.set()
        may_end.wait(DEADLINE_SECONDS)

    monkeypatch.setattr(state_module, "_replace", write)
    with living(tmp_path, Job().run(5).record()):
        exposition = Exposition(Reader(tmp_path, stale_after=1e12), Budget())
        look = threading.Thread(target=exposition.look, kwargs={"is_last": True})
        look.start()
        try:
            assert is_writing.wait(DEADLINE_SECONDS)
            scrape = threading.Thread(target=exposition.text, args=("prometheus",), kwargs={"is_openmetrics": False})
            scrape.start()
            scrape.join(DEADLINE_SECONDS / 2)
            assert not scrape.is_alive()
        finally:
            may_end.set()
            look.join()
        scrape.join()


def made_of(**held):
    """A composition of one module, {reftype: MiB}."""
    return Composition(parts=[Part("layers.0.mlp", reftype, size * MIB) for reftype, size in held.items()])


def test_what_passes_by_at_the_peak_is_not_blamed():
    """A temporary that is alive at another instant would be named before what grew."""
    before = made_of(activation=40, unsharded_gradient=10, temporary=1)
    after = made_of(activation=20, unsharded_gradient=20, temporary=21)
    assert grown(before, after, MIB) == (Grower("layers.0.mlp", "unsharded_gradient", 10 * MIB),)


def test_temporaries_that_grew_are_named():
    """Growth of nothing but temporaries would have no name on it."""
    found = grown(made_of(activation=40, temporary=1), made_of(activation=43, temporary=21), MIB)
    assert [grower.reftype for grower in found] == ["temporary", "activation"]


def test_a_leak_is_served(tmp_path):
    """What is known would not reach Prometheus."""
    job = Job(leak_from=600, leak_bytes=MIB // 8)
    with living(tmp_path, job.run(100).record()) as (store,):
        exposition = Exposition(Reader(tmp_path, stale_after=1e12), Budget())
        for _ in range(11):
            store.write(wire.encode(job.run(100).record()))
            exposition.look()
        block = exposition.blocks("prometheus")[0]
    found = {series.metric: dict(zip(series.labels, series.values, strict=True)) for series in block.series}
    key = ("llama-pretrain", "0", "cuda:0")
    assert found[catalog.DRIFTING][(*key, "floor")] == 1
    assert found[catalog.BASELINE_RESETS][(*key, "attempt")] == 0
    assert found[catalog.MODULE_EXCESS][(*key, "layers.1.mlp", "activation")] > 60 * MIB
    assert found[catalog.GROWTH][key] == pytest.approx(MIB / 8, rel=0.2)
    assert key in found[catalog.EXHAUSTION]


@pytest.fixture
def kept(tmp_path):
    """What was usual of a healthy job, as a file."""
    state = StateFile(tmp_path / "other-state")
    judge, job = Judge(state), Job()
    go_on(judge, job, 700)
    judge.save(is_due=True)
    run, unknown = collect("main", [job.record()], learned(state))
    assert unknown == []
    path = tmp_path / "main.baseline.json"
    path.write_bytes(encode(run))
    return path


def larger(attempt="second"):
    """The same job with 40 MiB more in one module from its first step on."""
    return Job(leak_from=-320, leak_bytes=MIB // 8, attempt=attempt, seed=1)


def test_a_job_that_starts_larger_than_a_kept_baseline_drifts(state, kept):
    """A change that came with a new release of the job would be learned as usual."""
    assert not go_on(Judge(StateFile(state.path)), larger(), 100).judgement.is_level_drifting
    found = go_on(Judge(state, [held_run(str(kept))]), larger(), 100)
    assert found.judgement.baseline_bytes == pytest.approx(USUAL, rel=0.01)
    assert found.judgement.is_level_drifting
    assert (found.growers[0].module, found.growers[0].reftype) == ("layers.1.mlp", "activation")


def test_a_kept_baseline_is_taken_once_a_life(state, kept):
    """Each restart of the sidecar would forget the drift; a new attempt would be learned anew."""
    job, held = larger(), [held_run(str(kept))]
    judge = Judge(state, held)
    go_on(judge, job, 200)
    judge.save(is_due=True)
    again = Judge(StateFile(state.path), held)
    assert go_on(again, job, 100).judgement.num_resets["manual"] == 1
    found = go_on(again, larger("third"), 100)
    assert found.judgement.num_resets == {"attempt": 1, "configuration": 0, "manual": 2}
    assert found.judgement.baseline_bytes == pytest.approx(USUAL, rel=0.01)


@pytest.mark.parametrize(("jobs", "is_held"), [("", True), ("llama-*=", True), ("llama=", False)])
def test_a_kept_baseline_is_for_the_jobs_that_it_names(state, kept, jobs, is_held):
    """One job would be held against the memory of another."""
    found = go_on(Judge(state, [held_run(f"{jobs}{kept}")]), larger(), 100)
    assert (found.judgement.baseline_bytes is not None) == is_held


def test_a_kept_baseline_is_for_as_many_ranks(state, kept):
    """A sharded job on fewer ranks, with more memory on each, would raise an alarm."""
    run = held_run(str(kept))
    other = msgspec.structs.replace(run.run, world_size=run.run.world_size + 1)
    found = go_on(Judge(state, [HeldRun(run.jobs, other, "")]), larger(), 100)
    assert found.judgement.baseline_bytes is None


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"version": 99, "run": {}}'])
def test_a_baseline_that_cannot_be_used_is_refused_at_the_start(tmp_path, content):
    """A job would seem to be held against a baseline, and would not be."""
    path = tmp_path / "a=b.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"^--baseline .*json: ."):
        held_run(str(path))
