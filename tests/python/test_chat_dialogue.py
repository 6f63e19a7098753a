"""A turn costs its own ids only, and gives the bits of reading the whole conversation again.

The engine is the real one with the shipped model, which was never taught to chat; what it
"writes" is scripted.
"""

import shutil
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import smallest_budget
from numpy.typing import NDArray
from scripted_sampler import Scripted

import k3rs
from k3rs import chat
from k3rs.chat import Dialogue, Event, TextPiece
from k3rs.exceptions import InputError, NumericalFault, SessionFileError
from k3rs.prefix_cache import PrefixCache
from k3rs.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_directory(k3rs.shipped_model())
EOS, END = 2049, 2050
CLOSED = "<|close|>response<|sep|><|close|>message<|sep|>"
ANSWER = TOKENIZER.encode_markup(f"42{CLOSED}")
THOUGHTFUL = TOKENIZER.encode_markup(f"Why?<|close|>think<|sep|><|open|>response<|sep|>42{CLOSED}")
# Ids that the encoder does not give for their text.
BY_LETTERS = [each for letter in "the king" for each in TOKENIZER.encode(letter)]
# Of a whole reply the last id is not read when it was written, nor `<|end_of_msg|>` behind it.
ENDING = 2
LONG = TOKENIZER.encode("and the king said unto him, Take heed")


def interrupt(_done: int, _layers: int) -> None:
    """Ctrl-C in the middle of a sweep."""
    raise KeyboardInterrupt


@dataclass
class Talk:
    """A dialogue, and a check of every turn against a session that reads everything."""

    model: k3rs.Model
    dialogue: Dialogue
    events: list[Event] = field(default_factory=list)

    def ask(self, text: str, script: Sequence[int], **options: Any) -> int:
        """Says `text`; how many ids were read for it."""
        sampler = Scripted(script)
        return self._take(self.dialogue.ask(text, sampler=sampler, **options), sampler, text)

    def retry(self, script: Sequence[int], **options: Any) -> int:
        sampler = Scripted(script)
        return self._take(self.dialogue.retry(sampler=sampler, **options), sampler, None)

    def _take(
        self, reply: Generator[Event, None, None], sampler: Scripted, said: str | None
    ) -> int:
        before = self.dialogue.conversation.copy()
        if said is None:
            before.take_back()
        else:
            before.ask(said)
        self.events = list(reply)
        prompt, written = before.prompt(), sampler.ids[: len(sampler.seen)]
        whole = self.model.session().forward(prompt + written, all_positions=True)
        expected = whole[len(prompt) - 1 : len(prompt) - 1 + len(written)]
        assert np.array_equal(np.stack(sampler.seen).view(np.uint32), expected.view(np.uint32))
        return self.dialogue.prompt_tokens

    def text(self, channel: str) -> str:
        """What the last reply showed."""
        pieces = [each for each in self.events if isinstance(each, TextPiece)]
        return "".join(each.text for each in pieces if each.channel == channel)

    def prompt(self, text: str) -> list[int]:
        """What the model would be given for `text`, from the messages alone."""
        conversation = self.dialogue.conversation
        messages = [*conversation.messages, {"role": "user", "content": text}]
        return chat.encode(messages, TOKENIZER, thinking=conversation.thinking)


def asking(text: str) -> int:
    """How many ids a message of the user and the opening of the answer have."""
    return len(chat.encode([{"role": "user", "content": text}], TOKENIZER, thinking="off"))


@pytest.fixture(scope="module")
def shipped() -> Iterator[k3rs.Model]:
    with k3rs.Model.open(
        k3rs.shipped_model(), memory="1GB", threads=1, tokenizer=TOKENIZER
    ) as opened:
        yield opened


@pytest.fixture
def talk(shipped: k3rs.Model, tmp_path: Path) -> Iterator[Talk]:
    """A dialogue that does not think."""
    cache = tmp_path / "cache"
    with Dialogue(shipped, thinking="off", cache_directory=cache) as dialogue:
        yield Talk(shipped, dialogue)


def test_a_turn_reads_its_own_ids_only(shipped: k3rs.Model, tmp_path: Path) -> None:
    with Dialogue(shipped, system="Be brief.", cache_directory=tmp_path) as dialogue:
        talk = Talk(shipped, dialogue)
        first = talk.prompt("Hello")
        assert talk.ask("Hello", THOUGHTFUL) == len(first)
        assert (talk.text("reasoning"), talk.text("content")) == ("Why?", "42")
        assert dialogue.reply_tokens == len(THOUGHTFUL)
        second = talk.prompt("Really?")
        # The last id of a reply was chosen but not read.
        computed = len(first) + len(THOUGHTFUL) - 1
        assert second[:computed] == first + THOUGHTFUL[:-1]
        assert talk.ask("Really?", THOUGHTFUL) == len(second) - computed
        third = talk.prompt("So?")
        assert talk.ask("So?", THOUGHTFUL) == len(third) - len(second) - len(THOUGHTFUL) + 1
        assert dialogue.position == len(dialogue.conversation.history())


@pytest.mark.parametrize("stop", [EOS, END])
@pytest.mark.parametrize("written", ["42", "42<|close|>response<|sep|>", f"42{CLOSED}"])
def test_however_a_reply_ends_history_is_well_formed(talk: Talk, written: str, stop: int) -> None:
    first = talk.prompt("Hello")
    script = [*TOKENIZER.encode_markup(written), stop]
    talk.ask("Hello", script)
    ids = len(script) - written.endswith(CLOSED)
    assert talk.dialogue.reply_tokens == ids
    reply = {"role": "assistant", "content": "42", "reasoning_content": ""}
    assert talk.dialogue.conversation.messages[-1] == reply
    second = talk.prompt("And?")
    assert talk.ask("And?", ANSWER) == len(second) - len(first) - ids + 1


def test_the_ids_that_the_model_wrote_stay(talk: Talk) -> None:
    first = talk.prompt("Hello")
    talk.ask("Hello", [*BY_LETTERS, END])
    assert talk.text("content") == "the king"
    again = talk.prompt("And?")[len(first) + len(TOKENIZER.encode("the king")) :]
    assert talk.ask("And?", ANSWER) == len(again)
    assert talk.dialogue.position == len(first + BY_LETTERS + again + ANSWER) + 1


def test_another_answer_costs_no_reading(talk: Talk) -> None:
    talk.ask("Hello", ANSWER)
    talk.ask("And?", ANSWER)
    computed = talk.dialogue.position
    for script in ([*BY_LETTERS, END], [*LONG, END], ANSWER):
        assert talk.retry(script) == 0
    assert talk.dialogue.position == computed
    assert [each["content"] for each in talk.dialogue.conversation.messages[1::2]] == ["42", "42"]
    assert talk.dialogue.conversation.turn_count == 2


def test_only_a_reply_can_be_replaced(talk: Talk) -> None:
    with pytest.raises(InputError, match="expected a reply to replace, found none"):
        talk.dialogue.retry()


def test_after_undo_an_earlier_place_is_known(talk: Talk) -> None:
    talk.ask("Hello", ANSWER)
    second = talk.prompt("And?")
    cost = talk.ask("And?", ANSWER)
    talk.ask("So?", ANSWER)
    assert [talk.dialogue.undo(), talk.dialogue.undo()] == ["So?", "And?"]
    assert talk.prompt("And?") == second
    other = talk.prompt("But?")
    assert talk.ask("But?", ANSWER) == cost + len(other) - len(second)
    assert [talk.dialogue.undo() for _ in range(3)] == ["But?", "Hello", None]
    assert talk.ask("Hello", ANSWER) == 0


def test_reset_forgets_all_but_the_system(shipped: k3rs.Model, tmp_path: Path) -> None:
    with Dialogue(shipped, system="Be brief.", cache_directory=tmp_path) as dialogue:
        talk = Talk(shipped, dialogue)
        talk.ask("Hello", THOUGHTFUL)
        dialogue.reset()
        assert dialogue.reply is None
        assert dialogue.conversation.messages == [{"role": "system", "content": "Be brief."}]
        expected = len(talk.prompt("Another"))
        assert talk.ask("Another", THOUGHTFUL) == expected


def test_other_thinking_is_another_beginning(talk: Talk) -> None:
    first = talk.prompt("Hello")
    talk.ask("Hello", ANSWER)
    second = talk.prompt("And?")
    for thinking in ("low", "max"):
        talk.dialogue.conversation.thinking = thinking
        prompt = talk.prompt("And?")
        assert talk.ask("And?", THOUGHTFUL) == len(prompt)
        assert talk.text("reasoning") == "Why?"
        talk.dialogue.undo()
    talk.dialogue.conversation.thinking = "off"
    assert talk.ask("And?", ANSWER) == len(second) - len(first)


def test_without_thinking_thoughts_are_left_out(shipped: k3rs.Model, tmp_path: Path) -> None:
    with Dialogue(shipped, thinking="high", cache_directory=tmp_path) as dialogue:
        talk = Talk(shipped, dialogue)
        talk.ask("Hello", THOUGHTFUL)
        dialogue.conversation.thinking = "off"
        expected = talk.prompt("And?")
        assert dialogue.position == len(expected) - asking("And?")
        assert talk.ask("And?", ANSWER) == len(expected)


def test_another_system_is_another_beginning(talk: Talk) -> None:
    talk.ask("Hello", ANSWER)
    talk.dialogue.conversation.system = "Be brief."
    expected = talk.prompt("And?")
    assert talk.ask("And?", ANSWER) == len(expected)


def test_a_reply_that_is_cut_off_is_completed_in_history(talk: Talk) -> None:
    first = talk.prompt("Hello")
    talk.ask("Hello", LONG, max_tokens=3)
    assert talk.dialogue.reply_tokens == 3
    assert talk.dialogue.reply is not None
    assert talk.dialogue.reply.finish_reason == "length"
    assert talk.text("content") == TOKENIZER.decode(LONG[:3])
    closing = [*TOKENIZER.encode_markup(CLOSED), END]
    assert talk.dialogue.position == len(first) + 3 + len(closing)
    assert talk.ask("And?", ANSWER) == 1 + len(closing) + asking("And?")


def test_a_reply_fills_the_context_and_no_more(shipped: k3rs.Model, tmp_path: Path) -> None:
    prompt = chat.encode([{"role": "user", "content": "Hello"}], TOKENIZER, thinking="off")
    for room in (1, 4):
        with Dialogue(
            shipped, thinking="off", context=len(prompt) + room, cache_directory=tmp_path
        ) as dialogue:
            talk = Talk(shipped, dialogue)
            talk.ask("Hello", LONG)
            assert dialogue.reply_tokens == room
            before = dialogue.conversation.to_json()
            with pytest.raises(InputError, match=f"fewer than {len(prompt) + room} ids") as full:
                dialogue.ask("And?")
            assert full.value.hint
            assert dialogue.conversation.to_json() == before
            assert talk.retry(ANSWER) == 0
    with Dialogue(
        shipped, thinking="off", context=len(prompt), cache_directory=tmp_path
    ) as dialogue:
        with pytest.raises(InputError, match=f"found {len(prompt)}"):
            dialogue.ask("Hello")
        assert dialogue.conversation.messages == []


def test_wrong_arguments_change_nothing(talk: Talk) -> None:
    talk.ask("Hello", ANSWER)
    before = talk.dialogue.conversation.to_json()
    for refused in (talk.dialogue.ask, lambda _, **options: talk.dialogue.retry(**options)):
        with pytest.raises(InputError, match="max_tokens"):
            refused("x", max_tokens=0)
    with pytest.raises(InputError, match="half a surrogate pair"):
        talk.dialogue.ask("\udc00")
    assert talk.dialogue.conversation.to_json() == before
    assert talk.retry(ANSWER) == 0


def test_a_reply_that_nobody_asks_for_is_nothing(talk: Talk) -> None:
    talk.ask("Hello", ANSWER)
    before = talk.dialogue.conversation.to_json()
    for reply in (talk.dialogue.ask("And?"), talk.dialogue.retry()):
        reply.close()
        assert talk.dialogue.conversation.to_json() == before


def test_a_reply_that_is_left_half_way_is_kept(talk: Talk) -> None:
    first = talk.prompt("Hello")
    reply = talk.dialogue.ask("Hello", sampler=Scripted(LONG))
    next(reply)
    next(reply)
    reply.close()
    written = talk.dialogue.reply_tokens
    content = talk.dialogue.conversation.messages[-1]["content"]
    assert content == TOKENIZER.decode(LONG[:written])
    assert talk.dialogue.reply is not None
    assert talk.dialogue.reply.finish_reason == "stop"
    second = talk.prompt("And?")
    assert talk.ask("And?", ANSWER) == len(second) - len(first) - written + 1


def test_stop_ends_a_reply_that_shows_nothing(talk: Talk) -> None:
    """An argument of a call is shown when it is complete; until then there are no events."""

    class Stopping(Scripted):
        def pick(self, logits: NDArray[np.float32], **more: Any) -> int:
            if len(self.seen) == 20:
                talk.dialogue.stop()
            return super().pick(logits, **more)

    opening = '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="a"'
    script = [*TOKENIZER.encode_markup(opening), *LONG * 2]
    assert list(talk.dialogue.ask("Hello", sampler=Stopping(script))) == []
    assert talk.dialogue.reply_tokens == 21
    assert talk.dialogue.conversation.messages[-1]["role"] == "assistant"
    talk.ask("And?", ANSWER)
    assert talk.dialogue.reply_tokens == len(ANSWER)


def test_ctrl_c_while_the_prompt_is_read_takes_the_message_back(talk: Talk) -> None:
    talk.ask("Hello", ANSWER)
    before = talk.dialogue.conversation.to_json()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            list(talk.dialogue.ask("And then?" * 500, progress=interrupt))
        assert talk.dialogue.conversation.to_json() == before
    # The session that was interrupted is lost; what it knew before is not.
    assert talk.ask("And?", ANSWER) == ENDING + asking("And?")


def test_ctrl_c_in_the_middle_of_a_token_keeps_what_was_written(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Scripted):
        """Makes the sweep behind the second id last until it is interrupted."""

        def pick(self, logits: NDArray[np.float32], **more: Any) -> int:
            if len(self.seen) == 1:
                sessions[-1].append([1] * 50_000)
            return super().pick(logits, **more)

    def session(cache: PrefixCache, ids: list[int]) -> k3rs.Session:
        sessions.append(given(cache, ids))
        return sessions[-1]

    sessions: list[k3rs.Session] = []
    given = PrefixCache.session
    monkeypatch.setattr(PrefixCache, "session", session)
    first = talk.prompt("Hello")
    list(talk.dialogue.ask("Hello", sampler=Scripted([END])))
    with pytest.raises(KeyboardInterrupt):
        # The prompt is known already, so that nothing else can be interrupted.
        list(talk.dialogue.retry(sampler=Slow(LONG), progress=interrupt))
    assert sessions[-1].is_aborted
    assert talk.dialogue.conversation.messages[-1]["content"] == TOKENIZER.decode(LONG[:2])
    second = talk.prompt("And?")
    assert talk.ask("And?", ANSWER) == len(second) - len(first)


def test_a_retry_that_is_broken_off_at_once_keeps_the_reply(talk: Talk) -> None:
    talk.ask("Hello", ANSWER)
    before = talk.dialogue.conversation.to_json()
    sampler = Scripted([])
    with pytest.raises(IndexError):
        list(talk.dialogue.retry(sampler=sampler))
    assert talk.dialogue.conversation.to_json() == before


def test_a_numerical_fault_leaves_a_dialogue_that_goes_on(talk: Talk) -> None:
    class Faulty(Scripted):
        def pick(self, logits: NDArray[np.float32], **more: Any) -> int:
            if len(self.seen) == 2:
                raise NumericalFault("NaN", "none")
            return super().pick(logits, **more)

    first = talk.prompt("Hello")
    with pytest.raises(NumericalFault):
        list(talk.dialogue.ask("Hello", sampler=Faulty(LONG)))
    assert talk.dialogue.conversation.messages[-1]["content"] == TOKENIZER.decode(LONG[:2])
    second = talk.prompt("And?")
    # Both ids were read before the fault.
    assert talk.ask("And?", ANSWER) == len(second) - len(first) - 2


def test_a_call_of_a_tool_is_an_event(talk: Talk) -> None:
    reply = {
        "role": "assistant",
        "content": "Let me",
        "tool_calls": [{"id": "call_1", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    }
    question = {"role": "user", "content": "Hello"}
    first = talk.prompt("Hello")
    whole = chat.encode([question, reply], TOKENIZER, thinking="off", generation_prompt=False)
    script = whole[len(first) :]
    talk.ask("Hello", script)
    assert talk.events[-1] == chat.ToolCall("call_1", "f", '{"a": 1}')
    assert talk.text("content") == "Let me"
    message = talk.dialogue.conversation.messages[-1]
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert talk.dialogue.conversation.history() == whole
    assert talk.ask("And?", ANSWER) == ENDING + asking("And?")


def test_no_marker_is_shown(talk: Talk) -> None:
    stray = "a<|sep|>b<|open|>c<|close|>d<|open|>think<|sep|>e<|close|>what<|sep|>f"
    special = [each for each in range(TOKENIZER.rank_count, 2304, 11) if each not in (EOS, END)]
    special = [each for each in special if each not in range(2051, 2054)]
    talk.ask("Hello", [*TOKENIZER.encode_markup(stray), *special, END])
    shown = talk.text("reasoning") + talk.text("content")
    assert not set(shown) & set("<|>[]")
    assert set("abef") <= set(shown)
    talk.ask("And?", ANSWER)


def test_going_back_costs_time_where_nothing_can_be_kept(talk: Talk, tmp_path: Path) -> None:
    talk.ask("Hello", ANSWER)
    assert talk.dialogue.keep_error is None
    shutil.rmtree(tmp_path / "cache")
    second = talk.prompt("And?")
    assert talk.ask("And?", ANSWER) == ENDING + asking("And?")
    assert isinstance(talk.dialogue.keep_error, SessionFileError)
    assert talk.retry(ANSWER) == len(second)


def test_a_saved_conversation_goes_on_as_if_it_had_not_stopped(
    shipped: k3rs.Model, tmp_path: Path
) -> None:
    """Also at the smallest budget, with another number of threads."""
    file = tmp_path / "talk.session"
    directory = k3rs.shipped_model()
    with Dialogue(shipped, system="S", thinking="low", cache_directory=tmp_path) as dialogue:
        talk = Talk(shipped, dialogue)
        talk.ask("Hello", THOUGHTFUL)
        talk.ask("More", [*BY_LETTERS, *LONG], max_tokens=12)
        dialogue.save(file)
        saved = dialogue.conversation.to_json()
        count = talk.ask("And?", THOUGHTFUL)
        whole = dialogue.conversation.to_json()
    memory = smallest_budget(directory, 1024, threads=2)
    with (
        k3rs.Model.open(directory, memory=memory, positions=1024, threads=2) as other,
        Dialogue(other, thinking="off", cache_directory=tmp_path) as dialogue,
    ):
        dialogue.load(file)
        assert dialogue.conversation.to_json() == saved
        # `Talk` compares with a session of the other model: the bits are the same.
        talk = Talk(shipped, dialogue)
        assert talk.ask("And?", THOUGHTFUL) == count
        assert dialogue.conversation.to_json() == whole
        assert talk.retry(ANSWER) == 0


def test_saving_changes_nothing(talk: Talk, tmp_path: Path) -> None:
    talk.dialogue.save(tmp_path / "nothing was said")
    talk.ask("Hello", ANSWER)
    talk.dialogue.save(tmp_path / "one turn")
    assert talk.ask("And?", ANSWER) == ENDING + asking("And?")
    talk.dialogue.load(tmp_path / "nothing was said")
    assert talk.dialogue.conversation.messages == []
    assert talk.ask("Hello", ANSWER) == 0
    talk.dialogue.load(tmp_path / "one turn")
    assert talk.dialogue.conversation.turn_count == 1
    assert talk.ask("Why?", ANSWER) == ENDING + asking("Why?")


def test_a_file_that_is_no_conversation_of_this_model_is_refused(
    talk: Talk, model: k3rs.Model, tmp_path: Path
) -> None:
    talk.ask("Hello", ANSWER)
    before = talk.dialogue.conversation.to_json()
    with Dialogue(model, thinking="off", cache_directory=tmp_path) as foreign:
        foreign.save(tmp_path / "another model")
    talk.model.session().save(tmp_path / "no conversation")
    (tmp_path / "no session").write_text("x")
    for name in ("another model", "no session", "missing"):
        with pytest.raises(SessionFileError, match=name):
            talk.dialogue.load(tmp_path / name)
    with pytest.raises(InputError, match="expected a conversation"):
        talk.dialogue.load(tmp_path / "no conversation")
    assert talk.dialogue.conversation.to_json() == before
    assert talk.ask("And?", ANSWER) == ENDING + asking("And?")


def test_a_model_without_a_tokenizer_cannot_talk(without_tokenizer: Path) -> None:
    with (
        k3rs.Model.open(without_tokenizer, memory="1GB", threads=1) as mute,
        pytest.raises(InputError, match="expected a tokenizer for a chat"),
    ):
        Dialogue(mute)


def test_without_a_sampler_a_reply_is_greedy_and_ends_with_the_model(talk: Talk) -> None:
    events = list(talk.dialogue.ask("Hello", max_tokens=5))
    prompt = chat.encode([{"role": "user", "content": "Hello"}], TOKENIZER, thinking="off")
    expected = list(talk.model.generate(prompt, max_tokens=5))
    shown = [each.text for each in events if isinstance(each, TextPiece)]
    assert "".join(shown) == "".join(token.text for token in expected)
