"""The grammar of schemes: what is written can be parsed, and invalid schemes are refused with a message."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cases import schemes

from anybit.errors import SchemeError
from anybit.scheme import ActivationFormat, KVFormat, Scheme, WeightFormat


@given(schemes)
def test_parse_inverts_str(scheme: Scheme) -> None:
    assert Scheme.parse(str(scheme)) == scheme
    assert hash(Scheme.parse(str(scheme))) == hash(scheme)
    assert Scheme.parse(f" {str(scheme).upper()} ") == scheme


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("w4a16g128", Scheme(WeightFormat(4, "sym", 128))),
        ("w2a2", Scheme(WeightFormat(2), ActivationFormat(2, "sym"))),
        ("w1a2", Scheme(WeightFormat(1, "bipolar"), ActivationFormat(2, "sym"))),
        ("w3a4", Scheme(WeightFormat(3), ActivationFormat(4, "sym"))),
        ("w4a8", Scheme(WeightFormat(4), ActivationFormat(8, "sym"))),
        ("w4a8fp", Scheme(WeightFormat(4), ActivationFormat(8, "float"))),
        ("w2a16g64asym", Scheme(WeightFormat(2, "asym", 64))),
        ("w4a16g128s24", Scheme(WeightFormat(4, "sym", 128, True))),
        ("w4a16g128-kv4", Scheme(WeightFormat(4, "sym", 128), kv=KVFormat(4, 4))),
        ("w4a16-k4v2g32", Scheme(WeightFormat(4), kv=KVFormat(4, 2, group=32))),
        ("w3a4bipolar-xasym", Scheme(WeightFormat(3, "bipolar"), ActivationFormat(4, "asym"))),
    ],
)
def test_parse_reads_examples(text: str, expected: Scheme) -> None:
    assert Scheme.parse(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "a scheme is wBaB"),
        ("w4", "a scheme is wBaB"),
        ("int4", "a scheme is wBaB"),
        ("w0a16", "weight bits must be 1 to 8, not 0"),
        ("w9a16", "weight bits must be 1 to 8, not 9"),
        ("w4a0", "activation bits must be 1 to 8, or 16, not 0"),
        ("w4a9", "activation bits must be 1 to 8, or 16, not 9"),
        ("w4a4fp", "float activations have 8 bits"),
        ("w4a16g100", "group must be 16, 32, 64, 128 or 256"),
        ("w4a16-xasym", "16-bit activations have no integer code"),
        ("w4a8fp-xasym", "float activations have no integer code"),
        ("w1a16s24", "bipolar codes have none"),
        ("w4a16mins24", "min codes have none"),
        ("w3a16nf4", "nf4 codes have 4 bits, which index a table of 16 values, not 3"),
        ("w4a16-kv3", "must be 2, 4, 8 or 16, not 3"),
        ("w4a16-kv4g16", "KV groups must be 32, 64 or 128"),
        ("w4a16-kv4-kv4", "not understood at '-kv4'"),
        ("w4a8-xasym-xasym", "not understood at '-xasym'"),
        ("w4a16-banana", "not understood at '-banana'"),
    ],
)
def test_parse_refuses_by_what_is_allowed(text: str, why: str) -> None:
    with pytest.raises(SchemeError, match=why):
        Scheme.parse(text)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Scheme.parse(4), "not int"),
        (lambda: KVFormat.parse(4), "a KV format is a string such as 'kv4', not int"),
        (lambda: WeightFormat("4"), "weight bits must be 1 to 8, not '4'"),
        (lambda: WeightFormat(4.0), r"weight bits must be 1 to 8, not 4\.0"),
        (lambda: WeightFormat(True), "weight bits must be 1 to 8, not True"),
        (lambda: WeightFormat(4, "sym", "32"), "for whole rows, not '32'"),
        (lambda: ActivationFormat("8", "sym"), "must be 1 to 8, or 16, not '8'"),
        (lambda: KVFormat(4.0), r"key bits of the KV cache must be 2, 4, 8 or 16, not 4\.0"),
        (lambda: KVFormat(group="64"), "KV groups must be 32, 64 or 128, not '64'"),
        (lambda: Scheme("w4a16"), r"weights .* of type WeightFormat, not 'w4a16'; Scheme\.parse\('w4a16g128'\) parses"),
        (lambda: Scheme(WeightFormat(4), "x"), "activations of a scheme must be of type ActivationFormat, not 'x'"),
        (lambda: Scheme(WeightFormat(4), kv="kv4"), "kv of a scheme must be of type KVFormat or None, not 'kv4'"),
    ],
)
def test_scheme_refuses_other_types(make: Callable[[], object], why: str) -> None:
    with pytest.raises(SchemeError, match=why):
        make()


@given(st.text(max_size=12))
def test_parse_takes_any_text_or_explains(text: str) -> None:
    try:
        scheme = Scheme.parse(text)
    except SchemeError as error:
        assert "examples:" in str(error) or "must be" in str(error) or "float" in str(error) or "16" in str(error)
    else:
        assert Scheme.parse(str(scheme)) == scheme
