"""What multiplies float32 matrices on the CPU, and attention that is made of such products."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ppo_cli.engine.cpu.products import set_matmul_library, use_blas, using_onednn
from ppo_cli.engine.cpu.row_products import RowAttention, RowSpan
from ppo_cli.engine.models.attention import LONGEST, PackedRows, attend_by_rows, longest_row
from ppo_cli.machine.processor import has_fast_bfloat16, matmul_library
from tests.rounding import assert_near

WIDE = "avx2 avx512f avx512dq avx512bw avx512vl avx512_bf16"
HEADS, SIZE = 4, 16
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    before = using_onednn()
    yield
    set_matmul_library("onednn" if before else "blas")


def describe_processor(root: Path, flags: str, maker: str = "", family: int = 6) -> None:
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text(
        f"processor\t: 0\nvendor_id\t: {maker}\ncpu family\t: {family}\nmodel\t\t: 17\n"
        f"flags\t\t: fpu {flags} sse\nbugs\t\t: none\n"
    )


@pytest.mark.parametrize(
    ("maker", "family", "flags", "environ", "library"),
    [
        ("AuthenticAMD", 26, WIDE, {}, "onednn"),
        ("AuthenticAMD", 25, WIDE, {}, "blas"),
        ("AuthenticAMD", 26, WIDE, {"ATEN_CPU_CAPABILITY": "avx2"}, "blas"),
        ("AuthenticAMD", 26, f"{WIDE} amx_tile amx_bf16", {}, "blas"),
        ("AuthenticAMD", 26, "avx2 fma", {}, "blas"),
        ("GenuineIntel", 26, WIDE, {}, "blas"),
    ],
)
def test_onednn_is_for_amd_processors_with_wide_vectors(
    tmp_path: Path, maker: str, family: int, flags: str, environ: dict[str, str], library: str
) -> None:
    describe_processor(tmp_path, flags, maker, family)
    assert matmul_library(environ, tmp_path) == library
    assert matmul_library(environ, tmp_path / "nothing") == "blas"


@pytest.mark.parametrize(
    ("flags", "environ", "results"),
    [
        ("avx2 amx_tile amx_bf16 amx_int8", {}, True),
        ("avx2 amx_tile amx_bf16", {"ONEDNN_MAX_CPU_ISA": "AVX2"}, False),
        ("avx2 amx_tile amx_bf16", {"DNNL_MAX_CPU_ISA": "AVX512_CORE"}, False),
        ("avx512f amx_tile amx_int8", {}, False),
        ("avx512f avx512_bf16", {}, True),
        ("avx512f avx512_bf16", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, False),
        ("avx2 avx512f", {}, False),
    ],
)
def test_fast_bfloat16_is_found_where_onednn_may_use_it(
    tmp_path: Path, flags: str, environ: dict[str, str], results: bool
) -> None:
    describe_processor(tmp_path, flags)
    assert has_fast_bfloat16(environ, tmp_path) is results
    assert not has_fast_bfloat16(environ, tmp_path / "nothing")


def test_products_stay_in_float32_whoever_computes_them() -> None:
    """Where oneDNN would round (with AMX), BLAS is left in charge, and says so."""
    torch.manual_seed(0)
    first, other = torch.randn(2, 200, 300)
    exact = first.double() @ other.double().T
    assert set_matmul_library("onednn") == using_onednn()
    assert_near((first @ other.T).double(), exact, terms=300)
    with use_blas():
        assert not using_onednn()
    assert set_matmul_library("blas") and not using_onednn()
    assert_near((first @ other.T).double(), exact, terms=300)


def test_rounded_products_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = torch.Tensor.__matmul__

    def rounding(first: Tensor, other: Tensor) -> Tensor:
        return multiply(first.bfloat16(), other.bfloat16()).float()

    monkeypatch.setattr(torch.Tensor, "__matmul__", rounding)
    assert not set_matmul_library("onednn") and not using_onednn()


def draw_states(tokens: int, keys: int = 2) -> list[Tensor]:
    """Queries, keys and values of all rows, with gradients."""
    torch.manual_seed(0)
    return [
        torch.randn(1, count, tokens, SIZE, requires_grad=True) for count in (HEADS, keys, keys)
    ]


def attend(
    states: list[Tensor],
    lengths: list[int],
    leads: list[int] | None = None,
    shared: list[int] | None = None,
    scaling: float | None = None,
) -> Tensor:
    """The attention of the models that train: the tokens of all rows, (L, h, d)."""
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True
    rows = PackedRows.from_lengths(lengths, CPU, leads, shared).rows_113B
    return attend_by_rows(module, *states, rows, scaling=scaling)[0][0]


def attend_alone(
    states: list[Tensor],
    lengths: list[int],
    leads: list[int],
    shared: list[int],
    scaling: float | None = None,
) -> Tensor:
    """Each row by SDPA in float64, behind what it shares: the tokens of all rows, (L, h, d)."""
    starts = [sum(lengths[:at]) for at in range(len(lengths))]
    results = []
    for at, length in enumerate(lengths):
        lead, row = starts[leads[at]], slice(starts[at], starts[at] + length)
        query, key, value = (
            torch.cat((s[:, :, lead : lead + shared[at]], s[:, :, row]), dim=2).double()
            for s in states
        )
        full = scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True, scale=scaling
        )
        results.append(full[0, :, shared[at] :].transpose(0, 1))
    return torch.cat(results)


@pytest.mark.parametrize("keys", [HEADS, 2])
@pytest.mark.parametrize(
    ("leads", "shared"),
    [([0, 1, 2, 3, 4], [0] * 5), ([0, 0, 2, 2, 2], [0, 21, 0, 33, 64])],
    ids=["rows", "rows that share prompts"],
)
def test_rows_by_products_are_those_of_sdpa(keys: int, leads: list[int], shared: list[int]) -> None:
    """With lengths below, at and above multiples of what they are rounded up to."""
    lengths = [40, 7, 96, 31, 33]
    states = draw_states(sum(lengths), keys)
    ends = [sum(lengths[:at]) for at in range(len(lengths) + 1)]
    spans = [
        RowSpan.from_ends(ends, at, *row) for at, row in enumerate(zip(leads, shared, strict=True))
    ]
    query, key, value = (s[0] for s in states)
    results = RowAttention.apply(query * SIZE**-0.5, key, value, spans)
    expected = attend_alone(states, lengths, leads, shared)
    assert_near(results.double(), expected, terms=128)
    weight = torch.randn(results.shape)
    gradients, exact = (
        torch.autograd.grad((out * weight).sum(), states) for out in (results, expected)
    )
    for gradient, reference in zip(gradients, exact, strict=True):
        assert_near(gradient, reference, terms=4 * 128)


@pytest.mark.parametrize("scaling", [None, 0.07, 1.0])
@pytest.mark.parametrize("library", ["blas", "onednn"])
@pytest.mark.parametrize("longest", [40, LONGEST, LONGEST + 1])
def test_attention_by_rows_has_the_scaling_of_the_model(
    longest: int, library: Literal["blas", "onednn"], scaling: float | None
) -> None:
    """With both libraries, around the length above which another kernel attends."""
    if not set_matmul_library(library):
        pytest.skip("oneDNN rounds float32 on this processor, so runs leave it to BLAS")
    rows = [longest, 20, 9], [0, 0, 2], [0, 13, 0]
    states = draw_states(longest + 29)
    results = attend(states, *rows, scaling=scaling)
    assert_near(results.double(), attend_alone(states, *rows, scaling), terms=2 * longest)


@pytest.mark.parametrize("scaling", [None, 0.07])
def test_a_token_that_looks_back_has_the_scaling_and_the_mask(scaling: float | None) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, count, 9, SIZE) for count in (HEADS, 2, 2))
    query, mask = query[:, :, :1], torch.ones(2, 1, 1, 9, dtype=torch.bool)
    mask[1, :, :, :4] = False
    results, _ = attend_by_rows(nn.Module(), query, key, value, mask, scaling=scaling)
    expected = scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=True)
    assert_near(results, expected.transpose(1, 2), terms=9)
    dropped, _ = attend_by_rows(nn.Module(), query, key, value, mask, scaling=scaling, dropout=0.5)
    assert not torch.equal(dropped, results)


def test_a_token_that_looks_back_leaves_its_products_to_blas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def attend(*_: object, **__: object) -> tuple[Tensor, None]:
        seen.append(using_onednn())
        return torch.zeros(1), None

    monkeypatch.setattr("ppo_cli.engine.models.attention.sdpa_attention_forward", attend)
    if not set_matmul_library("onednn"):
        pytest.skip("oneDNN rounds float32 on this processor, so runs leave it to BLAS")
    past = torch.zeros(1, 2, 9, SIZE)
    for queries in (1, 9):
        attend_by_rows(nn.Module(), past[:, :, :queries], past, past, None)
    assert seen == [False, True] and using_onednn()


@pytest.mark.parametrize(("longest", "dtype"), [(LONGEST, torch.float32), (600, torch.bfloat16)])
def test_short_rows_are_attended_to_in_float32(longest: int, dtype: torch.dtype) -> None:
    """Under autocast too, with gradients: rounded to bfloat16 are only longer rows."""
    states = draw_states(longest + 20)
    weight = torch.randn(longest + 20, HEADS, SIZE)
    results = []
    for rounded in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=rounded):
            out = attend(states, [longest, 20])
        assert out.dtype == (dtype if rounded else torch.float32)
        results.append((out, *torch.autograd.grad((out.float() * weight).sum(), states)))
    for actual, exact in zip(*results[::-1], strict=True):
        if dtype == torch.float32:
            torch.testing.assert_close(actual, exact, rtol=0, atol=0)
        else:
            assert float(((actual.float() - exact).norm() / exact.norm()).detach()) < 0.02


def test_the_longest_row_counts_what_it_shares() -> None:
    rows_3B = PackedRows.from_lengths([5, 9, 2], CPU, [0, 0, 0], [0, 0, 8]).rows_113B[0, 0]
    assert longest_row(rows_3B[0], rows_3B[2]) == 10
