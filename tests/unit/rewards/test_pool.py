"""The reward pool under faults: hangs, deaths, wrong functions, a parent that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_mc.data.records import FinishReason, Group, VerdictStatus
from grpo_mc.rewards import RewardPool
from helpers.rewards import make_group, rewards_config

FUNCTIONS = '''
import os, signal, subprocess, time

def obey(prompts, completions, **columns):
    """Does what the response says; the score is the response's length."""
    text = completions[0]
    if text == "sleep":
        time.sleep(1000)
    if text == "hold the lock":
        9 ** (9 ** 9)
    if text == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "exit":
        os._exit(3)
    if text == "print":
        print("printed by a reward function")
    if text == "real-time signal":
        os.kill(os.getpid(), 35)
    if text.startswith("daemon"):
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        # One whose parent has ended, too: no chain of parents leads from it to this process any more.
        subprocess.run(["sh", "-c", "setsid sleep 1000 & "])
    if text.endswith("then sleep"):
        time.sleep(1000)
    if text.endswith("then exit"):
        time.sleep(1.5)
        os._exit(3)
    if text == "escape":
        raise RuntimeError("a\\x1b[31mred\\0\\x9b b")
    if text == "child":
        subprocess.Popen(["sleep", "1000"])
    return [float(len(text))]

def pid(prompts, completions, **columns):
    return [float(os.getpid())]
'''
SCORED, TIMED_OUT, CRASHED = VerdictStatus.SCORED, VerdictStatus.TIMED_OUT, VerdictStatus.CRASHED


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "obedient.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def pool(module: Path) -> Iterator[RewardPool]:
    """One worker, half a second for a call."""
    with RewardPool(rewards_config({"type": "function", "path": f"{module}:obey"}, timeout_s=0.5)) as pool:
        yield pool


def _statuses(group: Group, index: int = 0) -> list[VerdictStatus]:
    return [r.verdicts[index].status for r in group.rollouts]


def _wait_until_gone(pids: list[int], timeout_s: float = 5.0) -> list[int]:
    """The pids that still run after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    left = pids
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = [p for p in left if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE]
    return left


def test_scores_by_name_and_weighted_sum() -> None:
    config = rewards_config({"type": "exact", "weight": 2.0}, {"type": "regex", "name": "digits", "pattern": r"\d"})
    groups = [make_group(["4", "x", "5"], "4", 0), make_group(["x"], None, 1)]
    with RewardPool(config) as pool:
        pool.score(groups)
    assert [r.reward for r in groups[0].rollouts] == [3.0, 0.0, 1.0]
    assert groups[0].rollouts[0].rewards == {"exact": 1.0, "digits": 1.0}
    assert groups[1].rollouts[0].rewards == {"digits": 0.0}
    assert _statuses(groups[1]) == [VerdictStatus.ABSTAINED]
    assert [v.name for v in groups[0].rollouts[0].verdicts] == ["exact", "digits"]


def test_many_rollouts_over_two_workers_keep_their_scores(module: Path) -> None:
    """Scores arrive in any order; each lands on its own rollout."""
    functions = [{"type": "function", "path": f"{module}:{name}", "name": name} for name in ("obey", "pid")]
    groups = [make_group(["x" * (7 * g + i) for i in range(7)], group_id=g) for g in range(20)]
    with RewardPool(rewards_config(*functions, workers=2, max_pending=8)) as pool:
        pool.score(groups)
        pids = {float(p) for p in pool.worker_pids()}
    assert [r.rewards["obey"] for g in groups for r in g.rollouts] == [float(n) for n in range(140)]
    assert {r.rewards["pid"] for g in groups for r in g.rollouts} == pids


def test_ten_hangs_in_a_row_do_not_exhaust_the_pool(pool: RewardPool) -> None:
    """H28: each hang ends as "timed out" within the limit, and the worker's place is usable again."""
    group = make_group(["sleep"] * 10 + ["right"])
    pool.score([group])
    assert _statuses(group) == [TIMED_OUT] * 10 + [SCORED]
    assert all(0.5 <= r.verdicts[0].seconds < 2.0 for r in group.rollouts[:10])
    assert [r.reward for r in group.rollouts[9:]] == [None, 5.0]
    again = make_group(["again"])
    pool.score([again])
    assert again.rollouts[0].reward == 5.0


def test_a_call_that_holds_the_interpreter_lock_times_out(pool: RewardPool) -> None:
    """H28: no thread or signal handler in the worker could end it."""
    group = make_group(["ok", "hold the lock", "ok"])
    pool.score([group])
    assert _statuses(group) == [SCORED, TIMED_OUT, SCORED]


def test_math_tower_times_out_and_right_answers_score_off_the_main_thread() -> None:
    """H28: 9^{9^{9^{9}}} ends as "timed out"; a right answer from a thread scores 1 (no signal.alarm involved)."""
    group = make_group([r"\boxed{9^{9^{9^{9}}}}", r"\boxed{x(x+2)}", r"\boxed{3}"], "x^2+2x")
    with RewardPool(rewards_config({"type": "math"}, timeout_s=2.0)) as pool:
        thread = threading.Thread(target=pool.score, args=([group],))
        thread.start()
        thread.join(60)
    assert not thread.is_alive()
    assert _statuses(group) == [TIMED_OUT, SCORED, SCORED]
    assert [r.reward for r in group.rollouts] == [None, 1.0, 0.0]


def test_a_regex_that_backtracks_for_ever_times_out() -> None:
    group = make_group(["a" * 40 + "b", "aaa"])
    config = rewards_config({"type": "regex", "pattern": "(a+)+", "full_match": True}, timeout_s=0.5)
    with RewardPool(config) as pool:
        pool.score([group])
    assert _statuses(group) == [TIMED_OUT, SCORED]


def test_a_timeout_of_one_function_leaves_the_others_their_scores(module: Path) -> None:
    functions: list[dict[str, Any]] = [
        {"type": "format", "tags": ["a"]},
        {"type": "function", "path": f"{module}:obey"},
        {"type": "exact"},
    ]
    group = make_group(["sleep", "die", "ok"], "ok")
    with RewardPool(rewards_config(*functions, timeout_s=0.5)) as pool:
        pool.score([group])
    assert [_statuses(group, i) for i in range(3)] == [[SCORED] * 3, [TIMED_OUT, CRASHED, SCORED], [SCORED] * 3]
    assert [r.reward for r in group.rollouts] == [0.0, 0.0, 3.0]


@pytest.mark.parametrize(
    ("text", "how"), [("die", "SIGKILL"), ("exit", "status 3"), ("real-time signal", "killed by SIGRTMIN+1")]
)
def test_a_worker_that_dies_is_replaced(pool: RewardPool, text: str, how: str) -> None:
    group = make_group(["a", text, "bb", text])
    pool.score([group])
    assert _statuses(group) == [SCORED, CRASHED, SCORED, CRASHED]
    assert how in group.rollouts[1].verdicts[0].reason


def test_an_idle_worker_that_was_killed_blames_no_rollout(pool: RewardPool) -> None:
    (pid,) = pool.worker_pids()
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.2)
    group = make_group(["a", "bb"])
    pool.score([group])
    assert [r.reward for r in group.rollouts] == [1.0, 2.0]
    assert pool.worker_pids() != [pid]


def test_a_stopped_worker_times_out(pool: RewardPool) -> None:
    """A worker that takes no message cannot block the pool."""
    os.kill(pool.worker_pids()[0], signal.SIGSTOP)
    group = make_group(["a", "bb"])
    pool.score([group])
    assert _statuses(group) == [TIMED_OUT, SCORED]


def test_large_records_pass(pool: RewardPool) -> None:
    group = make_group(["x" * 3_000_000, "y"], blob="z" * 5_000_000)
    pool.score([group])
    assert [r.reward for r in group.rollouts] == [3e6, 1.0]


def test_failed_and_aborted_rollouts_are_not_judged(pool: RewardPool) -> None:
    group = make_group(["a", "b", "c", "d"])
    for rollout, reason in zip(group.rollouts, FinishReason, strict=True):
        rollout.finish_reason = reason
    pool.score([group])
    assert [r.reward for r in group.rollouts] == [1.0, 1.0, None, None]
    assert group.rollouts[3].verdicts[0].status is VerdictStatus.ABSTAINED


def test_printing_functions_do_not_write_to_standard_output(
    pool: RewardPool, capfd: pytest.CaptureFixture[str]
) -> None:
    group = make_group(["print"])
    pool.score([group])
    assert group.rollouts[0].reward == 5.0
    assert capfd.readouterr().out == ""


def test_control_characters_of_an_exception_do_not_reach_the_reason(pool: RewardPool) -> None:
    """A reason is shown on terminals, which would obey them."""
    group = make_group(["escape"])
    pool.score([group])
    verdict = group.rollouts[0].verdicts[0]
    assert verdict.status is CRASHED
    assert verdict.reason.startswith(r"RuntimeError: a\x1b[31mred\x00\x9b b")


def test_no_groups_and_no_functions_are_legal(pool: RewardPool) -> None:
    pool.score([])
    pool.score([make_group([])])
    group = make_group(["a"])
    with RewardPool(rewards_config()) as empty:
        assert empty.worker_pids() == []
        empty.score([group])
    assert (group.rollouts[0].verdicts, group.rollouts[0].reward) == ([], None)


def test_close_leaves_no_process(module: Path) -> None:
    """Neither workers nor what the functions started."""
    pool = RewardPool(rewards_config({"type": "function", "path": f"{module}:obey"}, workers=2))
    pool.score([make_group(["child"] * 4)])
    pids = pool.worker_pids()
    tree = [c.pid for p in pids for c in psutil.Process(p).children(recursive=True)] + pids
    assert len(tree) == 6
    pool.close()
    pool.close()
    assert _wait_until_gone(tree) == []
    with pytest.raises(RuntimeError, match="closed"):
        pool.score([make_group(["a"])])


def _sleeps_below(pid: int) -> list[int]:
    """The `sleep` processes below the supervisor of the worker `pid`, whatever their session."""
    supervisor = psutil.Process(pid).parent()
    assert supervisor is not None
    return [c.pid for c in supervisor.children(recursive=True) if c.name() == "sleep"]


def _wait_for_sleeps(pool: RewardPool, count: int, timeout_s: float = 20.0) -> list[int]:
    deadline = time.monotonic() + timeout_s
    found: list[int] = []
    while len(found) < count and time.monotonic() < deadline:
        found = [p for pid in pool.worker_pids() for p in _sleeps_below(pid)]
        time.sleep(0.02)
    assert len(found) == count
    return found


@pytest.mark.parametrize("text", ["daemon", "daemon then sleep", "daemon then exit"])
def test_programs_in_sessions_of_their_own_do_not_outlive_the_worker(module: Path, text: str) -> None:
    """The pool closes, a call overruns, the worker dies: in each case they were left running."""
    with RewardPool(rewards_config({"type": "function", "path": f"{module}:obey"}, timeout_s=6.0)) as pool:
        thread = threading.Thread(target=pool.score, args=([make_group([text])],))
        thread.start()
        sleeps = _wait_for_sleeps(pool, 2)
        thread.join(60)
        assert not thread.is_alive()
        if text == "daemon":
            assert all(psutil.pid_exists(p) for p in sleeps)  # a worker that goes on keeps them
    assert _wait_until_gone(sleeps) == []


_PARENT = """
    import sys, threading
    from helpers.rewards import make_group, rewards_config
    from grpo_mc.rewards import RewardPool
    pool = RewardPool(rewards_config({"type": "function", "path": sys.argv[1]}, workers=2, timeout_s=1000.0))
    pool.score([make_group(["child"] * 2 + ["daemon"])])
    threading.Thread(target=pool.score, args=([make_group(["hold the lock"])],)).start()
    print(*pool.worker_pids(), flush=True)
"""


def test_no_worker_outlives_a_killed_parent(module: Path) -> None:
    """One worker idle, one inside a computation that holds the interpreter lock, with children in any session."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(_PARENT), f"{module}:obey"]
    parent = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pids = [int(p) for p in parent.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.5)
    tree = [c.pid for c in psutil.Process(parent.pid).children(recursive=True)]
    parent.kill()
    parent.wait()
    left = _wait_until_gone(tree)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert (len(tree), left) == (8, [])  # 2 supervisors, 2 workers, 2 children, 2 in sessions of their own


@pytest.mark.parametrize("path", ["no_such_module.rewards:f", "/no/such/file.py:f"])
def test_a_missing_function_is_one_value_error_at_construction(path: str) -> None:
    with pytest.raises(ValueError, match="no_such_module|there is no file"):
        RewardPool(rewards_config({"type": "function", "path": path}))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("x = undefined", "NameError: name 'undefined' is not defined"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("import os\nos._exit(5)", "exited with status 5"),
        ("import os\nos.kill(os.getpid(), 11)", "was killed by SIGSEGV"),
        ("raise SystemExit(1)", "SystemExit: 1"),
        ("import asyncio\nraise asyncio.CancelledError", "CancelledError"),
        ("raise ValueError('bad\\ntable')", "ValueError: bad table"),
    ],
)
def test_code_that_fails_when_it_is_imported_is_the_users_one_clear_error(
    tmp_path: Path, code: str, message: str
) -> None:
    path = tmp_path / "broken.py"
    path.write_text(code + "\n")
    with pytest.raises(ValueError, match="reward function") as error:
        RewardPool(rewards_config({"type": "function", "path": f"{path}:f"}))
    text = str(error.value)
    assert message in text and "\n" not in text
    assert "os." in code or f"{path}:{code.count(chr(10)) + 1}" in text


def test_a_file_that_is_not_utf8_is_the_users_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "latin.py"
    path.write_bytes(b"name = '\xe9'\n")
    with pytest.raises(ValueError, match="reward function .*SyntaxError.*utf-8"):
        RewardPool(rewards_config({"type": "function", "path": f"{path}:f"}))


def test_an_import_that_hangs_is_the_users_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "hanging.py"
    path.write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setattr("grpo_mc.rewards.dispatch.START_TIMEOUT_S", 3.0)
    with pytest.raises(ValueError, match="reward function .*hanging.py:f.* was not ready after 3 s"):
        RewardPool(rewards_config({"type": "function", "path": f"{path}:f"}))


def test_a_replacement_that_cannot_start_raises_instead_of_waiting(tmp_path: Path) -> None:
    """A function that imports once only: the second start fails, and score says so."""
    path = tmp_path / "once.py"
    code = (
        "import os\nf = lambda **k: os._exit(1)\nif os.path.exists(__file__ + '.used'): raise OSError('second start')\n"
    )
    path.write_text(code + "open(__file__ + '.used', 'w').close()\n")
    with RewardPool(rewards_config({"type": "function", "path": f"{path}:f"})) as pool:
        with pytest.raises(ValueError, match="OSError: second start"):
            pool.score([make_group(["a", "b"])])


def test_an_interrupted_call_leaves_the_pool_usable(pool: RewardPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C inside score: late answers of that call must not land on the next one's rollouts."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("grpo_mc.rewards.dispatch.Dispatcher._wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.score([make_group(["aaaaaaaa"] * 3)])
    group = make_group(["a", "bb"])
    pool.score([group])
    assert [r.reward for r in group.rollouts] == [1.0, 2.0]


def test_workers_do_not_import_torch() -> None:
    """They start fast: no torch, no configuration library."""
    code = "import sys, grpo_mc.rewards.worker; print([m for m in ('torch', 'pydantic') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
