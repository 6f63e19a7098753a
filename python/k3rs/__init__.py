"""Kimi K3 on one ordinary computer: exact output at any memory budget.

Example:
    >>> import k3rs
    >>> with k3rs.Model.open("Kimi-K3", memory="8GB") as model:  # doctest: +SKIP
    ...     for token in model.generate("The old lighthouse", max_tokens=32):
    ...         print(token.text, end="", flush=True)

"""

from k3rs import chat, exceptions
from k3rs._k3rs import __version__, available_backends
from k3rs.checkpoint import inspect, load_tokenizer, plan
from k3rs.generation import Token
from k3rs.log_probabilities import LogProbabilities
from k3rs.model import Model
from k3rs.packed_trunk import pack_trunk, verify_trunk
from k3rs.presets import PRESETS, MemoryRequest, Preset
from k3rs.sampling import Sampler
from k3rs.saved_session import SavedSession
from k3rs.scoring import Score, score
from k3rs.session import Session
from k3rs.shipped_model import shipped_model
from k3rs.synth import synthesize
from k3rs.text_stream import TextStream
from k3rs.tokenizer import Tokenizer

__all__ = [
    "PRESETS",
    "LogProbabilities",
    "MemoryRequest",
    "Model",
    "Preset",
    "Sampler",
    "SavedSession",
    "Score",
    "Session",
    "TextStream",
    "Token",
    "Tokenizer",
    "__version__",
    "available_backends",
    "chat",
    "exceptions",
    "inspect",
    "load_tokenizer",
    "pack_trunk",
    "plan",
    "score",
    "shipped_model",
    "synthesize",
    "verify_trunk",
]
