"""One rank of `helpers.processes.run_distributed`: loads the function by its file, runs it, writes its result."""

from __future__ import annotations

import datetime
import faulthandler
import importlib.util
import os
import pickle
import signal
import sys
from pathlib import Path


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    folder = Path(sys.argv[1])
    call = pickle.loads((folder / "call.pickle").read_bytes())
    # under its own name, so that what the function returns can be unpickled by the test
    specification = importlib.util.spec_from_file_location(call["module"], call["file"])
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[call["module"]] = module
    specification.loader.exec_module(module)

    if call["init"]:
        import torch.distributed as dist

        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=call["timeout_s"]))
    result = getattr(module, call["function"])(*call["args"])
    if call["init"]:
        dist.destroy_process_group()
    (folder / f"rank{os.environ['RANK']}.result").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main()
