"""What a worker is asked, in the process of the test: another process imports torch anew."""

import json
from typing import Any

from ditkit_core.errors import keys_shown
from ditkit_ui import work
from ditkit_ui.worker import Worker


class WorkerHere(Worker):
    """A worker without a process. `test_worker.py` has the process."""

    def _ask(self, name: str, arguments: dict[str, Any]) -> Any:
        with keys_shown():
            answer = getattr(work, name)(**json.loads(json.dumps(arguments)))
        return json.loads(json.dumps(answer))
