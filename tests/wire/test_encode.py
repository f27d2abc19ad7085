"""What the encoder refuses, what it does not copy, and values whose bytes come later."""

import pytest

from pion.wire.resp import (
    Encoder,
    LocalProtocolError,
    ProtocolError,
    encode,
    encode_command,
    encode_commands,
    encode_parts,
    register_stream_type,
)


@register_stream_type
class Later:
    """Stands for a bulk of `n` bytes."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n


class LaterChild(Later):
    pass


def test_a_stream_is_a_part_of_its_own_inside_any_reply() -> None:
    one, two = Later(5), LaterChild(70_000)
    assert encode_parts([1, one, None, two], 3) == [
        b"*4\r\n:1\r\n$5\r\n",
        one,
        b"\r\n_\r\n$70000\r\n",
        two,
        b"\r\n",
    ]
    with pytest.raises(LocalProtocolError, match="Later is sent from its file"):
        encode([one], 2)


def test_large_bytes_are_passed_on_uncopied() -> None:
    blob = bytes(20_000)
    parts = encode_parts([blob, b"small"], 2)
    assert parts[1] is blob
    assert b"".join(parts) == b"*2\r\n$20000\r\n" + blob + b"\r\n$5\r\nsmall\r\n"
    mutable = bytearray(20_000)
    assert encode_parts(mutable, 2) == [b"$20000\r\n" + bytes(20_000) + b"\r\n"]


def test_one_encoder_takes_many_replies() -> None:
    encoder = Encoder(3)
    encoder.add(1)
    encoder.add(None)
    assert encoder.parts_taken() == [b":1\r\n_\r\n"]
    assert encoder.parts_taken() == []


@pytest.mark.parametrize("value", [object(), 1j, range(3), [object()], {"a": object()}])
def test_values_without_an_encoding_are_refused(value: object) -> None:
    with pytest.raises(LocalProtocolError, match="a reply cannot hold a"):
        encode(value, 3)


def test_a_reply_that_contains_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(LocalProtocolError, match="levels deep"):
        encode(loop, 2)


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="protocol version 4"):
        encode(1, 4)


@pytest.mark.parametrize("part", [None, True, object(), [1]])
def test_arguments_that_are_not_bytes_text_or_numbers_are_refused(part: object) -> None:
    with pytest.raises(LocalProtocolError, match="an argument cannot be"):
        encode_command("SET", "k", part)  # type: ignore[arg-type]


def test_an_argument_must_be_contiguous_and_a_command_not_empty() -> None:
    with pytest.raises(LocalProtocolError, match="C-contiguous"):
        encode_command(memoryview(b"abcd")[::2])
    with pytest.raises(LocalProtocolError, match="needs at least its name"):
        encode_commands([["PING"], []])


def test_the_base_error_says_nobody_is_to_blame_and_cannot_be_raised() -> None:
    with pytest.raises(TypeError, match="LocalProtocolError or RemoteProtocolError"):
        raise ProtocolError("x")
