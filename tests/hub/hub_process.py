"""The other end of `hub_worker.py`: a process with an environment of its own, and calls of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TOKEN = "hf_of_the_owner"


class CallError(Exception):
    """What a call raised over there: `errors` names its class and those of what led to it."""

    def __init__(self, errors: list[str], message: str):
        super().__init__(f"{errors[0]}: {message}")
        self.errors = errors


class HubProcess:
    """A process in which huggingface_hub knows only the local hub, and an empty cache.

    Args:
        url: of the hub.
        folder: for its cache, its working directory and what it prints.
        token: its token; None for a stranger's process.
        has_package: whether it can import hf_moa.
        timeout: of a call, in seconds; the process is killed then.
    """

    def __init__(
        self,
        url: str,
        folder: Path,
        *,
        token: str | None = None,
        has_package: bool = True,
        timeout: float = 300,
    ):
        folder.mkdir()
        self.timeout = timeout
        self._printed = folder / "stderr.txt"
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))
        }
        environment |= {
            "DISABLE_SAFETENSORS_CONVERSION": "1",  # a service elsewhere
            "HF_ENDPOINT": url,
            "HF_HOME": str(folder / "home"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1",
            "PYTHONPATH": os.pathsep.join(sys.path) if has_package else "",
        }
        if token is not None:
            environment["HF_TOKEN"] = token
        command = [sys.executable, HERE / "hub_worker.py"]
        with open(self._printed, "w") as printed:
            self._process = subprocess.Popen(
                command if has_package else [*command, "without-the-package"],
                env=environment,
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                text=True,
            )

    def call(self, name: str, **arguments: Any) -> Any:
        """Call a function of the worker.

        Raises:
            CallError: it raised, or the process died: then of class "Killed".
        """
        timer = threading.Timer(self.timeout, self.kill)
        timer.start()
        try:
            self._process.stdin.write(json.dumps({"call": name, "arguments": arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            self._process.wait()
            raise CallError(["Killed"], self._printed.read_text()[-3000:])
        answer = json.loads(line)
        if "errors" in answer:
            raise CallError(answer["errors"], answer["message"])
        return answer["result"]

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self.kill()
        self._process.wait()
