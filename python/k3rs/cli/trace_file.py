"""The file that `generate --trace` writes."""

import k3rs
from k3rs.cli.pending_file import PendingFile
from k3rs.session import Routes
from k3rs.trace import FIRST_LINE

__all__ = ["TraceFile"]


class TraceFile(PendingFile):
    """Expert requests in the format of `k3rs.trace`, written step by step."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._token = 0
        self._layers: list[int] = []
        self.write(FIRST_LINE + b"\n")

    def begin(self, model: k3rs.Model) -> None:
        """Takes from `model` which layers have experts."""
        kinds = enumerate(model.config["layers"])
        self._layers = [layer for layer, kind in kinds if kind["feed_forward"] == "experts"]

    def append(self, routes: Routes) -> None:
        """The routes of the ids of one step."""
        choices = [experts.tolist() for experts, _ in routes]
        for of_token in zip(*choices, strict=True):
            for layer, experts in zip(self._layers, of_token, strict=True):
                self.write(b"%d %d %s\n" % (self._token, layer, _joined(experts)))
            self._token += 1


def _joined(experts: list[int]) -> bytes:
    return " ".join(map(str, experts)).encode()
