import pytest

from k3rs.exceptions import InputError
from k3rs.sizes import format_size, parse_gigabytes, parse_memory, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8GB", 8_000_000_000),
        ("7.5GiB", 8_053_063_680),
        ("512MB", 512_000_000),
        ("512 MiB", 536_870_912),
        (" 2gb ", 2_000_000_000),
        ("1.5kB", 1_500),
        ("100B", 100),
        ("0.1GB", 100_000_000),  # not the 100000000.00000001 of binary fractions
        ("1.0000000019GB", 1_000_000_001),
        ("2TiB", 2_199_023_255_552),
    ],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    ["", "8", "GB", "-8GB", "+8GB", "8G", "8 XB", "1e3MB", "nanGB", "8,5GB", ".5GB", "8.GB", "٣GB"],
)
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="expected a size") as refused:
        parse_size(text)
    assert f"`{text}`" in str(refused.value)
    assert refused.value.hint is not None


@pytest.mark.parametrize("text", ["0GB", "0.1B", "9300000TB"])
def test_a_size_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="from 1 byte to 9223372036854775807 bytes"):
        parse_size(text)


def test_memory_is_a_size_a_number_of_bytes_or_auto() -> None:
    assert parse_memory("auto") is None
    assert parse_memory("Auto ") is None
    assert parse_memory("8GB") == 8_000_000_000
    assert parse_memory(123) == 123
    with pytest.raises(InputError):
        parse_memory(0)
    with pytest.raises(InputError):
        parse_memory("automatic")


def test_gigabytes_are_plain_numbers() -> None:
    assert parse_gigabytes("1.5") == 1_500_000_000
    assert parse_gigabytes("0") == 0
    for text in ["1GB", "-1", "inf", "nan", ""]:
        with pytest.raises(InputError, match="expected a number of gigabytes"):
            parse_gigabytes(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1.00 kB"),
        (17_547_264, "17.5 MB"),
        (999_400_000, "999 MB"),
        (999_600_000, "1.00 GB"),
        (9_994_000_000, "9.99 GB"),
        (9_996_000_000, "10.0 GB"),
        (1_560_860_324_864, "1.56 TB"),
        (5_000_000_000_000_000, "5000 TB"),
    ],
)
def test_sizes_are_shown_with_three_digits(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text
