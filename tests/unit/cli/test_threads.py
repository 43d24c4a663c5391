"""The threads' waiting is bounded unless the user says otherwise."""

from __future__ import annotations

import subprocess
import sys

import pytest

from grpo_mc.cli.threads import SPIN_COUNT, limit_spinning


def test_a_limit_is_set_where_the_user_has_set_none() -> None:
    environment: dict[str, str] = {}
    limit_spinning(environment)
    assert environment == {"GOMP_SPINCOUNT": str(SPIN_COUNT)}


@pytest.mark.parametrize("own", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}])
def test_the_users_setting_wins(own: dict[str, str]) -> None:
    environment = dict(own)
    limit_spinning(environment)
    assert environment == own


def test_it_is_in_force_before_torch_is_imported() -> None:
    code = "import sys, grpo_mc.cli, os; assert 'torch' not in sys.modules; print(os.environ['GOMP_SPINCOUNT'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={})
    assert done.stdout.strip() == str(SPIN_COUNT), done.stderr
