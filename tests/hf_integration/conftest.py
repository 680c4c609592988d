import pytest

import fa_ops


@pytest.fixture
def packed_calls(monkeypatch) -> list[int]:
    """The number of sequences of every packed call."""
    found = []
    varlen = fa_ops.attention_varlen

    def counted(q, k, v, ends, *args, **options):
        found.append(ends.numel() - 1)
        return varlen(q, k, v, ends, *args, **options)

    monkeypatch.setattr(fa_ops, "attention_varlen", counted)
    return found
