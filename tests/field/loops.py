"""Loops as people write them: plain, and with a Guard or a watcher."""

from contextlib import ExitStack
from typing import Any

import torch

import steadystep
from steadystep import Guard
from tests.field.program import End, Notes, Program, Seat, ended
from tests.field.schedules import VALIDATE_EVERY


def plain(program: Program) -> End:
    """The program without steadystep."""
    for step in range(program.run.num_steps):
        for seat in program.seats:
            seat.rate.before(step, guarded=False)
            _plain_step(program, seat, step)
            seat.rate.after()
        program.task.after_step()
        if program.seats[0].rate.plateau and (step + 1) % VALIDATE_EVERY == 0:
            program.seats[0].rate.plateau.update(program.task.held_out())
    return ended(program)


def _plain_step(program: Program, seat: Seat, step: int) -> None:
    batch = seat.fault.batch(step, seat.player.batch())
    with seat.fault.at(step):
        seat.optimizer.zero_grad()
        seat.fault.loss(step, seat.player.loss(batch)).backward()
        if program.task.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(seat.player.model.parameters(), program.task.max_grad_norm)
        seat.optimizer.step()


def guarded(program: Program, notes: Notes) -> End:
    """The program with a Guard in place of backward, clip, step and zero_grad."""
    by_closure = program.run.face == "guard-closure"
    with ExitStack() as stack:
        guards = [stack.enter_context(_guard(program, seat)) for seat in program.seats]
        notes.guards.extend(guards)
        for step in range(program.run.num_steps):
            for who, (seat, guard) in enumerate(zip(program.seats, guards, strict=True)):
                seat.rate.before(step, guarded=True)
                batch = seat.fault.batch(step, seat.player.batch())

                def loss(batch: Any, seat: Seat = seat, step: int = step) -> torch.Tensor:
                    return seat.fault.loss(step, seat.player.loss(batch))

                with seat.fault.at(step):
                    notes.add(guard.step(loss, batch=batch) if by_closure else guard.step(loss(batch)), who)
                seat.rate.after()
            program.task.after_step()
            if program.seats[0].rate.plateau and (step + 1) % VALIDATE_EVERY == 0:
                guards[0].validate(program.task.held_out())
    return ended(program, notes=notes)


def _guard(program: Program, seat: Seat) -> Guard:
    schedule = None if seat.rate.config else seat.rate.owned
    return Guard(seat.player.model, seat.optimizer, config=_config(program, seat), schedule=schedule)


def _config(program: Program, seat: Seat) -> dict[str, Any]:
    training = dict((seat.rate.config or {}).get("training", {}))
    if program.task.max_grad_norm is not None and program.run.face != "watch":
        training["max_grad_norm"] = program.task.max_grad_norm
    return {"training": training}


def watched(program: Program, notes: Notes) -> End:
    """The plain loop, watched."""
    with ExitStack() as stack:
        watchers = [
            stack.enter_context(steadystep.watch(seat.player.model, seat.optimizer, config=_config(program, seat)))
            for seat in program.seats
        ]
        notes.guards.extend(watcher.guard for watcher in watchers)
        for step in range(program.run.num_steps):
            for who, (seat, watcher) in enumerate(zip(program.seats, watchers, strict=True)):
                seat.rate.before(step, guarded=True)
                _plain_step(program, seat, step)
                notes.add(watcher.outcome, who)
                seat.rate.after()
            program.task.after_step()
    return ended(program, notes=notes)
