#!/usr/bin/env bash
# Builds the wheel, installs it into an empty virtual environment and uses it outside the checkout.
#   tools/test_wheel.sh [PYTHON]     PYTHON has the dependencies installed (default .venv/bin/python)
# The new environment sees PYTHON's packages through a path file, but not an editable install of grpo_mc: path files
# inside such a folder are not read.
set -eu -o pipefail

checkout=$(cd "$(dirname "$0")/.." && pwd)
python=${1:-$checkout/.venv/bin/python}
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

cd "$checkout"
rm -rf build/lib* build/bdist*  # files deleted from the sources must not survive in the wheel; objects may stay
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w "$scratch/wheel" .

"$python" -m venv --without-pip "$scratch/venv"
"$python" -m pip --python "$scratch/venv/bin/python" install --quiet --disable-pip-version-check --no-deps --no-index \
    "$scratch"/wheel/*.whl
target=$("$scratch/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$target/dependencies.pth"

mkdir "$scratch/elsewhere"
cd "$scratch/elsewhere"
unset PYTHONPATH
bin=$scratch/venv/bin
"$bin/python" - "$scratch" <<'CHECK'
import sys
from importlib import metadata, resources

import torch

import grpo_mc
import grpo_mc.ops as ops

assert grpo_mc.__file__.startswith(sys.argv[1]), f"imported {grpo_mc.__file__}, not the wheel"
assert metadata.version("grpo_mc") == grpo_mc.__version__
assert resources.files("grpo_mc").joinpath("py.typed").is_file(), "py.typed is missing from the wheel"
assert any(str(f).endswith("LICENSE") for f in metadata.files("grpo_mc")), "LICENSE is missing from the wheel"
print("operators:", ops.info())
advantages = ops.group_advantages(torch.tensor([1.0, 0, 0, 0]), torch.zeros(4, dtype=torch.int64), ddof=0, eps=0.0)
expected = torch.tensor([3.0, -1, -1, -1]) / 3**0.5
assert torch.allclose(advantages, expected), advantages
CHECK
"$bin/grpo-mc" --help > help.txt
"$bin/python" -m grpo_mc --help | diff - help.txt
"$bin/grpo-mc" doctor
echo "wheel: works outside the checkout"
