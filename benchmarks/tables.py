"""Tables in Markdown of rows of results, under captions that say where they were measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable

Row = dict[str, str]


def latest(rows: Iterable[Row], *keys: str) -> list[Row]:
    """Return the last row of each case, in the order in which the cases first appeared."""
    found: dict[tuple[str, ...], Row] = {}
    for row in rows:
        found[tuple(row.get(key) or "" for key in keys)] = row
    return list(found.values())


def grouped(rows: Iterable[Row], *keys: str) -> dict[tuple[str, ...], list[Row]]:
    """Return the rows of each combination of values."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(key) or "" for key in keys), []).append(row)
    return groups


def table(header: list[str], body: Iterable[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def caption(rows: list[Row]) -> str:
    """Return where and when rows were measured, with the versions that were used."""
    dates = sorted({row["date"] for row in rows})
    rounds = sorted({int(row["rounds"]) for row in rows if row["rounds"]})
    packages = sorted({row["provider"] for row in rows if row.get("provider")})
    products = rows[0].get("float32_products") or "ieee"
    parts = [
        rows[0]["machine"],
        (rows[0].get("dtype") or "float32") + (f" (products: {products})" * (products != "ieee")),
        ", ".join(["PyTorch " + rows[0]["torch"], *packages]),
        f"{span(rounds)} rounds",
        span(dates),
    ]
    return "; ".join(parts) + ":"


def span(values: list) -> str:
    return str(values[0]) if values[0] == values[-1] else f"{values[0]} to {values[-1]}"


def by_machine(rows: list[Row], make: Callable[[list[Row]], str]) -> str:
    """Return a caption and a table for each machine and precision."""
    groups = grouped(rows, "machine", "dtype", "float32_products").values()
    return "\n\n".join(f"{caption(group)}\n\n{make(group)}" for group in groups)


def by_line(
    rows: list[Row],
    header: list[str],
    cells: Callable[[dict[str, Row]], list[str]],
    key: str = "workload",
) -> str:
    """Return such tables of variants, with one line for each workload.

    Args:
        rows: of all variants.
        header: of all columns, the first of which names the workload.
        cells: a workload's rows by variant → what stands in the other columns.
        key: of what stands in the first column.
    """

    def make(rows: list[Row]) -> str:
        lines = grouped(rows, key).items()
        return table(
            header, ([name, *cells({row["variant"]: row for row in own})] for (name,), own in lines)
        )

    return by_machine(rows, make)
