"""StopRequest by itself, and what the command makes of it."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace

import pytest

from grpo_mc.cli import program
from grpo_mc.pipeline.stop import Interrupted, StopRequest


def send(signum: signal.Signals) -> None:
    os.kill(os.getpid(), signum)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_noted_and_handlers_come_back(signum: signal.Signals) -> None:
    before = signal.getsignal(signum)
    with StopRequest() as request:
        assert request.signum == 0
        send(signum)
        assert request.signum == signum
    assert signal.getsignal(signum) is before


def test_a_second_ctrl_c_ends_at_once() -> None:
    with StopRequest() as request:
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert request.signum == signal.SIGINT
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL, "a third one needs no Python"


def test_ctrl_c_after_sigterm_ends_at_once_but_a_second_sigterm_does_not() -> None:
    with StopRequest() as request:
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert request.signum == signal.SIGTERM


def test_an_interrupted_command_prints_one_line_and_exits_like_the_signal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(arguments: object) -> int:
        raise Interrupted(signal.SIGTERM, "stopped by SIGTERM after step 3, which is saved")

    command = SimpleNamespace(__doc__="Stops.", EXAMPLES="", add_arguments=lambda parser: None, run=stop)
    monkeypatch.setattr(program.importlib, "import_module", lambda name: command)
    monkeypatch.delenv("RANK", raising=False)
    assert program.main(["train"]) == 143
    assert capsys.readouterr().err == "grpo-mc: stopped by SIGTERM after step 3, which is saved\n"
    monkeypatch.setenv("RANK", "1")
    assert program.main(["train"]) == 143
    assert capsys.readouterr().err == "", "rank 0 says it for all"
