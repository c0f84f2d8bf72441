# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of tables that jax-tpu-embedding stacked and sharded for SparseCores.

A checkpoint holds logical rows: one plain table of (rows, width) for each ``TableSpec``, in the
order of its ids. So it is restored on any number of SparseCores, without a conversion, and ``mark``
takes ids. Pass the layouts to ``deltackpt.Tables(stacks=...)``.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from deltackpt.errors import OptionError
from deltackpt.state.stacks import StackedTable, StackMember

__all__ = ["StackMember", "StackedTable", "stacked_tables", "templates"]


class PlaceInStack(Protocol):
    """The part of jax-tpu-embedding's ``TableSettingInStack`` that is used."""

    stack_name: str
    row_offset_in_shard: int
    shard_rotation: int


class StackSpec(Protocol):
    """The part of jax-tpu-embedding's ``StackedTableSpec`` that is used."""

    stack_vocab_size: int
    stack_embedding_dim: int


class TableSpec(Protocol):
    """The part of jax-tpu-embedding's ``TableSpec`` that is used."""

    name: str
    vocabulary_size: int
    embedding_dim: int
    setting_in_stack: PlaceInStack
    stacked_table_spec: StackSpec


def stacked_tables(table_specs: Iterable[TableSpec], *, shards: int) -> dict[str, StackedTable]:
    """Returns the layout of each stacked array, by the name of the stack.

    Args:
      table_specs: jax-tpu-embedding's ``TableSpec`` of every table, after ``auto_stack_tables`` or
        ``stack_tables``, if they were stacked, and ``prepare_feature_specs_for_training``:
        ``jax.tree.leaves(embedding.get_table_specs(features))``, or its values.
      shards: number of SparseCores: devices times SparseCores per device.

    Raises:
      OptionError: the specs do not follow the published rules, or were made for another number of
        SparseCores.
    """
    by_stack = collections.defaultdict[str, list[TableSpec]](list)
    for spec in table_specs:
        by_stack[spec.setting_in_stack.stack_name].append(spec)
    found = {}
    for name, specs in by_stack.items():
        specs.sort(key=lambda spec: spec.setting_in_stack.row_offset_in_shard)
        found[name] = StackedTable(
            members=tuple(
                StackMember(name=spec.name, rows=spec.vocabulary_size, width=spec.embedding_dim)
                for spec in specs
            ),
            shards=shards,
            rotation=specs[1].setting_in_stack.shard_rotation if len(specs) > 1 else 0,
        )
        _check_rules(name, specs, found[name])
    return found


def templates(
    stacks: Iterable[StackedTable],
    dtype: DTypeLike = jnp.float32,
    *,
    sharding: jax.sharding.Sharding | None = None,
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns abstract tables, (rows, width) by the name of each member, for ``touched.init``.

    Args:
      stacks: the layouts of all stacked arrays.
      dtype: dtype of the tables.
      sharding: placement of the stamps; with several processes, replicated on all devices of the
        job: ``NamedSharding(mesh, PartitionSpec())``.
    """
    return {
        member.name: jax.ShapeDtypeStruct((member.rows, member.width), dtype, sharding=sharding)
        for stack in stacks
        for member in stack.members
    }


def _check_rules(name: str, specs: list[TableSpec], stack: StackedTable) -> None:
    """Compares where a stack's specs put the first row of each table with where its layout does."""
    for spec in specs:
        setting, whole = spec.setting_in_stack, spec.stacked_table_spec
        first = divmod(int(stack.physical_rows(spec.name, 0)), stack.shape[0] // stack.shards)
        found = (
            (setting.shard_rotation, setting.row_offset_in_shard),
            (whole.stack_vocab_size, whole.stack_embedding_dim),
        )
        if found != (first, stack.shape):
            raise OptionError(
                f"stack {name}, table {spec.name}: expected its first row at {first} (shard, row) "
                f"and a stack of shape {stack.shape} for {stack.shards} SparseCores, found "
                f"{found[0]} and {found[1]}; pass the number of SparseCores that the specs were "
                "stacked for"
            )
