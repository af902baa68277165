"""A text game with a known optimum: rooms with exits, of which the policy names one at each turn."""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Sequence

from training.rl.environments.protocol import Environment, Reply, Task, ToolCall

_MOVES = {"north": (0, -1), "south": (0, 1), "west": (-1, 0), "east": (1, 0)}
_Room = tuple[int, int]


class Maze(Environment):
    """The reward is the length of the shortest path divided by the number of moves made; 0 if the exit is not reached.

    Every maze is a spanning tree of a grid with some more doors. The answer's first direction counts as the move; one
    through a wall, or an answer without a direction, is a move that changes nothing.

    Args:
        size: rooms on each side.
        doors: doors beyond those of the tree.
    """

    def __init__(self, size: int = 3, doors: int = 1) -> None:
        self._size, self._doors = size, doors
        self._open: set[frozenset[_Room]] = set()
        self._room = self._goal = (0, 0)
        self._moves = 0
        self.optimum = 0
        """Length of the shortest path of the current episode."""

    def reset(self, task: Task, seed: int) -> str:
        draw = random.Random(seed)
        rooms = [(x, y) for x in range(self._size) for y in range(self._size)]
        walls = [frozenset((a, b)) for a in rooms for b in rooms if a < b and abs(a[0] - b[0]) + abs(a[1] - b[1]) == 1]
        draw.shuffle(walls)
        group = {room: room for room in rooms}

        def root(room: _Room) -> _Room:
            while group[room] != room:
                room = group[room]
            return room

        self._open, further = set(), self._doors
        for wall in walls:
            first, second = sorted(map(root, wall))
            if first != second:
                group[second] = first
                self._open.add(wall)
            elif further:
                further -= 1
                self._open.add(wall)
        self._room, self._goal = draw.sample(rooms, 2)
        self._moves = 0
        self.optimum = len(self.shortest_path())
        return f"Find the exit. Answer with a direction. {self._shown()}"

    def step(self, text: str, calls: Sequence[ToolCall]) -> Reply:
        self._moves += 1
        named = re.search("|".join(_MOVES), text.lower())
        if named is None:
            return Reply([{"role": "user", "content": f"Name a direction. {self._shown()}"}])
        after = self._after(self._room, named[0])
        if after is None:
            return Reply([{"role": "user", "content": f"There is a wall. {self._shown()}"}])
        self._room = after
        if self._room == self._goal:
            return Reply(done=True)
        return Reply([{"role": "user", "content": self._shown()}])

    def reward(self) -> float:
        return self.optimum / self._moves if self._room == self._goal else 0.0

    def shortest_path(self) -> list[str]:
        """Return the directions of the shortest path from the current room to the exit."""
        came: dict[_Room, tuple[_Room, str] | None] = {self._room: None}
        waiting = deque([self._room])
        while self._goal not in came:
            room = waiting.popleft()
            for move in _MOVES:
                after = self._after(room, move)
                if after is not None and after not in came:
                    came[after] = (room, move)
                    waiting.append(after)
        path: list[str] = []
        at = came[self._goal]
        while at is not None:
            path.insert(0, at[1])
            at = came[at[0]]
        return path

    def _after(self, room: _Room, move: str) -> _Room | None:
        x, y = _MOVES[move]
        after = (room[0] + x, room[1] + y)
        return after if frozenset((room, after)) in self._open else None

    def _shown(self) -> str:
        doors = ", ".join(move for move in _MOVES if self._after(self._room, move))
        right, down = self._goal[0] - self._room[0], self._goal[1] - self._room[1]
        where = [f"{abs(down)} {'south' if down > 0 else 'north'}"] if down else []
        where += [f"{abs(right)} {'east' if right > 0 else 'west'}"] if right else []
        return f"Doors: {doors}. Exit: {', '.join(where)}."
