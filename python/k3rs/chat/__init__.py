"""The chat format of Kimi K3: conversations to token ids, and what the model writes back.

Example:
    >>> import k3rs
    >>> from k3rs import chat
    >>> tokenizer = k3rs.load_tokenizer(k3rs.shipped_model())
    >>> prompt = chat.encode([{"role": "user", "content": "Hello"}], tokenizer, thinking="off")
    >>> parser = chat.ReplyParser(tokenizer, starts_in="response")
    >>> parser.push(tokenizer.encode("!")[0])
    [TextPiece(channel='content', text='!')]

"""

from k3rs.chat.conversation import Conversation
from k3rs.chat.dialogue import Dialogue
from k3rs.chat.encoding import THINKING, ChatEncoder, Message, encode
from k3rs.chat.reply import Channel, Event, FinishReason, Reply, ReplyParser, TextPiece
from k3rs.chat.tools import ToolCall

__all__ = [
    "THINKING",
    "Channel",
    "ChatEncoder",
    "Conversation",
    "Dialogue",
    "Event",
    "FinishReason",
    "Message",
    "Reply",
    "ReplyParser",
    "TextPiece",
    "ToolCall",
    "encode",
]
