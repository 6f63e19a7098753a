"""What the model writes becomes text, tool calls and history, whatever it writes."""

import json
import time
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import k3rs
from k3rs import chat
from k3rs.exceptions import InputError
from k3rs.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_directory(k3rs.shipped_model())
EOS, END, OPEN, CLOSE, SEPARATOR, PADDING = 2049, 2050, 2051, 2052, 2053, 2303
MARKUP = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[EOS]", "[PAD]", "<|reserved"]

ANSWERED = "Why?<|close|>think<|sep|><|open|>response<|sep|>42"
FINISHED = "<|close|>response<|sep|><|close|>message<|sep|>"
CLOSED = FINISHED + "<|end_of_msg|>"
CALLS = (
    '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
    '<|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>"
)


def pushed(
    ids: list[int], starts_in: Literal["think", "response"] = "think", *, length: bool = False
) -> tuple[chat.ReplyParser, list[chat.Event]]:
    parser = chat.ReplyParser(TOKENIZER, starts_in=starts_in)
    events = [event for token_id in ids for event in parser.push(token_id)]
    return parser, events + parser.finish(length=length)


def parsed(
    markup: str, starts_in: Literal["think", "response"] = "think", *, length: bool = False
) -> chat.Reply:
    """The reply that is written as `markup`, in which special tokens are what they look like."""
    return pushed(TOKENIZER.encode_markup(markup), starts_in, length=length)[0].reply()


def history(
    markup: str, starts_in: Literal["think", "response"] = "think", *, length: bool = False
) -> str:
    parser, _ = pushed(TOKENIZER.encode_markup(markup), starts_in, length=length)
    return TOKENIZER.decode(parser.history_ids())


def calling(body: str) -> str:
    """A reply that calls `f`; `body` are the elements of the call."""
    call = f'<|open|>call tool="f" index="1"<|sep|>{body}<|close|>call<|sep|>'
    closing = "<|close|>tools<|sep|><|close|>message<|sep|>[EOS]"
    return f"{ANSWERED}<|close|>response<|sep|><|open|>tools<|sep|>{call}{closing}"


def argument(value: str, kind: str = "string", key: str = "k") -> str:
    opening = f'<|open|>argument key="{key}" type="{kind}"<|sep|>'
    return f"{opening}{value}<|close|>argument<|sep|>"


def only_call(markup: str) -> chat.ToolCall:
    (call,) = parsed(markup).tool_calls
    return call


def test_a_whole_reply() -> None:
    ids = TOKENIZER.encode_markup(ANSWERED + "<|close|>response<|sep|>" + CALLS)
    parser, events = pushed([*ids, *TOKENIZER.encode_markup("<|close|>message<|sep|>"), EOS])
    assert parser.ended
    call = chat.ToolCall("call_1", "f", '{"a": 1}')
    assert parser.reply() == chat.Reply("Why?", "42", (call,), "tool_calls", ())
    assert "".join(e.text for e in events[:-1] if isinstance(e, chat.TextPiece)) == "Why?42"
    assert events[-1] == call
    assert parser.reply().as_message() == {
        "role": "assistant",
        "reasoning_content": "Why?",
        "content": "42",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        ],
    }


@pytest.mark.parametrize("stop", ["[EOS]", "<|end_of_msg|>"])
def test_a_stop_id_ends_the_reply_and_is_no_text(stop: str) -> None:
    for markup in (ANSWERED, ANSWERED + FINISHED):
        parser, _ = pushed(TOKENIZER.encode_markup(f"{markup}{stop}more"))
        assert parser.ended
        assert parser.reply() == chat.Reply("Why?", "42", (), "stop", ())
        assert TOKENIZER.decode(parser.history_ids()) == ANSWERED + CLOSED


def test_the_closing_of_the_message_ends_the_reply() -> None:
    ids = TOKENIZER.encode_markup(ANSWERED + FINISHED)
    parser = chat.ReplyParser(TOKENIZER)
    for token_id in ids:
        assert not parser.ended
        parser.push(token_id)
    assert parser.ended
    assert parser.push(ids[0]) == []
    assert parser.finish(length=True) == []
    assert parser.reply().finish_reason == "stop"
    assert parser.history_ids() == [*ids, END]
    assert (parser.kept_count(), parser.closing_ids()) == (len(ids), [END])


def test_thoughts_that_never_close_are_no_answer() -> None:
    for length, reason in ((True, "length"), (False, "stop")):
        reply = parsed("So many", length=length)
        assert (reply.reasoning, reply.content, reply.finish_reason) == ("So many", "", reason)
        assert reply.notes == ("the reply ends within the reasoning: there is no answer",)
    assert history("So many", length=True) == (
        "So many<|close|>think<|sep|><|open|>response<|sep|>" + CLOSED
    )


def test_only_tool_calls() -> None:
    markup = "T<|close|>think<|sep|>" + CALLS + "<|close|>message<|sep|>"
    reply = parsed(markup)
    assert (reply.reasoning, reply.content, reply.notes) == ("T", "", ())
    assert (len(reply.tool_calls), reply.finish_reason) == (1, "tool_calls")
    assert history(markup) == markup + "<|end_of_msg|>"


def test_the_answer_need_not_close_before_tools() -> None:
    markup = ANSWERED + CALLS + "<|close|>message<|sep|>"
    reply = parsed(markup)
    assert (reply.content, len(reply.tool_calls), reply.notes) == ("42", 1, ())
    assert history(markup) == markup + "<|end_of_msg|>"


def test_an_echo_of_the_opening_is_no_text() -> None:
    think = "<|open|>think<|sep|>"
    reply = parsed(think + think + ANSWERED + CLOSED)
    assert (reply.reasoning, reply.content, reply.notes) == ("Why?", "42", ())
    reply = parsed("a" + think + ANSWERED + CLOSED)
    assert (reply.reasoning, reply.content) == ("aWhy?", "42")
    assert reply.notes == ("a tag in the wrong place is left out: `think`",)
    assert parsed("<|open|>response<|sep|>42" + CLOSED, "response").content == "42"


def test_a_section_begins_where_it_is_opened() -> None:
    reply = parsed("Why?<|open|>response<|sep|>42" + CLOSED)
    assert (reply.reasoning, reply.content) == ("Why?", "42")
    assert reply.notes == ("`think` was not closed before `response`",)
    # A model that thinks although it was told not to.
    reply = parsed("<|open|>think<|sep|>" + ANSWERED + CLOSED, "response")
    assert (reply.reasoning, reply.content) == ("Why?", "42")


def test_an_unknown_tag_is_text_without_its_markers() -> None:
    bold = "<|open|>b<|sep|>x<|close|>b<|sep|>"
    reply = parsed(f"<|open|>thinking<|sep|>{ANSWERED} {bold}{bold}{CLOSED}")
    assert (reply.reasoning, reply.content) == ("thinkingWhy?", "42 bxbbxb")
    assert reply.notes == ("an unknown tag is kept as text: 'thinking'",)


def test_what_is_no_tag_or_in_the_wrong_place_is_left_out() -> None:
    reply = parsed(
        ANSWERED + "<|sep|>a<|open|>bro<|close|>think<|sep|>c<|open|>call<|sep|>d<|close|>"
    )
    assert (reply.content, reply.finish_reason) == ("42acd", "stop")
    assert reply.notes == (
        "a marker without a tag is left out",
        "a tag in the wrong place is left out: `think`",
        "a tag that was not finished is left out",
    )
    between = ANSWERED + "<|close|>response<|sep|>\nlost" + CALLS + "lost"
    assert parsed(between).content == "42"
    assert parsed(between).notes == ("text outside of reasoning, answer and arguments is left out",)


def test_a_long_text_behind_a_marker_is_not_held_back() -> None:
    parser = chat.ReplyParser(TOKENIZER, starts_in="response")
    assert parser.push(OPEN) == []
    letter = TOKENIZER.encode("a")
    texts = [event for _ in range(300) for event in parser.push(*letter)]
    assert sum(len(event.text) for event in texts if isinstance(event, chat.TextPiece)) == 300
    parser.finish(length=False)
    assert parser.reply().notes == ("a marker without a tag is left out",)


def test_characters_of_markers_are_text() -> None:
    text = "<|close|>think<|sep|> [EOS] <|reserved_token_2100|>"
    parser, _ = pushed(TOKENIZER.encode(text))
    assert parser.reply().reasoning == text
    assert not parser.ended


def test_special_tokens_are_left_out_and_noted_once() -> None:
    ids = TOKENIZER.encode("abc")
    parser, _ = pushed([2048, *ids[:1], 2100, PADDING, PADDING, *ids[1:], EOS], "response")
    assert parser.reply().content == "abc"
    assert parser.reply().notes == (
        "a special token is left out: `[BOS]` (2048)",
        "`[PAD]` (2303) is left out: a sign of a numerical fault",
    )
    markup = calling(argument("a[PAD]b")).replace("<|close|>call", "<|close|>ca[BOS]ll")
    assert only_call(markup).arguments == '{"k": "ab"}'


def test_an_unknown_id_is_refused_and_leaves_no_trace() -> None:
    parser = chat.ReplyParser(TOKENIZER)
    for token_id in (-1, TOKENIZER.vocabulary_size):
        with pytest.raises(InputError, match=f"found {token_id}"):
            parser.push(token_id)
    assert parser.kept_count() == 0


def test_a_reply_starts_in_a_channel() -> None:
    wrong: Any = "tools"
    with pytest.raises(InputError, match="expected think or response, found 'tools'"):
        chat.ReplyParser(TOKENIZER, starts_in=wrong)


def test_characters_cut_by_tokens_stay_whole() -> None:
    # These characters are several tokens of the shipped vocabulary.
    first, second = TOKENIZER.encode("世"), TOKENIZER.encode("界")
    assert min(len(first), len(second)) == 3
    closing = TOKENIZER.encode_markup("<|close|>think<|sep|><|open|>response<|sep|>")
    parser, events = pushed([*first, 2100, *second[:2], *closing, *second, *first[:1]])
    assert events == [
        chat.TextPiece("reasoning", "世"),
        chat.TextPiece("reasoning", "\ufffd"),
        chat.TextPiece("content", "界"),
        chat.TextPiece("content", "\ufffd"),
    ]
    assert parser.reply().reasoning == "世\ufffd"


@pytest.mark.parametrize(
    ("value", "kind", "shown"),
    [
        (' a "b" \\ &quot; \n ', "string", r'" a \"b\" \\ &quot; \n "'),
        ("12345678901234567890123", "number", "12345678901234567890123"),
        ("9" * 5000, "number", "9" * 5000),
        ("1e400", "number", "1e400"),
        (" 1.0\n", "number", " 1.0\n"),
        ("true", "boolean", "true"),
        ("null", "null", "null"),
        ('{"b":[1.50, "ä"],"a":{}}', "object", '{"b":[1.50, "ä"],"a":{}}'),
        ("[ ]", "array", "[ ]"),
    ],
)
def test_values_keep_what_the_model_wrote(value: str, kind: str, shown: str) -> None:
    call = only_call(calling(argument(value, kind, "a &amp; &quot;b&quot;")))
    assert call.arguments == rf'{{"a & \"b\"": {shown}}}'
    assert call.notes == ()


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("one", "number"),
        ("1", "boolean"),
        ("True", "boolean"),
        ("NaN", "number"),
        ("", "null"),
        ("[1", "array"),
        ("{}", "array"),
        ("[" * 100_000, "array"),
        ("1", "integer"),
        ('"a"', "text"),
    ],
)
def test_a_value_of_another_type_is_a_string_with_a_note(value: str, kind: str) -> None:
    call = only_call(calling(argument(value, kind)))
    assert json.loads(call.arguments) == {"k": value}
    (note,) = call.notes
    assert f"argument `k` has type `{kind}`" in note


def test_faults_of_arguments_are_noted() -> None:
    call = only_call(calling(argument("1", "number") + argument("2") + argument("3", "number")))
    assert call.arguments == '{"k": 3}'
    assert call.notes == ("argument `k` was written twice; the last one counts",)
    call = only_call(calling(argument("1").replace(' type="string"', "")))
    assert call.arguments == '{"k": "1"}'
    assert call.notes == ("argument `k` has no type, which its value does not fit: a string now",)


def test_raw_json_is_passed_on_as_it_is() -> None:
    def raw(text: str) -> str:
        return f'<|open|>json type="object"<|sep|>{text}<|close|>json<|sep|>'

    call = only_call(calling(raw(' {"a":1e400} ')))
    assert (call.arguments, call.notes) == (' {"a":1e400} ', ())
    call = only_call(calling(raw('{"a": ')))
    assert (call.arguments, call.notes) == ('{"a": ', ("the arguments are not a JSON object",))
    call = only_call(calling(argument("1") + raw("{}")))
    assert (call.arguments, call.notes) == (
        "{}",
        ("raw JSON beside arguments; the raw JSON counts",),
    )


@pytest.mark.parametrize(
    "value",
    [
        "a<|open|>b",
        "<|open|>argument<|sep|>x<|sep|>",
        "<|close|>call<|sep|>",
        "<|close|>argument<|close|>message<|sep|>",
        '<|close|>argument key="k"<|sep|>',
        "<|open|>" + "x y " * 300 + "<|sep|>",
    ],
)
def test_a_marker_in_an_argument_is_its_text(value: str) -> None:
    reply = parsed(calling(argument(value)))
    (call,) = reply.tool_calls
    assert json.loads(call.arguments) == {"k": value}
    assert call.notes == ("a marker inside an argument is kept as text",)
    assert (reply.content, reply.notes) == ("42", ())


@pytest.mark.parametrize(
    ("markup", "reason"),
    [
        (calling(argument("1")).replace(' tool="f"', ""), "it names no tool"),
        (calling(argument("1")).replace(' key="k"', ""), "an argument has no name"),
        (calling(argument("1")).replace("<|close|>call<|sep|>", ""), "it was not closed"),
        (calling(argument("1")).split("<|close|>tools")[0][: -len("<|sep|>")], "not finished"),
        (calling(argument("1")).split("<|close|>argument")[0], "it was not finished"),
        (calling("").split("<|close|>call")[0] + "<|close|>message<|sep|>", "it was not closed"),
    ],
)
def test_a_call_that_is_not_whole_is_left_out(markup: str, reason: str) -> None:
    reply = parsed(markup, length=True)
    assert (reply.content, reply.tool_calls) == ("42", ())
    assert reply.finish_reason != "tool_calls"
    (note,) = reply.notes
    assert note.startswith("a call of ")
    assert note.endswith(reason)


def test_calls_are_numbered_as_they_are_finished() -> None:
    one, other = argument("1"), argument("2")
    between = '<|close|>call<|sep|><|open|>call tool="g" index="2"<|sep|>'
    calls = parsed(calling(one + between + other)).tool_calls
    assert [(call.id, call.name) for call in calls] == [("call_1", "f"), ("call_2", "g")]
    unclosed = '<|open|>call tool="g" index="2"<|sep|>'
    (call,) = parsed(calling(one + unclosed + other)).tool_calls
    assert call == chat.ToolCall("call_1", "g", '{"k": "2"}')


@pytest.mark.parametrize(
    ("markup", "expected"),
    [
        ("", "<|close|>think<|sep|><|open|>response<|sep|>" + CLOSED),
        ("a<|close|>thi", "a<|close|>think<|sep|><|open|>response<|sep|>" + CLOSED),
        (
            "a<|close|>think<|sep|>",
            "a<|close|>think<|sep|><|open|>response<|sep|>" + CLOSED,
        ),
        (
            "a<|close|>think<|sep|><|open|>response",
            "a<|close|>think<|sep|><|open|>response<|sep|>" + CLOSED,
        ),
        (ANSWERED, ANSWERED + CLOSED),
        (ANSWERED + "<|close|>", ANSWERED + CLOSED),
        (ANSWERED + "<|close|>response<|sep|>", ANSWERED + CLOSED),
        (ANSWERED + FINISHED[:-7], ANSWERED + CLOSED),
        (calling("").split('<|open|>call tool="f"')[0], ANSWERED + CLOSED),
        (calling(argument("1")).split("1<|close|>argument")[0], ANSWERED + CLOSED),
        (ANSWERED + '<|open|>tools<|sep|><|open|>call tool="f"<|sep|>', ANSWERED + CLOSED),
        (
            ANSWERED + CALLS[:-21] + '<|open|>call tool="g"<|sep|>',
            ANSWERED + CALLS + "<|close|>message<|sep|><|end_of_msg|>",
        ),
        (
            "a<|close|>think<|sep|>" + CALLS,
            "a<|close|>think<|sep|>" + CALLS + "<|close|>message<|sep|><|end_of_msg|>",
        ),
    ],
)
def test_history_of_a_reply_that_was_cut_off(markup: str, expected: str) -> None:
    assert history(markup, length=True) == expected
    assert history(markup + "[EOS]") == expected
    parser, _ = pushed(ids := TOKENIZER.encode_markup(markup), length=True)
    assert ids[: parser.kept_count()] + parser.closing_ids() == parser.history_ids()


ARGUMENTS = [
    {"q": ' say "hi" &quot; & \n ', "<|close|>": "<|close|>argument<|sep|>", 'k"&': ""},
    {"n": 10**40, "f": 1.5, "t": False, "z": None, "o": {"a": [{"ä": "世"}], "b": "\\"}},
    {},
]


@pytest.mark.parametrize("thinking", ["max", "off"])
def test_an_encoded_answer_comes_back_byte_for_byte(thinking: str) -> None:
    texts = [json.dumps(each, ensure_ascii=False) for each in ARGUMENTS]
    texts += ['{"x": 1e400, "y": 1.0, "z": -0, "w": [1.10, 99999999999999999999]}', "not JSON &"]
    message: dict[str, Any] = {
        "role": "assistant",
        "reasoning_content": "Let me <|close|> see.\n" if thinking == "max" else "",
        "content": " Done: 世界 ",
        "tool_calls": [
            {
                "id": f"call_{index}",
                "type": "function",
                "function": {"name": f'f"{index}&amp;', "arguments": text},
            }
            for index, text in enumerate(texts, start=1)
        ],
    }
    encoder = chat.ChatEncoder(TOKENIZER, thinking=thinking)
    prompt = encoder.generation_prompt()
    ids = encoder.message(message)
    assert ids[: len(prompt)] == prompt
    ids = ids[len(prompt) :]
    parser, _ = pushed(ids, "think" if thinking == "max" else "response")
    assert parser.reply().as_message() == message
    assert parser.history_ids() == ids
    assert parser.reply().notes == ()


WORDS = ["think", "response", "tools", "message", "call", "argument", "json", "b"]
HEADERS = [
    *WORDS,
    'call tool="f"',
    'argument key="k" type="string"',
    'argument key="n" type="array"',
]
TAGS = [
    [marker, *TOKENIZER.encode(header), SEPARATOR] for header in HEADERS for marker in (OPEN, CLOSE)
]
ANY = st.one_of(
    st.sampled_from(TAGS),
    st.sampled_from(TAGS),
    st.integers(0, TOKENIZER.vocabulary_size - 1).map(lambda token_id: [token_id]),
    st.sampled_from([[OPEN], [CLOSE], [SEPARATOR], [2100], [228], [184], TOKENIZER.encode("a")]),
)
STARTS: st.SearchStrategy[Literal["think", "response"]] = st.sampled_from(["think", "response"])


@given(st.lists(ANY, max_size=30), STARTS, st.booleans(), st.integers(0, 60))
@settings(max_examples=1_000, deadline=None)
def test_any_ids(
    parts: list[list[int]], starts_in: Literal["think", "response"], length: bool, cut: int
) -> None:
    ids = [token_id for part in parts for token_id in part][: 60 + cut]
    parser, events = pushed(ids, starts_in, length=length)
    reply = parser.reply()
    texts = {"reasoning": "", "content": ""}
    for event in events:
        if isinstance(event, chat.TextPiece):
            assert event.text
            texts[event.channel] += event.text
    assert texts == {"reasoning": reply.reasoning, "content": reply.content}
    assert tuple(e for e in events if isinstance(e, chat.ToolCall)) == reply.tool_calls
    for text in texts.values():
        assert not any(special in text for special in MARKUP)

    # History is well-formed, says the same as the reply, and can be encoded again.
    again, _ = pushed(parser.history_ids(), starts_in)
    assert again.ended
    assert again.history_ids() == parser.history_ids()
    assert again.reply().as_message() == reply.as_message()
    assert parser.history_ids()[: parser.kept_count()] == ids[: parser.kept_count()]
    assert chat.encode([reply.as_message()], TOKENIZER, generation_prompt=False)


ORDINARY = st.one_of(st.integers(0, 255), st.integers(0, TOKENIZER.rank_count - 1))
OTHER_SPECIAL = st.sampled_from([2048, 2054, 2100, 2302, PADDING])


@given(st.lists(ORDINARY, max_size=20), st.lists(ORDINARY, max_size=20), OTHER_SPECIAL, st.data())
@settings(max_examples=300, deadline=None)
def test_text_is_that_of_the_tokenizer(
    thought: list[int], answer: list[int], special: int, data: st.DataObject
) -> None:
    between = TOKENIZER.encode_markup("<|close|>think<|sep|><|open|>response<|sep|>")
    ids = [*thought, *between, *answer]
    ids.insert(data.draw(st.integers(0, len(ids))), special)
    reply = pushed(ids)[0].reply()
    assert reply.reasoning == TOKENIZER.decode(thought)
    assert reply.content == TOKENIZER.decode(answer)


def test_a_long_reply_takes_time_in_proportion_to_its_length() -> None:
    def seconds(length: int) -> float:
        thought = TOKENIZER.encode("a") * (length // 2)
        call = TOKENIZER.encode_markup(calling(argument("bc" * (length // 4))))
        ids = [*thought, *call]
        started = time.process_time()
        pushed(ids)
        return time.process_time() - started

    # Quadratic work would take sixteen times as long.
    assert seconds(400_000) < 9 * seconds(100_000)
