"""Text from token ids that arrive one by one.

A token may end in the middle of a character, so what can be shown lags behind what was
generated, by at most three bytes. Python's own incremental decoder will not do: it holds
back `ED A0`, the start of a surrogate, which no byte can turn into a character.
"""

import re

from k3rs.tokenizer import Tokenizer

# The start of a character, at the end of the data, that further bytes can complete.
_INCOMPLETE = re.compile(
    rb"""(?: [\xc2-\xdf]
           | \xe0 [\xa0-\xbf]?
           | [\xe1-\xec\xee\xef] [\x80-\xbf]?
           | \xed [\x80-\x9f]?
           | \xf0 (?: [\x90-\xbf] [\x80-\xbf]? )?
           | [\xf1-\xf3] [\x80-\xbf]{0,2}
           | \xf4 (?: [\x80-\x8f] [\x80-\xbf]? )?
         ) \Z""",
    re.VERBOSE,
)


class TextStream:
    """Decodes a stream of ids into text that is never taken back.

    All texts returned by `push`, followed by that of `finish`, concatenate to
    `tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._held = b""

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, often one word, sometimes nothing.

        Bytes that may still become a character are held back. Bytes that cannot are replaced
        by U+FFFD at once. Raises `InputError` if the vocabulary has no such id.
        """
        data = self._held + self._tokenizer.token_bytes(token_id)
        incomplete = _INCOMPLETE.search(data)
        end = incomplete.start() if incomplete else len(data)
        self._held = data[end:]
        return data[:end].decode("utf-8", "replace")

    def finish(self) -> str:
        """Ends the text: one U+FFFD if it stops within a character, otherwise nothing.

        The stream is then as new.
        """
        rest, self._held = self._held, b""
        return rest.decode("utf-8", "replace")
