"""Giving back what a request holds: positions of its table, the last of them first."""

from __future__ import annotations

from vllm_kvplug.block_pool import NULL_BLOCK_ID, BlockPool
from vllm_kvplug.block_run import BlockRun
from vllm_kvplug.groups.table import BlockTable, Hold


def take_all(group_id: int, table: BlockTable) -> list[BlockRun]:
    """What a table holds that nobody needs any more, as runs in the order in which they are to be given back."""
    runs: list[BlockRun] = []
    row = table.block_ids
    upper = len(row)
    for hold in reversed(table.holds):
        run, end = hold.run, hold.position + hold.num_blocks
        is_whole = len(run.block_ids) == hold.num_blocks
        if end < upper:
            if is_whole and run.num_holders == 1 and NULL_BLOCK_ID not in row[end:upper]:
                run.block_ids += row[end:upper]  # they go together from now on
            else:
                _take_loose(group_id, table, end, upper, runs)
        upper = hold.position
        if is_whole:
            runs.append(run)
        else:
            runs += [piece.run for piece in hold.pieces()][::-1]
    if upper:
        _take_loose(group_id, table, 0, upper, runs)
    return runs


def take_out(pool: BlockPool, group_id: int, table: BlockTable, first: int, end: int) -> list[BlockRun]:
    """What the table holds at the positions `first` to `end` - 1, as runs in the order in which they are to be given
    back. They are no longer in its holds; its row is the caller's to change.
    """
    runs: list[BlockRun] = []
    holds = table.holds
    behind: list[Hold] = []  # holds, or ends of them, that stay behind these positions
    upper = end  # positions from here on are dealt with
    while holds and upper > first:
        hold = holds[-1]
        hold_end = hold.position + hold.num_blocks
        if hold.position >= end:
            behind.append(holds.pop())
            continue
        if hold_end <= first:
            break
        if hold_end < upper:
            _take_loose(group_id, table, hold_end, upper, runs)
        upper = hold.position
        if first <= hold.position and hold_end <= end:
            holds.pop()
            if len(hold.run.block_ids) == hold.num_blocks:
                runs.append(hold.run)
            else:
                runs += [piece.run for piece in hold.pieces()][::-1]
        else:
            holds.pop()
            _take_part(pool, hold, first, end, runs, holds, behind)
    if upper > first:
        _take_loose(group_id, table, first, upper, runs)
    holds.extend(reversed(behind))
    return runs


def _take_part(
    pool: BlockPool, hold: Hold, first: int, end: int, runs: list[BlockRun], holds: list[Hold], behind: list[Hold]
) -> None:
    """A hold that goes in part: each piece of it stays before, goes, or stays behind, in a hold of its own."""
    hold.run.grower = None
    going: list[BlockRun] = []
    staying_behind: list[Hold] = []
    for start, piece, _, num_blocks in list(hold.pieces()):
        run, position, run_end = piece, start, start + num_blocks
        if position < first < run_end:
            holds.append(Hold(position, run, first - position))
            run, position = pool.split(run, first - position), first
        if position < first:
            holds.append(Hold(position, run, run_end - position))
        elif position >= end:
            staying_behind.append(Hold(position, run, run_end - position))
        elif run_end <= end:
            going.append(run)
        else:
            if run.num_holders == 1:
                going.append(pool.cut_head(run, end - position))
            else:
                going.append(run)
                run = pool.split(run, end - position)
            staying_behind.append(Hold(end, run, run_end - end))
    runs += reversed(going)
    behind += reversed(staying_behind)


def _take_loose(group_id: int, table: BlockTable, first: int, end: int, runs: list[BlockRun]) -> None:
    """Loose blocks at these positions, as a run; null blocks are passed over."""
    block_ids = table.block_ids[first:end]
    if NULL_BLOCK_ID in block_ids:
        block_ids = [block_id for block_id in block_ids if block_id != NULL_BLOCK_ID]
    if block_ids:
        runs.append(BlockRun(block_ids, group_id, first, 1))
