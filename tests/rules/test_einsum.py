"""Two-operand contractions in Einstein's notation, one operand tracked."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradstats as gs
from tests.oracle import assert_sqnorms, check_model, oracle_on_the_batch
from tests.rules.operation import Operation, check_operation, check_refused, normal, uneven_loss

size = st.integers(1, 4)

EINSUM_CASES = {
    # equation: (parameter, data); the parameter stands first or last as the equation says
    "bd,de->be": ((4, 5), (3, 4)),
    "btd,de->bte": ((4, 5), (3, 6, 4)),
    "btd,ed->bte": ((5, 4), (3, 6, 4)),
    "bthd,hde->bthe": ((2, 4, 5), (3, 6, 2, 4)),
    "bthd,hde->bte": ((2, 4, 5), (3, 6, 2, 4)),
    "bthd,dhe->bte": ((4, 2, 5), (3, 6, 2, 4)),
    "bthd,hed->bhte": ((2, 5, 4), (3, 6, 2, 4)),
    "bthd,edh->bthe": ((5, 4, 2), (3, 6, 2, 4)),
    "btd,dhe->bhte": ((4, 2, 5), (3, 6, 4)),
    "btd,edh->bhte": ((5, 4, 2), (3, 6, 4)),
    "btd,d->btd": ((4,), (3, 6, 4)),
    "btd,d->bt": ((4,), (3, 6, 4)),
    "btd,t->bd": ((6,), (3, 6, 4)),
    "btd,e->bte": ((5,), (3, 6, 4)),
    "btd,td->b": ((6, 4), (3, 6, 4)),
    "btd,st->bsd": ((5, 6), (3, 6, 4)),
    "btd,ts->bsd": ((6, 5), (3, 6, 4)),
    "...d,de->...e": ((4, 5), (3, 6, 2, 4)),
    "...d,de": ((4, 5), (3, 6, 4)),
    "b...d,ed->b...e": ((5, 4), (3, 6, 2, 4)),
    "btd,de": ((4, 5), (3, 6, 4)),
    "btd,dse->bts": ((4, 2, 5), (3, 6, 4)),
    "btd,se->btd": ((2, 5), (3, 6, 4)),
    "btd,sed->bte": ((1, 5, 4), (3, 6, 4)),
    " b t d , d e -> b e t ": ((4, 5), (3, 6, 4)),
}
EINSUM_PARAMETER_FIRST = {
    "de,bd->be": ((4, 5), (3, 4)),
    "hde,bthd->bthe": ((2, 4, 5), (3, 6, 2, 4)),
    "st,btd->bsd": ((5, 6), (3, 6, 4)),
    "t...,bt...->b...": ((6, 2, 4), (3, 6, 2, 4)),
}


@pytest.mark.parametrize("equation", EINSUM_CASES)
def test_einsum(equation):
    parameter, data = EINSUM_CASES[equation]
    check_operation(lambda m, x: torch.einsum(equation, x, m.w), {"w": parameter}, normal(*data))


@pytest.mark.parametrize("equation", EINSUM_PARAMETER_FIRST)
def test_einsum_with_the_parameter_first(equation):
    parameter, data = EINSUM_PARAMETER_FIRST[equation]
    check_operation(lambda m, x: torch.einsum(equation, m.w, x), {"w": parameter}, normal(*data))


@pytest.mark.parametrize(
    "equation", ["bd,d->bd", "btd,td->btd", "bd,e->bde", "bd,e->be", "btd,de->be", "btd,d->bt"]
)
def test_einsum_under_autocast(equation):
    """Data count as they are multiplied: rounded in matrix products alone, once they are summed."""
    sizes = {"b": 3, "t": 6, "d": 24, "e": 5}
    inputs = equation.partition("->")[0].split(",")
    data, weight = (torch.randn([sizes[index] for index in indices]) for indices in inputs)
    if "t" in inputs[0]:
        data[:, -1] -= 100 * data[:, :-1].sum(1)
        data[:, :-1] *= 100  # nearly nothing is left of them in a sum

    def losses(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().flatten(1).sum(1)

    model = Operation(lambda m, x: torch.einsum(equation, x, m.w), {"w": weight}, upstream=False)
    model = model.float()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(data).dtype == torch.bfloat16
    expected = oracle_on_the_batch(model, data, losses)
    assert_sqnorms(gs.per_example_norms(model, data, losses), expected, 1e-2 if rounded else 1e-5)


# Indices of which one operand has a single one, which is broadcast.
EINSUM_BROADCAST = {
    "bi,i->b": ((1,), (3, 6)),
    "bi,ij->bj": ((1, 5), (3, 4)),
    "bi,ki->bk": ((2, 1), (3, 4)),
    "bti,ti->bti": ((1, 4), (3, 6, 4)),
    "bti,ti->bi": ((1, 4), (3, 6, 4)),
    "...i,...i->...": ((6, 4), (3, 1, 4)),
    "bi,bi->b": ((1, 4), (3, 4)),
    "bhti,hti->bht": ((2, 1, 4), (3, 2, 5, 4)),
    "bti,ij->btj": ((4, 5), (3, 6, 4)),
}


@pytest.mark.parametrize("equation", EINSUM_BROADCAST)
def test_einsum_that_broadcasts(equation):
    parameter, data = EINSUM_BROADCAST[equation]
    for batch in (data[0], 1):
        x = normal(batch, *data[1:])
        check_operation(lambda m, x: torch.einsum(equation, x, m.w), {"w": parameter}, x)
    check_operation(
        lambda m, x: torch.einsum(equation, x.transpose(0, 1), m.w),
        {"w": parameter},
        normal(*data).transpose(0, 1).contiguous(),
        batch_dim=1,
    )


def test_einsum_that_repeats_the_only_example_is_refused():
    check_refused(
        lambda m, x: torch.einsum("bi,bj->bij", x, m.w)[:1],
        {"w": (3, 4)},
        normal(1, 5),
        match="einsum repeats the only example",
    )


def test_einsum_of_a_list_of_operands():
    check_operation(
        lambda m, x: torch.einsum("btd,de->bte", [x, m.w]), {"w": (4, 5)}, normal(3, 6, 4)
    )


@pytest.mark.parametrize("equation", ["bti,i->bti", "bti,k->bitk"])
def test_einsum_of_integers(equation):
    """Without a sum PyTorch multiplies them with other numbers."""
    check_operation(
        lambda m, x: torch.einsum(equation, x, m.w), {"w": (4,)}, torch.arange(-8, 16).view(3, 2, 4)
    )


@pytest.mark.parametrize("numbers", [torch.tensor([2, -1, 3]), torch.tensor([True, False, True])])
def test_outer_products_with_integers(numbers):
    check_operation(lambda m, x: torch.outer(x, m.w), {"w": (4,)}, numbers)


class Optimizer:
    """Has the last two operands contracted first, as opt_einsum may."""

    def contract_path(self, equation, *operands, **options):
        return [(last, last - 1) for last in range(len(operands) - 1, 0, -1)], "explained"


FACTORS = {
    "CP": ("...ai,ir,jr,r->...aj", {"u": (4, 3), "v": (5, 3), "w": (3,)}),
    "Tucker": ("bti,ip,pq,jq->btj", {"u": (4, 2), "v": (2, 3), "w": (5, 3)}),
    "broadcast": ("b...i,ij,...jk->b...k", {"u": (4, 2), "v": (1, 2, 3)}),
}


@pytest.mark.parametrize("case", FACTORS.values(), ids=FACTORS)
@pytest.mark.parametrize("last_first", [False, True])
def test_einsum_of_several_operands(case, last_first, monkeypatch):
    equation, parameters = case
    if last_first:
        optimizer = torch.backends.opt_einsum
        monkeypatch.setattr(optimizer, "enabled", True, raising=False)
        monkeypatch.setattr(optimizer, "is_available", lambda: True)
        monkeypatch.setattr(optimizer, "get_opt_einsum", Optimizer)

    def function(m, x):
        return torch.einsum(equation, x, *(getattr(m, name) for name in parameters))

    check_operation(function, parameters, normal(3, 6, 4))


@pytest.mark.parametrize("path", [[0, 1, 0, 1], [2, 1, 1, 0]], ids=str)
def test_the_operator_of_einsum_with_an_order(path):
    """As programs hold it that were exported where opt_einsum is installed."""

    def function(m, x):
        x = torch.ops.aten.einsum("bti,btj,btj->bti", [x, x, x], path=path)
        return torch.ops.aten.einsum("bti,ij,j->btj", [x, m.v, m.w], path=path)

    model = Operation(function, {"v": (4, 5), "w": (5,)}, upstream=True)
    # PyTorch may contract in another order, so that gradients are not the same to the bit.
    check_model(model, (normal(3, 6, 4),), uneven_loss, fusing=(True,))


def test_einsum_with_as_many_of_everything_as_examples():
    check_operation(
        lambda m, x: torch.einsum("bthd,hde->bthe", x, m.w), {"w": (3, 3, 3)}, normal(3, 3, 3, 3)
    )


def test_einsum_that_sums_over_the_examples_is_refused():
    check_refused(
        lambda m, x: torch.einsum("bd,ed->e", x, m.w),
        {"w": (3, 4)},
        normal(3, 4),
        match="einsum.*'w'",
    )


@settings(max_examples=25)
@given(st.data())
def test_einsum_sweep(data):
    """Every choice of groups, positions and widths, in every order of every operand's axes."""
    kinds = data.draw(st.lists(st.sampled_from("ktpqr"), min_size=1, max_size=4))
    letters = dict(zip("cdefg", kinds, strict=False))
    sizes = {letter: data.draw(size) for letter in (*letters, "b")}
    members = {
        "parameter": [i for i, kind in letters.items() if kind in "kpq"],
        "data": ["b", *(i for i, kind in letters.items() if kind in "ktqr")],
        "result": [i for i, kind in letters.items() if kind in "ktp"],
    }
    parameter = data.draw(st.permutations(members["parameter"]))
    result = ["b", *data.draw(st.permutations(members["result"]))]
    operand = ["b", *data.draw(st.permutations(members["data"][1:]))]
    equation = f"{''.join(operand)},{''.join(parameter)}->{''.join(result)}"
    check_operation(
        lambda m, x: torch.einsum(equation, x, m.w),
        {"w": tuple(sizes[i] for i in parameter)},
        normal(*(sizes[i] for i in operand)),
    )


@pytest.mark.parametrize(
    "equation, data, weight",
    [
        ("bfd,ec->bfce", (3, 4, 1), (3, 4)),
        ("bdef,cf->bced", (2, 3, 4, 1), (3, 1)),
        ("bdec,d->bed", (3, 4, 3, 1), (4,)),
        ("bcfde,dce->becf", (2, 4, 4, 1, 4), (1, 4, 4)),
        ("bfdec,fe->bdfc", (1, 4, 4, 1, 2), (4, 1)),
    ],
)
def test_results_that_are_views_keep_every_bit(equation, data, weight):
    """With ``fused=False`` gradients are PyTorch's own, whatever the layout of the result."""
    for seed in (12, 41, 124, 144, 237):
        torch.manual_seed(seed)
        check_operation(lambda m, x: torch.einsum(equation, x, m.w), {"w": weight}, normal(*data))


def test_einsum_of_a_diagonal_is_refused():
    check_refused(
        lambda m, x: torch.einsum("bd,dd->bd", x, m.w), {"w": (4, 4)}, normal(3, 4),
        match="index that repeats.*'w'",
    )  # fmt: skip


def test_einsum_with_one_weight_for_each_example_is_refused():
    check_refused(
        lambda m, x: torch.einsum("btd,bde->bte", x, m.w),
        {"w": (3, 4, 5)},
        normal(3, 6, 4),
        match="einsum.*example.*'w'",
    )
