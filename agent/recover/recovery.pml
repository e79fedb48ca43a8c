/* SPDX-License-Identifier: Apache-2.0 */
/* agent/recover/recovery.pml: how the ranks of a machine go on after one of them was lost, as a model that Spin checks
 * exhaustively.
 *
 *   tests/recovery/check_model.sh agent/recover/recovery.pml
 *
 * N ranks make STEPS steps on parameters in memory that the launcher keeps: backward, publish the gradient, barrier 1,
 * publish the private state of the next step in one of two slots, barrier 2, update the own slice, barrier 3. Here a
 * slice is one chunk: an array of the optimizer (M) and the parameters (P). Its new values are written beside it first, to
 * REDO, and REDO_KEY says that they are complete; then they are put in their place, and its MARK says so. LAYERWISE: M of
 * all chunks is written before a further barrier, P after it.
 *
 * LOSSES times, a rank dies at any point (the launcher finds it dead), or a wait ends although all ranks live (its
 * deadline is over: the launcher then kills the ranks that do not ask for the next generation, or it kills none).
 * All ranks that live leave the World, and meet again in the next generation, with a new process in the place of a dead
 * one. In the memory of the newest generation that was complete they finish the update that was under way, with marks
 * and copies of new values as before; then they copy the state into memory of their own. So a loss while they do this
 * harms nothing: the next generation does it again.
 *
 * Checked: every step is applied exactly once to every chunk, to values and with gradients of that step; no step is
 * made twice after any rank has gone on to the next one; private state is that of the same step on all ranks; all ranks
 * end after the last step.
 *
 * SKIPPED: the number of a step that writes nothing (an overflow under loss scaling).
 *
 * DEFECT: a deliberate one, to see that the check finds it.
 *   1: one slot for private state instead of two
 *   2: there is no copy of a chunk's new values
 *   3: a step counts only if a chunk of it was written
 *   4: the launcher looks for dead ranks before it reads what they have sent
 *   5: ranks that have ended are not started again when another dies
 *   6: the state is read before all ranks have left the old generation
 *   7: the generation is complete before all ranks have copied the state
 *   8: a rank that waits for the others at the meeting does not ask for a newer generation
 *   9: private state is published before the gradient
 */
#ifndef N
#define N 2
#endif
#ifndef LOSSES
#define LOSSES 2
#endif
#ifndef STEPS
#define STEPS 2
#endif
#ifndef DEFECT
#define DEFECT 0
#endif
#ifndef SKIPPED
#define SKIPPED 99
#endif

#define GENERATIONS (LOSSES + 1)
#define NONE 99
#define TORN 88  /* half written */

/* A chunk's mark: the number of the step whose update is under way, and how far. */
#define DIRECTION 1 /* LAYERWISE: M is written, P is not begun */
#define DONE 2
#define MARKED(step, how) (4 * (step) + (how))
#ifdef LAYERWISE
#define OLD_M(step, how) (how == DIRECTION -> step : step + 1)
#else
#define OLD_M(step, how) step
#endif

/* Memory of each generation and rank. Numbers of steps count from 1, so 0 is what nobody has written. State k is that
 * before step k. */
typedef Memory {
  byte slot[2];  /* private state k, in slot k % 2 */
  byte gradient; /* of which step */
  byte m;        /* state k of the optimizer's array */
  byte p;        /* state k of the parameters */
  byte redo;     /* new values of what is about to be written, M or P or both: state k */
  byte redo_key; /* the mark that they lead to; 0: they are not complete */
  byte mark
};
Memory memory[GENERATIONS * N];
#define OF(generation, rank) memory[(generation) * N + (rank)]

/* Waits of a generation: meeting, state restored, then those of the steps. */
byte arrived[GENERATIONS * N];
bool poison[GENERATIONS];

/* The launcher and its keeper. */
byte generation;
bool complete[GENERATIONS];
bool sent_complete[GENERATIONS]; /* by rank 0: in its socket, not yet read */
bool dead[N];
bool killed[N];                  /* by the launcher, because it does not ask */
bool asks[N];                    /* for the next generation */
bool ended[N];
byte losses;

/* Of the model alone. */
byte finished = 0; /* the last step after which some rank has gone on */

#if N == 2
#define ALL(of) (of(0) && of(1))
#define ANY(of) (of[0] || of[1])
#else
#define ALL(of) (of(0) && of(1) && of(2))
#define ANY(of) (of[0] || of[1] || of[2])
#endif
#define HAS_ARRIVED(i) arrived[mine * N + i] >= sequence
#define NEED_NOT_ASK(i) (asks[i] || ended[i] || dead[i])
#define HAS_ENDED(i) ended[i]
#define lost_one (ANY(dead) || generation > mine)

inline maybe_die() {
  if
  :: atomic { losses < LOSSES -> losses++; goto died }
  :: atomic { killed[me] -> goto died }
  :: true
  fi
}

/* Waits for all ranks of this generation. A loss ends it, also where all have arrived. */
inline barrier() {
  maybe_die();
  d_step { sequence++; arrived[mine * N + me] = sequence };
  if
  :: atomic { ALL(HAS_ARRIVED) -> skip }
  :: atomic { (lost_one || poison[mine]) -> poison[mine] = true; goto lost }
  :: atomic { !ALL(HAS_ARRIVED) && !lost_one && losses < LOSSES -> losses++; poison[mine] = true; goto lost } /* deadline */
  :: atomic { killed[me] -> goto died }
  fi
}

inline require_gradients(from, step) {
  d_step {
    i = 0;
    do
    :: i == N -> break
    :: else -> assert(OF(from, i).gradient == step); i++
    od
  }
}

inline put_m(at, value) {
  maybe_die();
  OF(at, me).m = TORN;
  maybe_die();
  OF(at, me).m = value
}

inline put_p(at, value) {
  maybe_die();
  OF(at, me).p = TORN;
  maybe_die();
  OF(at, me).p = value
}

/* Puts the new values in their place: M (`how` is DIRECTION), P (DONE; LAYERWISE), or both. */
inline put(at, value, how) {
#ifdef LAYERWISE
  if
  :: how == DIRECTION -> put_m(at, value)
  :: else -> put_p(at, value)
  fi;
#else
  put_m(at, value);
  put_p(at, value);
#endif
  maybe_die();
  OF(at, me).mark = MARKED(value - 1, how)
}

/* Writes the chunk, or a part of it. `at`: the generation whose memory it is in. */
inline write(at, step, how) {
  atomic {
    assert(OF(at, me).p == step && OF(at, me).m == OLD_M(step, how));
    require_gradients(at, step)
  };
  if
  :: DEFECT == 2
  :: else ->
     OF(at, me).redo_key = 0;
     maybe_die();
     OF(at, me).redo = TORN;
     maybe_die();
     OF(at, me).redo = step + 1;
     OF(at, me).redo_key = MARKED(step, how)
  fi;
  put(at, step + 1, how)
}

inline update(step) {
  if
  :: step == SKIPPED -> d_step { OF(mine, me).m++; OF(mine, me).p++ } /* the number of the state, not its values */
  :: else ->
#ifdef LAYERWISE
     write(mine, step, DIRECTION);
     barrier();
#endif
     write(mine, step, DONE)
  fi
}

/* The state that all ranks have published, in the generation `from`: the update before it has begun, or may begin. */
inline find_state(from) {
  d_step {
    state = NONE;
    begun = 0;
    i = 0;
    do
    :: i == N -> break
    :: else ->
       newest = (OF(from, i).slot[0] > OF(from, i).slot[1] -> OF(from, i).slot[0] : OF(from, i).slot[1]);
       state = (newest < state -> newest : state);
       begun = (OF(from, i).mark / 4 > begun -> OF(from, i).mark / 4 : begun);
       i++
    od;
    if
    :: DEFECT == 3 && state > begun + 1 -> state = begun + 1 /* nothing of that step was written: it is made again */
    :: else
    fi;
    newest = 0; begun = 0
  }
}

/* In the old memory: puts in its place what was ready, and finishes the update that leads to `state`. */
inline finish_update(from) {
  maybe_die();
  if
  :: atomic { (state == 1 || state == SKIPPED || state - 1 == SKIPPED) -> /* nothing to write */
       if :: state > 1 -> OF(from, me).m = state; OF(from, me).p = state :: else fi
     };
     how = DONE
  :: else ->
     if
     :: OF(from, me).redo_key / 4 + 1 == state && OF(from, me).redo_key > OF(from, me).mark ->
        assert(OF(from, me).redo == state);
        how = OF(from, me).redo_key % 4;
        put(from, state, how)
     :: else
     fi;
     how = (OF(from, me).mark / 4 + 1 == state -> OF(from, me).mark % 4 : 0)
  fi;
#ifdef LAYERWISE
  if
  :: how == 0 -> write(from, state - 1, DIRECTION)
  :: else
  fi;
  barrier(); /* all norms are known */
#endif
  if
  :: how != DONE -> write(from, state - 1, DONE)
  :: else
  fi;
  how = 0
}

inline copy_slice(from) {
  maybe_die();
  d_step {
    OF(mine, me).m = OF(from, me).m;
    OF(mine, me).p = OF(from, me).p;
    assert(OF(mine, me).m == state && OF(mine, me).p == state);
    assert(OF(from, me).slot[state % 2] == state); /* private state */
    assert(state > finished)
  }
}

proctype rank(byte me) {
  byte mine = NONE;  /* generation of this process's World */
  byte from = NONE;
  byte state = 0;
  byte sequence = 0;
  byte i = 0, newest = 0, begun = 0, how = 0;

begin:
  /* all is gone but the kept memory; ask the launcher */
  atomic { mine = generation; sequence = 0; from = NONE; state = 0; asks[me] = false };
  if
  :: DEFECT == 6 -> goto restore
  :: else
  fi;
meeting:
  maybe_die();
  d_step { sequence++; arrived[mine * N + me] = sequence };
  if
  :: ALL(HAS_ARRIVED)
  :: atomic { (generation > mine && DEFECT != 8) -> goto begin }
  :: atomic { killed[me] -> goto died }
  fi;
restore:
  atomic {
    from = mine;
    do
    :: from == 0 -> from = NONE; break
    :: else -> from--; if :: complete[from] -> break :: else fi
    od
  };
  if
  :: from == NONE -> d_step { assert(finished == 0); state = 1; OF(mine, me).m = 1; OF(mine, me).p = 1 }
  :: else -> find_state(from); finish_update(from); copy_slice(from)
  fi;
  if
  :: DEFECT == 7 && me == 0 -> sent_complete[mine] = true
  :: else
  fi;
  maybe_die();
  OF(mine, me).slot[state % 2] = state;
  OF(mine, me).mark = MARKED(state - 1, DONE);
  from = NONE;
  barrier();
  if
  :: me == 0 -> sent_complete[mine] = true
  :: else
  fi;

  do
  :: state > STEPS -> break
  :: else ->
     maybe_die();
     /* forward finds the parameters of this step in every slice */
     d_step {
       i = 0;
       do
       :: i == N -> break
       :: else -> assert(OF(mine, i).p == state); i++
       od
     };
     if
     :: DEFECT == 9 -> OF(mine, me).slot[(state + 1) % 2] = state + 1
     :: else
     fi;
     OF(mine, me).gradient = TORN;
     maybe_die();
     OF(mine, me).gradient = state;
     barrier(); /* 1 */
     if
     :: DEFECT == 1 -> OF(mine, me).slot[state % 2] = 0
     :: else
     fi;
     OF(mine, me).slot[(state + 1) % 2] = 0;
     maybe_die();
     OF(mine, me).slot[(state + 1) % 2] = state + 1;
     barrier(); /* 2 */
     update(state);
     barrier(); /* 3 */
     d_step { finished = (state > finished -> state : finished) };
     state++
  od;
  atomic { ended[me] = (generation == mine || DEFECT == 5); killed[me] = false };
  /* a process that has ended is started again if another dies before all have ended */
  if
  :: atomic { generation > mine && DEFECT != 5 -> goto begin }
  :: ALL(HAS_ENDED) -> goto out
  fi;

lost:
  atomic {
    asks[me] = (generation == mine);
    sequence = 0; state = 0; from = NONE; i = 0; newest = 0; begun = 0; how = 0
  };
  if
  :: atomic { generation > mine -> goto begin }
  :: atomic { killed[me] -> goto died }
  :: atomic { losses < LOSSES -> losses++; goto died }
  fi;

died:
  atomic {
    dead[me] = true; asks[me] = false; killed[me] = false;
    sequence = 0; state = 0; from = NONE; i = 0; newest = 0; begun = 0; how = 0
  };
  atomic { !dead[me] -> goto begin };
out:
  skip
}

/* What lies in its sockets is read before a generation begins. */
inline read_sockets() {
  if
  :: sent_complete[generation] -> complete[generation] = true
  :: else
  fi
}

inline next_generation() {
  generation++;
  i = 0;
  do
  :: i == N -> break
  :: else -> dead[i] = false; asks[i] = false; if :: DEFECT != 5 -> ended[i] = false :: else fi; i++
  od
}

proctype launcher() {
  byte i;
  do
  :: atomic { sent_complete[generation] && !complete[generation] -> read_sockets() }
  :: atomic { ANY(dead) && !ANY(killed) ->
       if :: DEFECT != 4 -> read_sockets() :: else fi;
       next_generation()
     }
  :: atomic { ANY(asks) && !ANY(dead) && !ANY(killed) && ALL(NEED_NOT_ASK) -> read_sockets(); next_generation() }
  :: atomic { ANY(asks) && !ANY(dead) && !ALL(NEED_NOT_ASK) ->
       /* a rank that does not ask is killed, and the next generation begins when it is dead */
       i = 0;
       do
       :: i == N -> break
       :: else -> if :: !asks[i] && !ended[i] && !dead[i] -> killed[i] = true :: else fi; i++
       od
     }
  :: ALL(HAS_ENDED) && !ANY(dead) -> break
  od
}

init {
  byte r = 0;
  atomic {
    do
    :: r < N -> run rank(r); r++
    :: else -> break
    od;
    run launcher()
  }
}
